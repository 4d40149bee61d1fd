"""The blocks of docs/tutorials.md: run at other sizes, in other dtypes, and with a mistake in them.

A block begins with its sizes, computes `expected` as the tutorial does and `out` with regard, and
ends in an assertion, which is left out here.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pages import FENCE, read

PAGE = "docs/tutorials.md"
SDPA = "Scaled dot-product attention"
MASKS = "Masks"
HEAD = "Single-head self-attention with a fused projection"
MHA = "Multi-head attention"
CACHED = "Multi-head attention with a KV cache"
MQA = "Multi-query attention"
GQA = "Grouped-query attention with RoPE"
ROPE = "RoPE in both layouts"
MLA = "MLA, plain"
V3 = "MLA as in DeepSeek-V3"
INFERENCE = "MLA at inference"
SIZES = re.compile(r"^([A-Z](?:, [A-Z])+) = [\d, ]+", re.MULTILINE)


def sections(page: str = PAGE) -> dict[str, str]:
    """The sections of the page that show code, by heading."""
    found = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", read(page), re.DOTALL | re.MULTILINE)
    return {heading: text for heading, text in found if "```python" in text}


def mistakes(page: str = PAGE) -> list[tuple[str, str]]:
    """The mistakes that the page names: the section, and the words in bold."""
    return [
        (heading, name)
        for heading, text in sections(page).items()
        for name in re.findall(r"^- \*\*(.*?)\.?\*\*", FENCE.sub("", text), re.MULTILINE)
    ]


def code_of(section: str, edits: tuple[tuple[str, str], ...] = (), **sizes: int) -> str:
    """The block of a section without its assertions, with other sizes, and lines replaced."""
    (match,) = FENCE.finditer(re.sub(r"```text.*?```", "", sections()[section], flags=re.DOTALL))
    code = re.sub(r"^assert .*\n", "", match[4], flags=re.MULTILINE)
    for old, new in edits:
        assert old in code, f"{section}: no line has {old!r}"
        code = code.replace(old, new)
    return SIZES.sub(lambda found: _sized(found, sizes), code, count=1)


def _sized(found: re.Match[str], sizes: dict[str, int]) -> str:
    names = found[1].split(", ")
    numbers = map(int, re.findall(r"\d+", found[0]))
    given = dict(zip(names, numbers, strict=True))
    assert sizes.keys() <= given.keys()
    return f"{found[1]} = {', '.join(map(str, {**given, **sizes}.values()))}"


def run(
    section: str,
    *edits: tuple[str, str],
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **sizes: int,
) -> dict[str, Any]:
    """The names that the block defines."""
    default, names = torch.get_default_dtype(), {"__name__": "__main__"}
    try:
        torch.set_default_dtype(dtype)
        torch.manual_seed(seed)
        exec(compile(code_of(section, edits, **sizes), section, "exec"), names)
    finally:
        torch.set_default_dtype(default)
    return names


def difference(names: dict[str, Any]) -> float:
    """The largest difference between `expected` and `out`; booleans differ by 1."""
    pairs = zip(listed(names["expected"]), listed(names["out"]), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def listed(value: Tensor | list[Tensor]) -> list[Tensor]:
    return value if isinstance(value, list) else [value]


class Edit(NamedTuple):
    """A line of the tutorial's code with the mistake in it, and sizes that show or hide it."""

    old: str
    new: str
    sizes: Mapping[str, int] = MappingProxyType({})
    hidden_by: tuple[Mapping[str, int], ...] = ()
    raises: str = ""


EDITS = {
    (MASKS, '"May attend" masks combined by `|`'): Edit("padding & causal", "padding | causal"),
    (HEAD, "`super().__init__()` forgotten"): Edit(
        "        super().__init__()\n", "", raises="cannot assign module before Module.__init__()"
    ),
    (HEAD, "Thirds in another order"): Edit(
        "q, k, v = self.qkv(x)", "k, q, v = self.qkv(x)", hidden_by=({"L": 1},)
    ),
    (MHA, "Heads merged without a transpose"): Edit(
        ".transpose(1, 2).reshape(B, L, E)", ".reshape(B, L, E)", hidden_by=({"H": 1},)
    ),
    (MHA, "A mask of 0 and 1 that is added"): Edit(
        'scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))',
        "scores + mask[:, None, None, :]",
    ),
    (CACHED, "No causal mask once there is a past"): Edit(
        "total - new + 1).bool()",
        "total - new + 1).bool() & (past_key_value is None)",
        hidden_by=({"L": 5},),  # chunks of 3, 1 and 1
    ),
    (CACHED, "A causal mask of the new tokens from the top left"): Edit("total - new + 1", "1"),
    (GQA, "`repeat` instead of `repeat_interleave`"): Edit(
        ".repeat_interleave(self.group, dim=1)",
        ".repeat(1, self.group, 1, 1)",
        hidden_by=({"G": 1}, {"G": 6}),
    ),
    (MLA, "Up-projections joined as blocks"): Edit(
        "by_head(w_uk, w_uv)", "torch.cat([w_uk, w_uv])", hidden_by=({"H": 1},)
    ),
    (MLA, "The scale of one part"): Edit(
        "is_causal=True", "is_causal=True, scale=D ** -0.5", {"L": 2}, hidden_by=({"L": 1},)
    ),
    (V3, "The norm over latent and rotary key"): Edit(
        "latent, k_rope = w.kv_a_proj_with_mqa(x).split([C, R], dim=-1)",
        "latent, k_rope = F.rms_norm(w.kv_a_proj_with_mqa(x), [C + R]).split([C, R], dim=-1)",
    ),
    (V3, "Halves for a checkpoint of pairs"): Edit(
        "rotary.rotate", "Rotary(R).rotate", {"L": 3}, hidden_by=({"L": 1},)
    ),
    (V3, "Heads merged by the size of keys"): Edit(
        ".flatten(2)",
        ".reshape(B, L, H * (D + R))",
        hidden_by=({"V": 14},),
        raises="is invalid for input of size",
    ),
    (INFERENCE, "The scale of the absorbed width"): Edit("(D + R) ** 0.5", "(C + R) ** 0.5"),
    (INFERENCE, "Latents cached before the norm"): Edit("w.kv_a_layernorm(latent)", "latent"),
}
OWN: dict[tuple[str, str], Callable[[], None]] = {}


def shows(section: str, name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """The decorated function asserts what the page says of this mistake."""

    def register(test: Callable[[], None]) -> Callable[[], None]:
        OWN[section, name] = test
        return test

    return register
