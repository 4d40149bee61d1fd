"""Explaining broken laws by others: one fault breaks many laws, and one names its cause.

A law *presupposes* another if it cannot be judged where that one is broken: the values cannot be
those of the definition where the scale is wrong, and padding cannot be hidden where the mask is
ignored. A law that is broken follows from a broken one that it presupposes, if that is a cause and
does not follow itself.

`EXPLAINS` is the table, in the order in which causes are reported. Where a mask, the causal rule
or shared heads may be the cause of each other, the counter-examples decide.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from regard_verify.mistakes import SENTENCES
from regard_verify.report.report import Outcome

_GRADIENTS = ("oracle_gradient", "fully_masked_backward")
_RUNS = (  # the same code run in another way, or in another dtype
    "dtype_bound", "strides", "train_eval_agree", "needs_weights_agree", "autocast_precision",
    "autocast_dtype", "default_dtype", "compile_agree",
    "compile_count", "dropout_stats", "dropout_in_eval", "reference_parity", "mla_absorbed",
)  # fmt: skip
_STEPS = ("decode_equals_full", "chunked_prefill", "refused_step", "one_past_two_layers")
_VALUES = ("oracle_forward", "options_obeyed", "padding_side", "score_shift", "cross_attention",
           *_GRADIENTS, *_RUNS, *_STEPS)  # fmt: skip
_MASKED = (
    "mask_dtype", "mask_broadcast", "mask_and_causal", "every_mask_argument",
    "fully_masked_forward", "masked_poison", "padding_content", "padding_side", "batch_invariance",
    "convexity",
)  # fmt: skip
_PATTERNS = ("visible_set_probe", "self_visible", "alignment_probe", "window_edges")
_HIDING = (*_PATTERNS, "mask_polarity", *_MASKED)  # all laws of what is visible, but causality
_HEADS = ("gqa_order", "head_permutation")
_ALL = (  # the laws that a fault in every value breaks
    "scale_closed_form", "causality_exact", "causal_option", *_HIDING, *_HEADS, *_VALUES,
)  # fmt: skip

EXPLAINS: Mapping[str, tuple[str, ...]] = {
    "runs": _ALL,
    "super_init": (),
    "named_heads": (),
    "latent_positions": ("padding_side", *_STEPS),
    "eval_determinism": ("no_mutation", "no_alias", "state_dict", *_ALL),
    "no_mutation": ("state_dict", *_ALL),
    **dict.fromkeys(("no_alias", "oracle_forward"), _ALL),
    "state_dict": ("dtype_bound",),
    **dict.fromkeys(("train_eval_agree", "batch_invariance", "cross_attention", *_HEADS), _ALL),
    "dtype_bound": ("scale_closed_form", "convexity", *_VALUES),
    "convexity": ("scale_closed_form", "causality_exact", "causal_option", *_HEADS, *_HIDING,
                  *_VALUES),
    "padding_side": ("mask_and_causal", "mask_polarity", "causal_option", *_PATTERNS, *_STEPS),
    "mask_and_causal": ("mask_polarity", "causal_option", *_PATTERNS, *_MASKED, *_VALUES),
    "mask_polarity": ("causality_exact", "causal_option", *_PATTERNS, *_MASKED, *_VALUES),
    "mask_broadcast": ("batch_invariance", *_PATTERNS, *_MASKED, *_VALUES),
    "causality_exact": (
        "causal_option", "mask_polarity", "visible_set_probe", "alignment_probe", "window_edges",
        "head_permutation", "scale_closed_form", *_MASKED, *_VALUES,
    ),
    "self_visible": (*_HIDING, "scale_closed_form", *_VALUES),
    "window_edges": (*_HIDING, *_VALUES),
    "alignment_probe": ("visible_set_probe", "mask_and_causal", *_VALUES),
    "visible_set_probe": ("mask_polarity", "every_mask_argument", *_MASKED, *_VALUES),
    "scale_closed_form": _VALUES,
    "causal_option": ("mask_and_causal",),
    "every_mask_argument": ("mask_dtype",),
    "score_shift": (*_GRADIENTS, "fully_masked_forward", "dtype_bound"),
    "fully_masked_forward": _GRADIENTS,
    "padding_content": ("padding_side", "masked_poison"),
    "documents_apart": (),
    "oracle_gradient": _GRADIENTS,
    "dropout_in_eval": ("train_eval_agree", "dropout_stats"),
    "strides": ("compile_agree",),
    "reference_parity": (),
    "default_dtype": ("autocast_precision", "autocast_dtype"),
    "decode_equals_full": ("drafts_dropped", *_STEPS),
    "chunked_prefill": ("drafts_dropped", *_STEPS),
    "drafts_dropped": (),
}  # fmt: skip


HALF = 2.0**-7  # the largest relative error of a value in bfloat16, with its sum


def settled(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The same outcomes: those of causes first, and those of laws that follow from them marked.

    Advice names the cause as well, and stays advice.
    """
    found = list(outcomes)
    broken = {each.law: each for each in found if each.status == "failed"}
    order = _order(broken)
    because = _because(broken, order, [each.law for each in found])
    marked = []
    for each in found:
        cause = because.get(each.law, "") if each.status in ("failed", "advice") else ""
        status = "follows" if each.status == "failed" and cause else each.status
        marked.append(replace(each, status=status, because=cause))
    causes = [each for each in marked if each.status == "failed"]
    causes.sort(key=lambda each: order.index(each.law) if each.law in order else len(order))
    return causes + [each for each in marked if each.status != "failed"]


