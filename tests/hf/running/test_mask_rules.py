"""Masks of transformers as rules; the oracle is transformers' own mask of cells."""

from itertools import pairwise

import pytest
import torch
from transformers import masking_utils

import regard.hf
from regard.hf.running import mask_rules
from regard.hf.running.mask_rules import KNOWN, RuleMask, mask_of
from regard.hf.running.masks import visible
from regard.masks import EVERYTHING, Causal, Span
from zoo import ZOO, inputs, result, tokens

BLOCKS = torch.tensor([[-1, 0, 0, 0, 1, 1, -1, -1, 2, 2, 2], [0, 0, -1, -1, -1, -1, 1, 1, 1, 1, 1]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 3], [0] * 5 + [1] * 6])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 2], [*range(5), *range(6)]])
LEFT = torch.tensor([2, 0])
VALID = torch.arange(11) >= LEFT[:, None]


def functions():
    """Mask functions over 11 tokens of two rows, by name."""
    causal, both = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    window = masking_utils.sliding_window_causal_mask_function(4)
    packed = masking_utils.packed_sequence_mask_function(DOCUMENTS)
    by_position = getattr(
        masking_utils, "remap_positions_for_packed_sequence", lambda each, _: each
    )
    return {
        "causal": causal,
        "window": window,
        "both": both,
        "window to both sides": masking_utils.sliding_window_bidirectional_mask_function(3),
        "chunks": masking_utils.chunked_causal_mask_function(3, LEFT),
        "images": masking_utils.or_masks(window, masking_utils.blockwise_overlay(BLOCKS)),
        "documents": masking_utils.and_masks(packed, by_position(window, POSITIONS)),
    }


FUNCTIONS = functions()


@pytest.mark.parametrize("valid", [None, VALID, VALID[:, :9] | True], ids=["", "padded", "too few"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("queries", "keys", "first_query", "first_key"),
    [(11, 11, 0, 0), (3, 11, 8, 0), (1, 11, 10, 0), (4, 7, 7, 4), (1, 4, 10, 7), (5, 11, 0, 0)],
)
def test_a_rule_has_the_cells_of_transformers(name, valid, queries, keys, first_query, first_key):
    call = {
        "batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": first_query,
        "kv_offset": first_key, "mask_function": FUNCTIONS[name], "attention_mask": valid,
    }  # fmt: skip
    wanted = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False)
    found = mask_of(**call)
    if found is None:
        assert queries == 1 and wanted.all()
        return
    assert type(found) is RuleMask and found.shape == wanted.shape
    assert found.span == Span(first_query - first_key, first_query - first_key + queries, 0, keys)
    assert found.rule.dense(found.span, batch=2).expand(2, 1, queries, keys).equal(wanted)
    assert (found & True).equal(wanted)


@pytest.mark.parametrize("name", [each for each in KNOWN if hasattr(masking_utils, each)])
def test_a_function_with_other_cells_is_not_known(name, monkeypatch):
    assert mask_rules._is_as_known(name)
    own = getattr(masking_utils, name)

    def other(*given):
        if len(given) == 4 and KNOWN[name].sample is None:
            return own(*given) & (given[3] != 2)
        function = own(*given)
        changed = lambda b, h, q, k: function(b, h, q, k) & (k != 2)  # noqa: E731
        return changed

    monkeypatch.setattr(masking_utils, name, other)
    mask_rules._is_as_known.cache_clear()
    try:
        assert not mask_rules._is_as_known(name)
    finally:
        mask_rules._is_as_known.cache_clear()


@pytest.mark.parametrize("join", ["and_masks", "or_masks"])
def test_a_function_of_another_author_has_cells(join):
    causal = masking_utils.causal_mask_function
    own = getattr(masking_utils, join)(causal, lambda b, h, q, k: (q + k) % 3 == 0)
    call = {"batch_size": 1, "q_length": 5, "kv_length": 5, "allow_is_causal_skip": False}
    found = mask_of(**call, mask_function=own)
    assert type(found) is torch.Tensor
    assert found.equal(masking_utils.sdpa_mask(**call, mask_function=own))


