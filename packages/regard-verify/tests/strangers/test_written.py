"""Attentions that were judged wrongly before: each as its author has it, and with one fault.

The files in `written/` are right. A fault is one edit of the text, with the law that is broken
first, and a word of what the report says.
"""

import importlib.util
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from covering import few
from regard_verify import check

WRITTEN = Path(__file__).parent / "written"
NAMES = {
    "complex_buffer": "LlamaAttention",
    "differential": "differential_attention",
    "incremental": "MultiheadAttention",
    "local_blocks": "LocalAttention",
    "memory_keys": "MemoryAttention",
    "padded_rows": "Attention",
    "second_input": "SharedAttention",
    "soft_capped": "CappedAttention",
    "talking_heads": "TalkingHeads",
    "two_dropouts": "SelfAttention",
    "two_sided": "WindowAttention",
    "unit_queries": "NormalisedAttention",
    "whole_blocks": "BlockAttention",
}
PARTLY = {
    "differential",
    "memory_keys",
    "talking_heads",
    "whole_blocks",
}  # whose values no definition gives


class Fault(NamedTuple):
    """One edit of a file, the law that names it, and what the report must match."""

    file: str
    old: str
    new: str
    law: str
    text: str


FAULTS = {
    "positions start again": Fault(
        "complex_buffer", "start = 0 if cache is None else cache[0].shape[1]", "start = 0",
        "decode_equals_full", "start again with each piece",
    ),
    "keys are not rotated": Fault(
        "complex_buffer", "rotate(q, here), rotate(k, here)", "rotate(q, here), k",
        "oracle_forward", "the keys are not",
    ),
    "the mask of a set only zeroes outputs": Fault(
        "padded_rows", "if keys_seen is not None:",
        "if keys_seen is not None and context is not None:",
        "padding_content", "padded, hidden tokens",
    ),
    "the mask of a context is ignored": Fault(
        "padded_rows", "if context is None else context_mask", "if context is None else None",
        "mask_polarity", "the mask is ignored",
    ),
    "the outputs of real rows are zeroed": Fault(
        "padded_rows", "masked_fill(~mask[..., None]", "masked_fill(mask[..., None]",
        "padding_side", "outputs of real tokens are 0",
    ),
    "one later key of the block is visible": Fault(
        "local_blocks", "keys > at[..., None]", "keys > at[..., None] + 1",
        "causality_exact", "future",
    ),
    "the padding before the first block is visible": Fault(
        "local_blocks", "(keys < 0) | (keys >= n)", "keys >= n", "convexity", "padding",
    ),
    "the padding after the last token is visible": Fault(
        "two_sided", "(keys < 0) | (keys >= n)", "keys < 0", "convexity", "padding",
    ),
    "one later key is hidden": Fault(
        "two_sided", "(keys >= n)", "(keys >= n) | (keys == at + r)", "causality_exact", "future",
    ),
    "a mask turns the causal rule off": Fault(
        "memory_keys", "if causal:", "if causal and mask is None:",
        "mask_and_causal", "causal rule",
    ),
    "the second input is ignored": Fault(
        "second_input", "p(y)", "p(x)", "cross_attention", "the other sequence",
    ),
    "keys of a window are scaled by the width": Fault(
        "two_sided", "(d // h) ** -0.5", "d ** -0.5", "scale_closed_form", "the whole width",
    ),
    "queries are scaled by the width": Fault(
        "local_blocks", "(d // h) ** -0.5", "d ** -0.5", "scale_closed_form", "the whole width",
    ),
    "blocks of a batch are mixed": Fault(
        "whole_blocks", "reshape(B, N, C)", "reshape(N, B, C).transpose(0, 1)",
        "batch_invariance", "row of the batch",
    ),
    "the mask comes after one softmax": Fault(
        "differential", ".masked_fill(~seen, -1e9).softmax(dim=-1)\n    second",
        ".softmax(dim=-1) * seen\n    second",
        "convexity", "do not sum to 1",
    ),
    "the mask hides in one of two": Fault(
        "differential", "k2.transpose(-2, -1) * scale).masked_fill(~seen, -1e9)",
        "k2.transpose(-2, -1) * scale)", "mask_polarity", "no form hides a key",
    ),
    "the bound of the scores is ignored": Fault(
        "soft_capped", "self.softcapping * torch.tanh(scores / self.softcapping)", "scores",
        "scale_closed_form", "softcap is ignored",
    ),
    "the scale of bounded scores is missing": Fault(
        "soft_capped", " * self.head_dim**-0.5\n", "\n", "scale_closed_form", "are not scaled",
    ),
    "the weights of normalised queries are halved": Fault(
        "unit_queries", ".softmax(dim=-1) @ v", ".softmax(dim=-1) * 0.5 @ v",
        "convexity", "do not sum to 1",
    ),
    "the weights of mixed heads are halved": Fault(
        "talking_heads", "sim.softmax(dim=-1)", "sim.softmax(dim=-1) * 0.5", "convexity",
        "do not sum to 1",
    ),
    "dropout runs in eval mode": Fault(
        "two_dropouts", ", training=self.training", "", "dropout_in_eval", "line .*att = F.dropout",
    ),
}  # fmt: skip


def judged(file, text, tmp_path):
    """The report on the attention in this text."""
    path = tmp_path / f"{file}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"written_{file}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return check(getattr(module, NAMES[file]), quick=True)


@pytest.mark.parametrize("file", NAMES)
def test_right_code_is_not_condemned(file, tmp_path):
    report = judged(file, (WRITTEN / f"{file}.py").read_text(), tmp_path)
    assert report.verdict == ("partly judged" if file in PARTLY else "kept"), str(report)


@pytest.mark.parametrize("name", few(FAULTS, 2))
def test_a_fault_is_named(name, tmp_path):
    fault = FAULTS[name]
    text = (WRITTEN / f"{fault.file}.py").read_text()
    assert text.count(fault.old) >= 1
    report = judged(fault.file, text.replace(fault.old, fault.new), tmp_path)
    first = report.causes[0]
    assert first.law == fault.law, str(report)
    assert re.search(fault.text, f"{first.example} line {first.line}"), str(report)
