"""The overview of all heads as one small picture: layers down, heads across."""

import base64
import struct
import zlib

import torch
from jaxtyping import Float
from torch import Tensor

INK = (36, 92, 168)  # red, green, blue of a weight of 1; it reads on light and on dark pages
GAP = 2  # pixels between two heads


def sheet(overview: Float[Tensor, "layers heads rows columns"]) -> bytes:
    """A PNG of all heads, a pixel a cell. Opacity is the square root of a cell, so that attention
    that is spread over many keys is visible beside a sink; the page shows through where it is 0.

    Examples:
        >>> import torch
        >>> sheet(torch.eye(4).expand(2, 3, 4, 4))[1:4]
        b'PNG'
    """
    return _png((cells(overview).clamp(0, 1).sqrt() * 255).round().to(torch.uint8))


def cells(overview: Float[Tensor, "layers heads rows columns"]) -> Float[Tensor, "down across"]:
    """The cells of all heads in one plane, with gaps of 0 between heads."""
    spaced = torch.nn.functional.pad(overview, (0, GAP, 0, GAP))
    return spaced.transpose(1, 2).flatten(2, 3).flatten(0, 1)[:-GAP, :-GAP].contiguous()


def data_address(png: bytes) -> str:
    """The address of a picture that holds the picture itself."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _png(image: Tensor) -> bytes:
    """A PNG of one colour, whose opacity is `image` (W3C's PNG, third edition)."""
    height, width = image.shape
    rows = torch.nn.functional.pad(image, (1, 0))  # every row begins with its filter: 0, none
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            _chunk(b"PLTE", bytes(INK) * 256),
            _chunk(b"tRNS", bytes(range(256))),
            _chunk(b"IDAT", zlib.compress(bytes(rows.flatten().tolist()), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
