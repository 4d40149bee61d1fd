"""The line of the subject that does what a broken law is about: the only one with its words."""

import inspect
import re
from typing import Any

from regard_verify.blame import shown

_TOPICS = {  # the words of a line, and the laws about what it does
    r"sqrt|\*\* ?-?0\.5|scal(e|ing)\b|scaled_dot_product": "scale_closed_form",
    r"softmax|scaled_dot_product": "score_shift convexity fully_masked_forward",
    r"dropout\w*\(": "dropout_in_eval eval_determinism dropout_stats",
    r"masked_fill|where\(|\+ ?mask": "mask_polarity mask_dtype mask_broadcast padding_content",
    r"tril|triu|is_causal": "mask_and_causal causality_exact causal_option self_visible",
    r"repeat|expand": "gqa_order",
    r"\bcat\(|index_copy": "decode_equals_full chunked_prefill one_past_two_layers memory_law",
}
WORDS = {law: words for words, laws in _TOPICS.items() for law in laws.split()}


def line_about(law: str, thing: Any) -> str:
    """The line as `FILE:NUMBER: CODE`; "" if several lines may be meant, or none."""
    made_by = thing if inspect.isroutine(thing) else type(thing)
    try:
        file, (code, first) = inspect.getsourcefile(made_by), inspect.getsourcelines(made_by)
    except (OSError, TypeError):
        return ""
    words = WORDS.get(law, "(?!)")
    found = [at for at, line in enumerate(code, first) if re.search(words, line.partition("#")[0])]
    return shown(file, found[0]) if file and len(found) == 1 else ""