def test_a_static_cache_has_cells():
    """Its steps are compiled, and a compiled step takes tensors."""
    assert type(mask_of(batch_size=1, q_length=2, kv_length=9, q_offset=torch.tensor(3))) is (
        torch.Tensor
    )


def test_a_rule_that_is_used_as_a_tensor_is_one():
    mask = mask_of(batch_size=2, q_length=4, kv_length=4)
    assert type(mask[..., :2]) is torch.Tensor
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert "Causal()" in repr(mask)


def test_cells_that_a_model_writes_to_are_those_that_attention_reads():
    mask = mask_of(batch_size=1, q_length=3, kv_length=3)
    assert visible(torch.nn.Module(), mask, 3, 3).mask == Causal()
    mask[:, :, 0, 2] = True
    found, _, span = visible(torch.nn.Module(), mask, 3, 3)
    cells = found.dense(span).expand(1, 1, 3, 3)[0, 0]
    assert cells.int().tolist() == [[1, 0, 1], [1, 1, 0], [1, 1, 1]]


def test_a_mask_that_must_be_there_is():
    """Some models append columns to it."""
    last = {"batch_size": 1, "q_length": 1, "kv_length": 3, "q_offset": 2}
    assert mask_of(**last) is None
    one = mask_of(**last, allow_is_causal_skip=False)
    assert one.shape == (1, 1, 1, 3) and one.all()


def test_a_model_with_windows_and_padding_makes_no_cells(monkeypatch):
    model, given = ZOO["gemma2"].build(), inputs("gemma2", padding="left")
    with torch.no_grad():
        wanted = result(model(**given))
        model.set_attn_implementation(regard.hf.register())

        def refused(**given):
            raise AssertionError("cells")

        monkeypatch.setattr(masking_utils, "sdpa_mask", refused)
        found = result(model(**given))
    keep = given["attention_mask"].bool()
    torch.testing.assert_close(found[keep], wanted[keep], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("install", [False, True])
def test_documents_of_one_row_are_apart(install):
    """As collators without padding pass them: with the positions, with the lengths, with both."""
    model, ids = ZOO["mistral"].build(), tokens(1, 12)
    cuts = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    with torch.no_grad():
        wanted = [model(ids[:, a:b]).logits for a, b in pairwise(cuts)]
        model.set_attn_implementation(regard.hf.register())
        if install:
            regard.hf.install(model)
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(cuts)])
        options = {"position_ids": positions[None], "use_cache": False}
        lengths = {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}
        for given in (options, options | lengths):
            found = model(ids, **given).logits
            torch.testing.assert_close(found, torch.cat(wanted, 1), atol=2e-5, rtol=2e-5)
        ones = {"attention_mask": torch.ones(1, 12)}  # without it, transformers reads the positions
        found = model(ids, **options, **lengths, **ones).logits
        torch.testing.assert_close(found, torch.cat(wanted, 1), atol=2e-5, rtol=2e-5)


def test_lengths_that_do_not_fit_are_refused():
    model, ids = ZOO["mistral"].build(), tokens(1, 6)
    model.set_attn_implementation(regard.hf.register())
    good, short = torch.tensor([0, 2, 6]), torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match="pack the same documents"):
        model(ids, cu_seq_lens_q=good, cu_seq_lens_k=short)
    with pytest.raises(ValueError, match="got 5 for 6 queries"):
        model(ids, cu_seq_lens_q=short, cu_seq_lens_k=short)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_rule_that_hides_nothing_is_about_any_number_of_keys(queries):
    """As in PP-FormulaNet, whose mask counts other tokens of the encoder than its cache holds:
    `sdpa` gets no mask there."""
    both = masking_utils.bidirectional_mask_function
    call = {"batch_size": 2, "q_length": queries, "kv_length": 6, "mask_function": both}
    rule = mask_of(**call, allow_is_causal_skip=False)
    assert isinstance(rule, RuleMask)
    at = visible(torch.nn.Module(), rule, queries, 9)
    assert (at.mask, at.bias, at.span.num_keys) == (EVERYTHING, None, 9)
    made = mask_of(**call, attention_mask=torch.arange(6).expand(2, 6) > 1)
    assert visible(torch.nn.Module(), made, queries, 9).mask is not EVERYTHING
