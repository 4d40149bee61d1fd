"""The inner part by `F.scaled_dot_product_attention`."""

from strangers.draw import Drawing
from strangers.inner import OPPOSITE, Core, causal_pattern, four_axes, rows, under, visible
from strangers.pen import block


def by_kernel(core: Core) -> list[str]:
    pen, drawing = core.pen, core.drawing
    arguments = []
    lines = _joined_masks(core)
    if drawing.masked or core.second or core.causal not in ("never", "plain"):
        arguments += ["attn_mask=allowed"]
    if core.causal == "plain":
        arguments += [pen("is_causal=True", causal_missing="")]
    if core.dropout:
        always = f"dropout_p={core.dropout}"
        if core.training:
            right = f"{always} if {core.training} else 0.0"
            always = pen(right, dropout_in_eval=always)
        arguments += [always]
    d = core.dim
    width = {"scale_of_width": f"scale={core.width} ** -0.5"} if core.width else {}
    if not drawing.qk_norm:  # normalised queries and keys may do without a scale
        width["scale_missing"] = "scale=1.0"
    arguments += [pen("", scale_inverse=f"scale={d} ** -1.0", **width)]
    inner = {"scale_twice": f"q * {d} ** -0.5"}
    if drawing.kind != "single":
        inner["scores_rolled"] = "q.roll(1, 1)"
    # torch's kernel does not check sizes, and reads memory that is not its own.
    others = {} if drawing.family == "latent" else {"values_as_keys": "v"}
    others |= {} if core.unequal else {"queries_as_keys": "q"}
    q, k = pen("q", **inner), pen("k", **others)
    v = pen("v", **({} if drawing.family == "latent" else {"keys_as_values": "k"}))
    call = f"{q}, {k}, {v}"
    rest = "".join(f", {each}" for each in arguments if each)
    return [*lines, f"out = F.scaled_dot_product_attention({call}{rest})"]


def _joined_masks(core: Core) -> list[str]:
    """Lines that join masks and causal pattern in `allowed`."""
    pen, drawing, mask = core.pen, core.drawing, core.mask
    lines: list[str] = []
    needed = drawing.masked or core.second or core.causal != "never"
    if not needed or core.causal == "plain":
        return []
    if drawing.masked:
        own = four_axes(core, pen)
        if drawing.mask == "additive":
            right = f"{own}.to(q.dtype)"
            line = pen(
                right, mask_ignored="None", mask_polarity=f"-{right}",
                mask_fill_small=f"{right}.clamp(min=-10.0)",
            )  # fmt: skip
        else:
            kind = pen(drawing.mask, mask_polarity=OPPOSITE[drawing.mask])
            line = pen(visible(kind, own, drawing), mask_ignored="None")
        if drawing.required_mask:
            lines += [f"allowed = {line}"]
        else:
            given = f"{mask} is not None"
            if core.causal != "never":
                off = "False" if core.causal == "always" else f"{given} and not {core.causal}"
                given = pen(given, mask_ignored_with_causal=off)
            lines += ["allowed = None", f"if {given}:", f"    allowed = {line}"]
    elif core.second or core.causal != "always":
        lines += ["allowed = None"]
    if core.second:
        lines += _second_of_sdpa(core)
    if core.causal != "never":
        lines += _causal_of_sdpa(core)
    return lines


def _second_of_sdpa(core: Core) -> list[str]:
    pen, drawing = core.pen, core.drawing
    own = rows(core)
    cells = visible(drawing.second, own, drawing)
    lines = [f"rows = {cells}", f"allowed = {_joined(drawing, 'rows')}"]
    return under(f"{core.second} is not None", [pen(block(lines), second_mask_ignored="pass")])


def _joined(drawing: Drawing, other: str) -> str:
    """An expression of `allowed` and a boolean mask together."""
    if drawing.mask == "additive":
        zeros = f"torch.zeros({other}.shape, dtype=q.dtype, device=q.device)"
        whole = f"(allowed if allowed is not None else {zeros})"
        return f'{whole}.masked_fill(~{other}, float("-inf"))'
    return f"{other} if allowed is None else allowed & {other}"


def _causal_of_sdpa(core: Core) -> list[str]:
    lines = [f"causal = {causal_pattern(core)}", f"allowed = {_joined(core.drawing, 'causal')}"]
    if not core.drawing.masked and not core.second:
        lines = [f"allowed = {causal_pattern(core)}"]
    condition = core.causal
    if core.drawing.masked and not core.drawing.required_mask:
        given = f"{core.mask} is None"
        both = given if condition == "always" else f"{condition} and {given}"
        condition = core.pen(condition, mask_switches_causal_off=both)
    return under(condition, lines)
