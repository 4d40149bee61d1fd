"""Attentions without weights: functions of (q, k, v), and modules that only hold dropout."""

from strangers.cores import Core, write_core
from strangers.draw import Drawing
from strangers.pen import Pen, block

AXES = {"BHLD": 1, "BLHD": 2}


def name_of(drawing: Drawing) -> str:
    return drawing.pick(
        "function", "attention", "scaled_dot_product", "sdpa", "attend", "dot_product_attention"
    )


def _parts(drawing: Drawing, pen: Pen, *, module: bool) -> tuple[str, list[str]]:
    """The arguments, and the lines of the body."""
    d = drawing
    names = d.pick("names", "q k v", "q k v", "query key value", "Q K V").split()
    flag = d.pick("flag", "is_causal", "causal")
    given = list(names)
    if d.masked:
        given += [f"{d.mask_name}=None"]
    rate = d.dropout and not module
    if rate:
        given += [d.pick("rate", "dropout_p=0.0", "dropout=0.0")]
    if d.causal == "argument":
        given += [f"{flag}=False"]
    lines = [] if names == ["q", "k", "v"] else [f"q, k, v = {', '.join(names)}"]
    lines += _shared(d, pen)
    dim = d.pick("dim", "q.shape[-1]", "q.size(-1)")
    if d.pick("named", "yes", "no") == "yes":
        lines += [f"d_k = {dim}"]
        dim = "d_k"
    own_rate = given[len(names) + d.masked].split("=")[0] if rate else ""
    core = Core(
        d,
        pen,
        "q.shape[1]",
        dim,
        "",
        "",
        dropout=own_rate or ("self.dropout.p" if module and d.dropout else ""),
        training="" if rate else "self.training",
        module="dropout" if module and d.dropout and d.core != "sdpa" else "",
        causal={"never": "never", "built": "always", "argument": flag}[d.causal],
        unequal=True,
    )
    written = write_core(core)
    returned = "out, weights" if d.returns == "weights" and d.core != "sdpa" else "out"
    return ", ".join(given), [*lines, *written, f"return {returned}"]


def _shared(drawing: Drawing, pen: Pen) -> list[str]:
    """Keys of fewer heads, one copy for each query head."""
    if drawing.kind != "GQA":
        return []
    axis = AXES[drawing.layout]
    times = f"q.shape[{axis}] // k.shape[{axis}]"
    sizes = "1, times, 1, 1" if axis == 1 else "1, 1, times, 1"
    lines = [f"times = {times}", pen("", key_heads_swapped=f"k = k.flip({axis})")]
    for name in "kv":
        right = f"{name}.repeat_interleave(times, dim={axis})"
        tiled = f"{name}.repeat({sizes})"
        wrong = {"groups_tiled": tiled} | ({"values_tiled": tiled} if name == "v" else {})
        lines += [f"{name} = {pen(right, **wrong)}"]
    return lines


def write_function(drawing: Drawing, pen: Pen) -> str:
    """A function of queries, keys and values."""
    arguments, lines = _parts(drawing, pen, module=False)
    return block([f"def {name_of(drawing)}({arguments}):", block(lines, 1)]) + "\n"


def write_kernel(drawing: Drawing, pen: Pen) -> str:
    """A module of queries, keys and values, without weights."""
    arguments, lines = _parts(drawing, pen, module=True)
    method = block([f"def forward(self, {arguments}):", block(lines, 1)])
    constructor = ""
    if drawing.dropout:
        rate = drawing.pick("rate", "0.0", "0.1")
        start = pen("super().__init__()", super_missing="")
        lines = [start, "self.dropout = nn.Dropout(dropout)"]
        constructor = block([f"def __init__(self, dropout={rate}):", block(lines, 1)])
    inner = "\n\n".join(each for each in (constructor, method) if each)
    indented = "\n".join("    " + line if line else "" for line in inner.splitlines())
    return f"class {drawing.class_name}(nn.Module):\n{indented}\n"
