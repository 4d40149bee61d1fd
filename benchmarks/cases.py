"""The cases of the suite as rows of data: the least work of each, and its target."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

BOTH = ("float32", "bfloat16")
GQA, MHA, MQA = (32, 8), (32, 32), (32, 1)
LATENT = (512, 64)  # of MLA: the rank, which is the width of its values, and the rotary channels
BITS = {"int8 cache": 8, "int4 cache": 4, "MLA int8 latent": 8}  # a cached number, by kind
BEST = "the fastest peer"


@dataclass(frozen=True)
class Target:
    """regard's time at most `most` times that of `base`, the name of a contestant or BEST."""

    most: float
    base: str = BEST


NO_SLOWER = (Target(1.05),)  # where both run the same kernel, medians differ by a few percent


@dataclass(frozen=True)
class Case:
    """One row. `queries` of 0 means as many as keys; `quick` makes it representative."""

    kind: str
    keys: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    queries: int = 1
    batch: int = 1
    dtype: str = "float32"
    mask: str = "causal"
    quick: bool = False
    targets: tuple[Target, ...] = NO_SLOWER

    @property
    def name(self) -> str:
        """What distinguishes it from the others."""
        size = f"{self.keys // 1024}K" if self.keys >= 1024 else str(self.keys)
        batch = f" x{self.batch}" if self.batch > 1 else ""
        mask = "" if self.mask == "causal" and self.kind != "mask" else f" {self.mask}"
        heads = f"{self.heads} heads" if self.latent else f"{self.heads}/{self.kv_heads}"
        return f"{self.kind}{mask} {size}{batch}, {heads}, {self.dtype}"

    @property
    def latent(self) -> bool:
        return self.kind.startswith("MLA")

    @property
    def bits(self) -> int:
        """Bits of a cached number, 0 if it is of the case's dtype."""
        return BITS.get(self.kind, 0)

    @property
    def precision(self) -> str:
        return "fast" if self.kind == "prefill fast" else "strict"

    @property
    def length(self) -> int:
        return self.queries or self.keys

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def width(self) -> int:
        """Cached elements per token: keys and values, or a latent and its rotary key."""
        return sum(LATENT) if self.latent else 2 * self.kv_heads * self.head_dim

    @property
    def window(self) -> int:
        return max(1, self.keys // 4)

    def lengths(self) -> list[int]:
        """Tokens in each row of a batch: the longest is full, the shortest a quarter."""
        if self.batch == 1:
            return [self.keys]
        step = 0.75 / (self.batch - 1)
        return [max(1, int(self.keys * (1 - step * row))) for row in range(self.batch)]

    def nbytes(self) -> int:
        """Bytes of the keys and values, each read once."""
        tokens = sum(self.lengths()) if self.kind == "ragged" else self.batch * self.keys
        bits = self.bits or 8 * self.torch_dtype.itemsize
        return tokens * self.width * bits // 8

    def needs(self) -> int:
        """Bytes of the peer that needs most memory, roughly."""
        held = 5 * self.batch * self.keys * self.width * self.torch_dtype.itemsize  # and copies
        held = max(held, 1 << (32 if self.bits else 30))
        repeated = 0 if self.latent else 2 * self.batch * self.heads * self.keys * self.head_dim
        masks = 6 * self.length * self.keys if self.kind == "mask" else 0
        rebuilt = self.heads * self.keys * 1024 if self.kind == "MLA layer" else 0
        wide = 4 * (repeated + rebuilt) * (4 if self.kind == "backward" else 1)
        return held + wide + masks * self.batch

    def tiny(self) -> "Case":
        """The same case in a tiny size, to test the script."""
        heads = max(1, self.heads // 8)
        return replace(
            self,
            keys=max(16, self.keys // 128),
            heads=heads,
            kv_heads=max(1, self.kv_heads * heads // self.heads),
            head_dim=16,
            queries=self.queries and min(self.queries, 4),
            batch=min(self.batch, 3),
        )

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return {k: v for k, v in asdict(self).items() if k not in ("quick", "targets")}


def rows(
    kind: str,
    *keys: int,
    heads: tuple[int, int] = GQA,
    dtypes: tuple[str, ...] = BOTH,
    quick: tuple[tuple[int, str], ...] = (),
    **more: Any,
) -> list[Case]:
    """A case for each dtype and number of keys; those in `quick` are representative."""
    return [
        Case(kind, n, *heads, dtype=dtype, quick=(n, dtype) in quick, **more)
        for dtype in dtypes
        for n in keys
    ]


MASKS = ("causal", "window", "documents", "prefix", "padding", "blocks")
ROWS = [
    *rows("decode", 1024, 4096, 16384, 65536, quick=((4096, "float32"), (4096, "bfloat16"))),
    *rows("decode", 4096, 16384, heads=MHA, quick=((4096, "bfloat16"),)),
    *rows("decode", 4096, 16384, heads=MQA),
    *(
        case
        for batch in (1, 8, 32)
        for case in rows(
            "ragged", 4096, batch=batch, quick=((4096, "float32"),) if batch == 8 else ()
        )
    ),
    *rows("int8 cache", 4096, 16384, quick=((4096, "float32"),)),
    *rows("int4 cache", 4096, 16384, quick=((4096, "float32"),)),
    *rows("MLA absorbed", 4096, 16384, heads=(16, 1), quick=((4096, "float32"),)),
    *rows("MLA absorbed", 4096, 16384, heads=(128, 1)),
    *rows("MLA int8 latent", 4096, 16384, heads=(16, 1), quick=((4096, "float32"),)),
    *rows("MLA layer", 1024, 4096, heads=(16, 16), quick=((1024, "float32"),)),
    *rows("MLA layer", 4096, heads=(128, 128)),
    *rows(
        "prefill", 512, 1024, 2048, 4096, 8192, queries=0,
        quick=((1024, "float32"), (1024, "bfloat16")),
    ),
    *rows("prefill fast", 2048, 4096, dtypes=("bfloat16",), queries=0,
          quick=((2048, "bfloat16"),)),
    *rows("prefill", 2048, heads=MHA, queries=0),
    *rows("prefill", 2048, heads=MQA, queries=0),
    *(
        case
        for mask in MASKS
        for case in rows("mask", 4096 if mask == "window" else 2048, heads=(16, 4), queries=0,
                         batch=4 if mask == "padding" else 1, mask=mask)
    ),
    *rows("mask", 1024, heads=(16, 4), dtypes=("float32",), queries=0, mask="documents",
          quick=((1024, "float32"),)),
    *rows("backward", 512, 2048, queries=0, quick=((512, "float32"),)),
    *rows("backward", 2048, heads=MHA, queries=0),
    *rows("layer decode", 1024, 4096, 16384, heads=(16, 4), quick=((4096, "float32"),)),
    *rows("layer prefill", 1024, heads=(16, 4), queries=0),
    *rows("layer without positions", 1024, heads=(16, 16), queries=0, quick=((1024, "float32"),)),
]  # fmt: skip

FLOAT, HALF, INT8 = "regard, float32 keys", "regard, bfloat16 keys", "regard, int8 keys"
TARGETS = {
    "decode 4K, 32/8, float32": (Target(0.40, "sdpa"),),
    "decode 16K, 32/8, float32": (Target(0.20, "sdpa"),),
    "decode 4K, 32/8, bfloat16": (Target(0.14, "sdpa"),),
    "decode 16K, 32/8, bfloat16": (Target(0.13, "sdpa"),),
    "decode 4K, 32/32, bfloat16": (Target(0.40, "sdpa"),),
    "int8 cache": (Target(0.45, FLOAT), Target(0.8, HALF)),
    "int4 cache": (Target(1.0, INT8),),
    "MLA int8 latent": (Target(0.6, FLOAT),),
    "layer decode 1K, 16/4, float32": (Target(0.8, "transformers, static cache"),),
    "prefill 2K, 32/8, bfloat16": (Target(0.7, "sdpa"),),
    "prefill 4K, 32/8, bfloat16": (Target(0.7, "sdpa"),),
    "prefill 8K, 32/8, bfloat16": (Target(0.7, "sdpa"),),
    "prefill fast": (Target(0.4, "sdpa"),),
    "mask documents": (Target(1.0),),
    "mask blocks": (Target(1.02),),
    "mask padding": (Target(0.6),),
}  # by the beginning of a case's name; NO_SLOWER elsewhere


def targets_of(name: str) -> tuple[Target, ...]:
    """The targets of a case."""
    return next((each for start, each in TARGETS.items() if name.startswith(start)), NO_SLOWER)


CASES = [replace(case, targets=targets_of(case.name)) for case in ROWS]
