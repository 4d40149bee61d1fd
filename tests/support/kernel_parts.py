"""What the parts of the kernel are tested with: a small tile, rows of numbers and of codes."""

import numba
import numpy as np

from kernel_checks import as_bfloat16, has_fma, widened
from regard.ops.kernels.specification import Specification
from regard.ops.kernels.tiles import BFLOAT16, FLOAT32, Tile


def tile_of(lanes, **changes):
    """A tile whose rows are three vectors: a step of two, and one more."""
    form = BFLOAT16 if changes.get("half") else FLOAT32
    sizes = lanes, 2, 3 * lanes, 3 * lanes, 32
    plain = Tile(*sizes, half=False, joined=False, biased=True, k=form, v=form)
    return plain._replace(**changes)


def run(intrinsic, tile, *arguments):
    """An intrinsic called from compiled code; arrays are passed as their addresses."""

    @numba.njit
    def call(*values):
        return intrinsic(tile, *values)

    return call(*(x.ctypes.data if isinstance(x, np.ndarray) else x for x in arguments))


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def held(tile, x):
    """Rows in the order in which the kernel holds them."""
    steps = Specification(tile).columns(x.shape[-1])
    return np.concatenate([x[..., step] for step in steps], -1)


def stored(tile, x):
    """Rows as memory holds them, and their values in float32."""
    return (as_bfloat16(x), widened(as_bfloat16(x))) if tile.half else (x, x)


def coded(tile, form, width, count):
    """Rows of random codes, the words of their scales, and the values that they stand for."""
    codes = np.random.default_rng(0).integers(0, 256, (count, form.bytes(width)), np.uint8)
    scales = as_bfloat16(random(count, 2 * -(-width // form.group)))
    twin = Specification(tile, has_fma())
    return codes, scales, twin.dequantized(codes, widened(scales), form, width)
