"""The single faults, and which law names each of them rightly."""

import re
from dataclasses import dataclass
from typing import Any

from strangers.draw import Drawing

UNKNOWN = "None of the usual mistakes"  # a report that says so names no cause


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        words: what is wrong.
        laws: any of which, broken first, says what is wrong.
        text: or a pattern that its text must match, whatever the law.
        declare: conventions without which the fault is a convention: an inverted mask is a mask
            of the other polarity.
    """

    words: str
    laws: frozenset[str]
    text: str = ""
    declare: tuple[str, ...] = ()

    def named_by(self, law: str, text: str) -> bool:
        """Whether a broken law and what it says are the right sentence.

        >>> FAULTS["scale_missing"].named_by("oracle_forward", "The scores are not scaled")
        True
        """
        if self.text and re.search(self.text, text):
            return True
        return law in self.laws and UNKNOWN not in text


def fault(words: str, laws: str, text: str = "", declare: str = "") -> Fault:
    return Fault(words, frozenset(laws.split()), text, tuple(declare.split()))


SCALE = ("scale_closed_form", r"[Ss]cores are (scaled|not scaled|divided|multiplied)|the scale is")
SUM = "convexity"
HEADS = "head_permutation gqa_order"
SPLIT = "head_permutation oracle_forward visible_set_probe causality_exact cross_attention"
SEEN = "visible_set_probe mask_polarity"
ROWS = "mask_broadcast batch_invariance"
CAUSAL = "causality_exact self_visible alignment_probe visible_set_probe window_edges"
STEPS = "decode_equals_full chunked_prefill"
BOTH = "mask_and_causal"
VALUES = "oracle_forward convexity"
ROTATION = "oracle_forward"
DTYPES = "dtype_bound default_dtype autocast_dtype autocast_precision mask_dtype"
HEADS_TEXT = r"another head|next head|heads?\b.*(neighbour|roll|swap|shift|exchange|reverse)"

FAULTS = {
    "scale_missing": fault("scores are not scaled", *SCALE),
    "scale_inverse": fault("scores are divided by the head size, without its root", *SCALE),
    "scale_of_width": fault("scores are scaled by the root of the whole width", *SCALE),
    "scale_twice": fault("scores are scaled twice", *SCALE),
    "softmax_over_queries": fault("the softmax sums over queries", SUM, "over the queries"),
    "softmax_over_heads": fault("the softmax sums over heads", SUM, "over the heads"),
    "softmax_half": fault(
        "the softmax rounds to float16",
        "dtype_bound oracle_forward",
        "float16|half precision|rounded",
    ),
    "softmax_unshifted": fault("exp overflows", "score_shift dtype_bound"),
    "weights_over_queries": fault(
        "weights are divided by their sum over queries", SUM + " oracle_forward", "over the queries"
    ),
    "weights_with_epsilon": fault("weights sum to less than 1", SUM),
    "weights_detached": fault("no gradient passes the weights", "oracle_gradient"),
    "scores_rolled": fault("a head gets the scores of its neighbour", HEADS, HEADS_TEXT),
    "key_heads_swapped": fault("key heads are swapped", HEADS, HEADS_TEXT),
    "groups_tiled": fault("key heads are repeated in tiles", HEADS, "tiled", "head_order"),
    "values_tiled": fault("values are repeated in tiles, keys are not", HEADS, HEADS_TEXT),
    "one_head_for_all": fault(
        "all heads are the first", HEADS + " oracle_forward", HEADS_TEXT + "|same head|first head"
    ),
    "values_as_keys": fault("values serve as keys", VALUES),
    "keys_as_values": fault("keys serve as values", VALUES),
    "queries_as_keys": fault(
        "queries serve as keys",
        "oracle_forward cross_attention",
    ),
    "last_key_dropped": fault("the last key has no weight", SEEN + " self_visible", "last key"),
    "heads_by_view": fault("heads are split without a transposition", SPLIT),
    "merged_by_view": fault("heads are merged without a transposition", SPLIT),
    "rows_for_tokens": fault("rows of the batch are taken for tokens", SPLIT + " batch_invariance"),
    "mask_ignored": fault("the mask is ignored", SEEN, "mask is ignored|^every_mask"),
    "mask_polarity": fault("the mask is read the wrong way round", SEEN, "", "polarity"),
    "mask_after_softmax": fault("the mask comes after the softmax", SUM, "after the softmax"),
    "mask_fill_small": fault(
        "hidden keys keep a weight",
        SEEN + " causality_exact padding_content mask_and_causal",
    ),
    "mask_of_first_row": fault("all rows get the mask of the first", ROWS),
    "mask_of_neighbour": fault("each row gets the mask of another", ROWS),
    "mask_repeated": fault("the mask is repeated in the wrong order of rows and heads", ROWS),
    "mask_transposed": fault("the mask's axes are exchanged", SEEN, "^every_mask"),
    "mask_in_place": fault("the caller's mask is changed", "no_mutation"),
    "second_mask_ignored": fault(
        "the second mask is ignored", SEEN + " padding_content", "mask is ignored|^every_mask"
    ),
    "causal_future": fault("one later key is visible", CAUSAL, "^causal_option"),
    "causal_own_hidden": fault("the own key is hidden", CAUSAL, "^causal_option"),
    "causal_corner": fault(
        "the causal rule counts from the wrong corner", STEPS + " alignment_probe", "corner"
    ),
    "causal_missing": fault("later keys are visible", CAUSAL, "", "causal"),
    "causal_default_dtype": fault("the causal pattern has torch's default dtype", DTYPES, "dtype"),
    "mask_switches_causal_off": fault("a mask switches causality off", BOTH, "causality off"),
    "mask_ignored_with_causal": fault(
        "a mask is ignored when causal", BOTH + " " + SEEN, "mask is ignored|^every_mask"
    ),
    "blocks_shifted": fault("blocks begin one token early", SEEN + " " + CAUSAL),
    "real_zeroed": fault("outputs of real tokens are set to 0", "", "real tokens are 0"),
    "dropout_in_eval": fault("dropout runs in eval", "eval_determinism", "runs in eval"),
    "rope_on_values": fault("values are rotated", ROTATION, "rotated"),
    "rope_on_queries_only": fault("keys are not rotated", ROTATION, "rotated"),
    "rope_off_by_one": fault("positions are off by one after a cache", STEPS),
    "rope_restarts": fault("positions restart at each call", STEPS),
    "cache_dropped": fault("the past is dropped", STEPS),
    "cache_reversed": fault("new keys come before the past", STEPS),
    "cache_not_read": fault("the cache's keys are not used", STEPS),
    "input_in_place": fault("the input is changed", "no_mutation"),
    "super_missing": fault("super().__init__() is not called", "", r"super\(\)|super "),
}


def declared(drawing: Drawing, name: str) -> dict[str, Any]:
    """The conventions that are declared with this fault."""
    polarity = {
        "keep": "keep",
        "zeros hide": "keep",
        "hide": "drop",
        "ones hide": "drop",
        "additive": "additive",
    }
    values = {
        "polarity": polarity.get(drawing.mask, ""),
        "head_order": "grouped",
        "causal": True,
    }
    return {each: values[each] for each in FAULTS[name].declare}
