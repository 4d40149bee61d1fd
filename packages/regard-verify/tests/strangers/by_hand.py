"""The inner part in single steps: scores, masks, softmax, weighted sum."""

from strangers.inner import (
    MIN,
    OPPOSITE,
    Core,
    causal_pattern,
    four_axes,
    hidden,
    rows,
    under,
)
from strangers.pen import Pen, block


def by_hand(core: Core) -> list[str]:
    pen, flat = core.pen, core.drawing.core == "flat"
    masked = [*_mask(core), *_causal(core)]
    if (
        core.drawing.mask not in ("none", "additive")
        and core.drawing.pick("first", "c", "m") == "c"
    ):
        masked = [*_causal(core), *_mask(core)]
    if flat and core.drawing.masked and _by_rows(core):
        return [*_scores(core), *_repeated(core), *_weights(core), *_dropout(core), *_values(core)]
    lines = _scores(core)
    if core.drawing.kind != "single":
        rolled = "scores.unflatten(0, (B, -1)).roll(1, 1).flatten(0, 1)"
        rolled = rolled if flat else "scores.roll(1, 1)"
        lines += [pen("", scores_rolled=f"scores = {rolled}")]
    if flat and masked:
        masked = [
            f"scores = scores.view(-1, {core.heads}, *scores.shape[1:])",
            *masked,
            "scores = scores.flatten(0, 1)",
        ]
    return [*lines, *masked, *_weights(core), *_dropout(core), *_values(core)]


def _by_rows(core: Core) -> bool:
    """Whether a mask is repeated for the heads, where heads are rows of the batch."""
    plain = core.causal == "never" and not core.second and not core.drawing.required_mask
    return (
        plain
        and core.drawing.mask_shape == "BLS"
        and core.drawing.mask != "additive"
        and core.drawing.pick("rows", "repeat", "view") == "repeat"
    )


def _repeated(core: Core) -> list[str]:
    mask, pen, drawing = core.mask, core.pen, core.drawing
    own = pen(
        f"{mask}.repeat_interleave({core.heads}, dim=0)",
        mask_repeated=f"{mask}.repeat({core.heads}, 1, 1)",
    )
    kind = pen(drawing.mask, mask_polarity=OPPOSITE[drawing.mask])
    right = f"scores = scores.masked_fill({hidden(kind, own, drawing)}, {_fill(core)})"
    return [f"if {mask} is not None:", f"    {pen(right, mask_ignored='pass')}"]


def scale_text(core: Core) -> str:
    """What the scores are multiplied by, after an operator."""
    pen, d, pick = core.pen, core.dim, core.drawing.pick
    if core.scale:
        return f" * {core.scale}"
    wrong = {
        "scale_missing": "",
        "scale_inverse": f" * {d} ** -1.0",
        "scale_of_width": f" / math.sqrt({core.width})",
    }
    if not core.width:
        del wrong["scale_of_width"]
    if core.drawing.qk_norm:  # normalised queries and keys may do without a scale
        del wrong["scale_missing"]
    return pen(pick("scale", f" / math.sqrt({d})", f" * {d} ** -0.5", f" / ({d} ** 0.5)"), **wrong)


def _scores(core: Core) -> list[str]:
    pen, pick, style = core.pen, core.drawing.pick, core.drawing.core
    latent = core.drawing.family == "latent"  # whose keys and values differ in width
    wrong = {} if latent else {"values_as_keys": "v"}
    wrong |= {} if style == "grouped" else {"queries_as_keys": "q"}
    k = pen("k", **wrong)
    letters = pick("ein", "blhd,bshd->bhls", "bqhd,bkhd->bhqk")
    product = {
        "softmax": pick(
            "product",
            f"q @ {k}.transpose(-2, -1)",
            f"torch.matmul(q, {k}.transpose(-1, -2))",
            f"(q @ {k}.mT)",
        ),
        "einsum": f'torch.einsum("{_letters(core, "bhld,bhsd->bhls")}", q, {k})',
        "tokens first": f'torch.einsum("{letters}", {pick("list", "q, K", "[q, K]")})',
        "flat": f"torch.bmm(q, {k}.transpose(1, 2))",
        "grouped": f'torch.einsum("bghld,bgsd->bghls", q, {k})',
    }[style].replace("K", k)
    first = core.drawing.scale_first
    lines = [f"q = q{scale_text(core)}"] if first else []
    lines += [f"scores = {product}{'' if first else scale_text(core)}"]
    again = core.scale or f"{core.dim} ** -0.5"
    return [*lines, pen("", scale_twice=f"scores = scores * {again}")]


def _letters(core: Core, letters: str) -> str:
    return letters.replace("h", "") if core.drawing.kind == "single" else letters


def _fill(core: Core) -> str:
    """What hidden scores are filled with; -inf where nan_to_num follows."""
    infinite = core.drawing.mask != "additive"
    forms = [MIN, MIN, 'float("-inf")', "-1e9"] if infinite else [MIN]
    return core.drawing.pick("fill", *forms)


