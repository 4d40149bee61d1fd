"""The kernels for latents are compiled for several GPUs, without one. `tests/gpu` runs them."""

import pytest

triton = pytest.importorskip("triton", reason="torch brings triton for GPUs only")
latents = pytest.importorskip("regard.ops.kernels.latents")

SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
ADDRESSES = {"q": "*bf16", "k": "*bf16", "out": "*fp32", "lse": "*fp32"}
NUMBERS = ("rows", "groups", "keys", "share", "q_batch", "q_row", "k_batch", "k_group", "k_key")


@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize("capability", SHARED)
def test_tiles_fit_the_shared_memory(capability, rows):
    """Bytes that a program may share, by the tables of the CUDA C++ Programming Guide."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    block, tile, warps, stages = latents.settings(rows, SHARED[capability])
    sizes = {"WIDTH": 576, "VALUES": 512, "FIRST": 512, "REST": 64}
    sizes |= {"ROWS": block, "KEYS": tile, "STAGES": stages}
    kinds = {**ADDRESSES, "factor": "fp32", **dict.fromkeys(NUMBERS, "i32")}
    kinds |= dict.fromkeys(sizes, "constexpr")
    source = ASTSource(latents._attend, signature=kinds, constexprs=sizes)
    made = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": warps})
    assert made.metadata.shared <= SHARED[capability]
