"""What the inner part is written from, and how masks and the causal rule are spelled."""

from dataclasses import dataclass

from strangers.draw import Drawing
from strangers.pen import Pen, block

MIN = "torch.finfo(scores.dtype).min"


@dataclass(frozen=True)
class Core:
    """What the inner part is written from.

    Attributes:
        drawing, pen: the choices, and how they are written.
        heads, dim: expressions for the number of heads and their width.
        width: an expression for the whole width.
        scale: an expression for the scale, or "" if it is to be spelled out.
        dropout: an expression for the probability, or "" without dropout.
        training: an expression that says whether dropout is on, or "" if the caller says it by
            the probability.
        module: the name of a module for dropout, or "".
        causal: the condition under which later keys are hidden: "never", "always", or an
            expression.
        buffer: the name of a buffer that holds the causal pattern, or "".
        second: the name of the mask of rows, or "".
        unequal: whether keys and queries can differ in number.
    """

    drawing: Drawing
    pen: Pen
    heads: str
    dim: str
    width: str
    scale: str
    dropout: str = ""
    training: str = "self.training"
    module: str = ""
    causal: str = "never"
    buffer: str = ""
    second: str = ""
    unequal: bool = False

    @property
    def mask(self) -> str:
        return self.drawing.mask_name


def hidden(kind: str, mask: str, drawing: Drawing) -> str:
    """An expression that is true where a mask of this kind hides."""
    return {
        "zeros hide": f"{mask} == 0",
        "ones hide": drawing.pick("hidden", f"{mask} == 1", f"{mask}.bool()", f"{mask} != 0"),
        "keep": drawing.pick("hidden", f"~{mask}", f"{mask}.logical_not()", f"{mask} == 0"),
        "hide": mask,
    }[kind]


def visible(kind: str, mask: str, drawing: Drawing) -> str:
    """An expression that is true where a mask of this kind keeps."""
    return {
        "zeros hide": drawing.pick("visible", f"{mask} != 0", f"{mask}.bool()"),
        "ones hide": f"{mask} == 0",
        "keep": mask,
        "hide": f"~{mask}",
    }[kind]


OPPOSITE = {
    "zeros hide": "ones hide", "ones hide": "zeros hide", "keep": "hide", "hide": "keep",
}  # fmt: skip


def four_axes(core: Core, pen: Pen) -> str:
    """The mask with the four axes of the scores, with faults in how it is laid out."""
    mask, shape = core.mask, core.drawing.mask_shape
    if core.drawing.kind == "single":
        full = {"LS": mask, "BLS": mask, "BS": f"{mask}[:, None, :]"}[shape]
    else:
        full = _with_heads(core)
    if core.drawing.core == "grouped":  # [B, G, H / G, L, S]
        full = f"{full}.unsqueeze(-3)" if shape in ("B1LS", "BLS", "BS") else full
    wrong = {}
    if shape != "LS":
        wrong |= {"mask_of_first_row": f"{full}[:1]", "mask_of_neighbour": f"{full}.roll(1, 0)"}
    if shape != "BS" and not (core.drawing.core == "sdpa" and core.unequal):
        # torch's kernel does not check sizes, and reads memory that is not its own.
        wrong["mask_transposed"] = f"{full}.transpose(-2, -1)"
    return pen(full, **wrong)


def rows(core: Core) -> str:
    """The mask of rows with the axes of the scores."""
    return (
        f"{core.second}[:, None, :]"
        if core.drawing.kind == "single"
        else f"{core.second}[:, None, None, :]"
        if core.drawing.core != "grouped"
        else f"{core.second}[:, None, None, None, :]"
    )


def _with_heads(core: Core) -> str:
    mask = core.mask
    return {
        "LS": mask,
        "B1LS": mask,
        "BLS": core.drawing.pick("axes", f"{mask}.unsqueeze(1)", f"{mask}[:, None]"),
        "BS": core.drawing.pick(
            "axes", f"{mask}[:, None, None, :]", f"{mask}.unsqueeze(1).unsqueeze(2)"
        ),
    }[core.drawing.mask_shape]


def causal_pattern(core: Core) -> str:
    """An expression of the causal pattern, true where visible, for L queries and S keys."""
    pen = core.pen
    if core.drawing.causal == "blocks":
        return "block_mask(L, self.window, q.device)"
    if core.buffer:
        own = f"self.{core.buffer}[:L, :S]"
        return core.drawing.pick("buffer", f"{own}.bool()", f"{own} == 1", f"({own} > 0)")
    ones = "torch.ones(L, S, dtype=torch.bool, device=q.device)"
    if not core.unequal:
        right = core.drawing.pick("tril", f"{ones}.tril()", f"torch.tril({ones})")
        return pen(right, causal_future=f"{ones}.tril(1)", causal_own_hidden=f"{ones}.tril(-1)")
    return pen(
        f"{ones}.tril(S - L)",
        causal_future=f"{ones}.tril(S - L + 1)",
        causal_own_hidden=f"{ones}.tril(S - L - 1)",
        causal_corner=f"{ones}.tril()",
    )


def sizes(core: Core) -> list[str]:
    """Lines that count queries and keys, where the causal pattern needs them."""
    axis = "1" if core.drawing.core == "tokens first" else "-2"
    if core.causal in ("never", "plain"):
        return []
    return [f"L, S = q.size({axis}), k.size({axis})"]


def under(condition: str, lines: list[str]) -> list[str]:
    """Lines under a condition: "always" needs none."""
    if condition == "always":
        return lines
    return [f"if {condition}:", block(lines, 1)]