def _mask(core: Core) -> list[str]:
    pen, drawing, mask = core.pen, core.drawing, core.mask
    if drawing.mask == "none":
        return []
    fill = pen(_fill(core), mask_fill_small="-10.0")
    if drawing.mask == "additive":
        own = four_axes(core, pen)
        added = f"scores = scores + {own}"
        if drawing.rope != "given":  # a row of -inf must not become NaN
            added = drawing.pick(
                "floor",
                f"scores = (scores + {own}).clamp(min={MIN})",
                f"scores = torch.clamp(scores + {own}, min={MIN})",
            )
        line = pen(
            added,
            mask_ignored="pass",
            mask_polarity=f"scores = scores - {own}",
            mask_fill_small=f"scores = scores + {own}.clamp(min=-10.0)",
        )
        before = pen("", mask_in_place=f"{mask}.clamp_(min=-1e4)")
    else:
        own = four_axes(core, pen)
        cells = hidden(pen(drawing.mask, mask_polarity=OPPOSITE[drawing.mask]), own, drawing)
        line = pen(
            f"scores = scores.masked_fill({cells}, {fill})",
            mask_ignored="pass",
            **({} if drawing.core == "flat" else {"mask_after_softmax": "pass"}),
        )
        before = ""
    given = f"{mask} is not None"
    condition = "always" if drawing.required_mask else given
    if core.causal != "never":
        off = given if core.causal == "always" else f"{given} and not {core.causal}"
        condition = pen(given, mask_ignored_with_causal="False" if core.causal == "always" else off)
    lines = under(condition, [before, line])
    if core.second:
        own = rows(core)
        cells = hidden(drawing.second, own, drawing)
        fill_line = pen(
            f"scores = scores.masked_fill({cells}, {_fill(core)})", second_mask_ignored="pass"
        )
        lines += under(f"{core.second} is not None", [fill_line])
    return lines


def _causal(core: Core) -> list[str]:
    if core.causal == "never":
        return []
    pen, pattern = core.pen, causal_pattern(core)
    corner = "1 + S - L" if core.unequal else "1"
    default = f"scores = scores + torch.full((L, S), {MIN}).triu({corner})"
    line = pen(
        core.drawing.pick(
            "causal",
            f"scores = scores.masked_fill(~({pattern}), {_fill(core)})",
            f"scores = torch.where({pattern}, scores, {_fill(core)})",
        ),
        **({} if core.drawing.causal == "blocks" else {"causal_default_dtype": default}),
    )
    condition = core.causal
    if core.drawing.masked and not core.drawing.required_mask:
        given = f"{core.mask} is None"
        both = given if condition == "always" else f"{condition} and {given}"
        condition = pen(condition, mask_switches_causal_off=both)
    return under(condition, [line])


def _weights(core: Core) -> list[str]:
    pen, pick = core.pen, core.drawing.pick
    wrong = {"softmax_over_queries": "-2"}
    if core.drawing.core != "flat" and core.drawing.kind != "single":
        wrong["softmax_over_heads"] = "1"
    axis = pen("-1", **wrong)
    soft = pick(
        "soft",
        f"scores.softmax(dim={axis})",
        f"F.softmax(scores, dim={axis})",
        f"torch.softmax(scores, dim={axis})",
    )
    soft = pen(
        soft,
        softmax_half="scores.half().softmax(dim=-1).to(scores.dtype)",
        softmax_unshifted="scores.exp() / scores.exp().sum(dim=-1, keepdim=True)",
    )
    lines = [f"weights = {soft}"]
    empty = core.drawing.masked or core.second or (core.causal != "never" and core.unequal)
    if '"-inf"' in _fill(core) and empty:  # a row may be hidden as a whole
        lines += [pick("nan", "weights = torch.nan_to_num(weights)",
                       "weights = weights.masked_fill(weights.isnan(), 0.0)")]  # fmt: skip
    lines += [
        pen(
            "",
            weights_over_queries="weights = weights / weights.sum(dim=-2, keepdim=True)",
            weights_with_epsilon="weights = weights / (weights.sum(dim=-1, keepdim=True) + 0.01)",
            weights_detached="weights = weights.detach()",
        )
    ]
    if core.drawing.masked and core.drawing.mask != "additive" and core.drawing.core != "flat":
        cells = hidden(core.drawing.mask, four_axes(core, Pen()), core.drawing)
        late = block(
            [f"if {core.mask} is not None:", f"    weights = weights.masked_fill({cells}, 0.0)"]
        )
        lines += [pen("", mask_after_softmax=late)]
    return lines


def _dropout(core: Core) -> list[str]:
    if not core.dropout:
        return []
    pen = core.pen
    always = f"F.dropout(weights, {core.dropout})"
    if core.module:
        right = f"self.{core.module}(weights)"
    elif not core.training:
        return [f"weights = {always}"]
    else:
        right = f"F.dropout(weights, p={core.dropout}, training={core.training})"
    return [f"weights = {pen(right, dropout_in_eval=always)}"]


def _values(core: Core) -> list[str]:
    pen, style = core.pen, core.drawing.core
    v = pen("v", **({} if core.drawing.family == "latent" else {"keys_as_values": "k"}))
    if style == "tokens first":
        right = f'torch.einsum("bhls,bshd->blhd", weights, {v})'
        wrong = 'torch.einsum("bhls,bshd->blhd", weights[..., :-1], v[:, :-1])'
    elif style == "grouped":
        right = f'torch.einsum("bghls,bgsd->bghld", weights, {v}).flatten(1, 2)'
        wrong = 'torch.einsum("bghls,bgsd->bghld", weights[..., :-1], v[..., :-1, :])'
        wrong += ".flatten(1, 2)"
    elif style == "einsum":
        letters = _letters(core, "bhls,bhsd->bhld")
        right = f'torch.einsum("{letters}", weights, {v})'
        wrong = f'torch.einsum("{letters}", weights[..., :-1], v[..., :-1, :])'
    else:
        right = core.drawing.pick("sum", f"weights @ {v}", f"torch.matmul(weights, {v})")
        if style == "flat":
            right = f"torch.bmm(weights, {v})"
        wrong = "weights[..., :-1] @ v[..., :-1, :]"
    return [f"out = {pen(right, last_key_dropped=wrong)}"]