def _because(
    broken: Mapping[str, Outcome], order: Sequence[str], laws: Iterable[str]
) -> dict[str, str]:
    """The cause of each law that follows: the first in the order that explains it."""
    because: dict[str, str] = {}
    for at, cause in enumerate(order):
        if cause not in broken or cause in because:
            continue
        later = set(EXPLAINS[cause]) - set(order[: at + 1])
        for law in later.intersection(laws) - set(because):
            # The counter-examples decide: NaN of a softmax over nothing is no wrong rule.
            may = cause not in _OF_MASKS or _under_a_mask(law, broken)
            if cause == "mask_and_causal" and law.startswith("fully_masked") and law in broken:
                may = "NaN" not in str(broken[law].example)
            if may:
                because[law] = cause
    return because


_OF_MASKS = ("mask_polarity", "mask_broadcast", "mask_and_causal")


def _order(broken: Mapping[str, Outcome]) -> list[str]:
    """The laws of the table: an earlier one may explain a later one, and not the other way round.

    Some stand early only where their counter-examples show that they are the cause.
    """
    order = list(EXPLAINS)
    for law, (early, after) in _MOVED.items():
        if law in broken and not early(broken):
            order.remove(law)
            order.insert(order.index(after) + 1, law)
    return order


def _shows(law: str, words: str) -> Callable[[Mapping[str, Outcome]], bool]:
    """Whether a law's counter-example has these words."""
    return lambda broken: words in str(broken[law].example)


def _hides_wrongly(broken: Mapping[str, Outcome]) -> bool:
    """Whether a mask fails to hide its key, or there is no form that does.

    If its key is hidden and others are wrong, another rule is at fault: the causal one, a window.
    """
    example = broken["mask_polarity"].example
    named = re.search(r"key (\d+) hidden", example.shape if example else "")
    wrong = _wrong_cells(broken["mask_polarity"])
    if named is None or wrong is None:
        return not any(_is_plain(law, broken) for law in _PLAIN)
    if "causality_exact" in broken and all(j > i for i, j in wrong):
        return False
    return any(j == int(named[1]) for _, j in wrong)


def _rounds(broken: Mapping[str, Outcome]) -> bool:
    """Whether the errors are as small as those of half precision."""
    for law in ("convexity", "scale_closed_form"):
        example = broken[law].example if law in broken else None
        with suppress(ValueError, ZeroDivisionError):  # no numbers
            if example and abs(float(example.got) / float(example.expected) - 1) < HALF:
                return True
    return False


def _is_plain(law: str, broken: Mapping[str, Outcome]) -> bool:
    """Whether a law is broken in a call without a mask and without a causal option."""
    return law in broken and not _under_a_mask(law, broken)


def _wrong_cells(outcome: Outcome) -> list[tuple[int, int]] | None:
    """The wrong cells of a visibility; None if there is none in the counter-example."""
    example = outcome.example
    if example is None or example.expected_grid is None or example.actual_grid is None:
        return None
    rows = enumerate(zip(example.actual_grid, example.expected_grid, strict=True))
    return [(i, j) for i, (mine, right) in rows for j in range(len(right)) if mine[j] != right[j]]


def _under_a_mask(law: str, broken: Mapping[str, Outcome]) -> bool:
    """Whether a law is broken under a mask or the causal rule, as far as is known."""
    if law not in _PLAIN or law not in broken:
        return True
    example, wrong = broken[law].example, _wrong_cells(broken[law])
    if wrong and all(j > i for i, j in wrong):
        return True
    if law == "convexity" and example is not None and example.got in ("0", "nan", "inf"):
        return True  # no key is visible: that is no matter of the weights
    return example is None or "mask" in example.shape or "causal" in example.shape


_PLAIN = (  # laws that are checked without a mask first
    "oracle_forward", "oracle_gradient", "convexity", "options_obeyed",
    "visible_set_probe",
)  # fmt: skip


def _names_a_mistake(broken: Mapping[str, Outcome]) -> bool:
    """Whether a mistake gives the values: one of axes, heads or roles, which no other law names."""
    cause = str(broken["oracle_forward"].example).lower()
    named = (each for each in SENTENCES if "left out" not in each)
    return any(f"{sentence}: that gives these values" in cause for sentence in named)


_MOVED: Mapping[str, tuple[Callable[[Mapping[str, Outcome]], bool], str]] = {
    # a law, when it may be the cause of what stands behind it, and behind which law it is else
    "oracle_forward": (_names_a_mistake, "scale_closed_form"),
    "batch_invariance": (lambda broken: not _shows("batch_invariance", "mask")(broken),
                         "mask_broadcast"),
    "gqa_order": (lambda broken: _shows("gqa_order", "tiled")(broken)
                  or not {"head_permutation", "convexity"} & set(broken), "visible_set_probe"),
    "mask_and_causal": (  # the mask alone is obeyed, and later keys are hidden without one
        lambda broken: "causality_exact" not in broken
        and _shows("mask_and_causal", "switches")(broken), "causal_option",
    ),
    "padding_side": (_shows("padding_side", "are 0 under the mask"), "padding_content"),
    "cross_attention": (  # keys that are lost are lost by their place
        lambda broken: not _shows("cross_attention", "order")(broken) or "convexity" not in broken,
        "visible_set_probe",
    ),
    "scale_closed_form": (
        lambda broken: not _shows("scale_closed_form", "have no effect")(broken), "causal_option",
    ),
    "mask_polarity": (_hides_wrongly, "causal_option"),
    "mask_broadcast": (lambda broken: "visible_set_probe" not in broken
                       or _shows("visible_set_probe", " row ")(broken), "visible_set_probe"),
    "causality_exact": (lambda broken: "convexity" not in broken or "self_visible" in broken,
                        "visible_set_probe"),
    "convexity": (  # without a mask: the visible keys are then not known
        lambda broken: _is_plain("convexity", broken), "visible_set_probe",
    ),
    "dtype_bound": (_rounds, "reference_parity"),
}  # fmt: skip
