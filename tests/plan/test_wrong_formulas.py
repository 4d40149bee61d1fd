"""Mutants of the costs: functions with one mistake each, all noticed by the tests they name."""

import importlib
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace

import pytest

from costs import MODULES, costs
from costs import REAL as real_cost
from covering import few
from regard import plan
from regard.plan.shapes import storages_of

SOURCES = Path(plan.__file__).parent
IN_ALL = "test_cost:test_costs_are_those_of_real_layers_and_caches"  # the random shapes


@dataclass(frozen=True)
class Mutant:
    """A mistake: `right` is replaced by `wrong` in a module, and `noticed_by` fails."""

    module: str
    right: str
    wrong: str
    noticed_by: tuple[str, ...]


def caches(right, wrong, *names):
    return Mutant("cache_bytes", right, wrong, tuple(f"test_cache_bytes:{name}" for name in names))


def flops(right, wrong, *names):
    return Mutant("flops", right, wrong, tuple(f"test_flops:{name}" for name in names))


def weights(right, wrong, *names):
    return Mutant("weights", right, wrong, tuple(f"test_weights:{name}" for name in names))


def traffic(right, wrong, *names):
    return Mutant("cost", right, wrong, tuple(f"test_bytes_moved:{name}" for name in names))


def pages(right, wrong, name):
    return Mutant("cache_bytes", right, wrong, (name,))


NBYTES = "test_cache_bytes:test_bytes_in_pages_are_those_of_the_cache"
RELEASED = "test_cache_bytes:test_pages_before_a_window_are_released"
PAPERS, SCALES = "test_bytes_of_a_token_in_papers", "test_scales_and_zeros_are_stored_with_codes"
NEEDED = "work.batch * stored_bytes(layer, storage, work, needed"
MUTANTS = {
    "query heads for key heads": caches(
        "work.key_heads(layer) * (keys + values)", "layer.num_heads * (keys + values)", PAPERS
    ),
    "twice the latent, as keys and as values": caches(
        "return _keys(layer.latent + ", "return 2 * _keys(layer.latent + ", PAPERS
    ),
    "a latent for every head": caches(
        "return _keys(layer.latent + ", "return layer.num_heads * _keys(layer.latent + ", PAPERS
    ),
    "the part with RoPE forgotten": caches(
        "_keys(layer.latent + layer.qk_rope_head_dim,", "_keys(layer.latent,", PAPERS
    ),
    "values forgotten": caches("(keys + values)", "keys", PAPERS),
    "values as wide as keys": caches(
        "_stored(layer.v_head_dim,",
        "_stored(layer.head_dim,",
        "test_values_have_a_width_of_their_own",
    ),
    "the window ignored": caches(
        "layer.within_window(work.tokens)",
        "work.tokens",
        "test_a_window_holds_its_size",
        "test_gemma_3_has_five_windows_for_each_full_layer",
    ),
    "the chunk ignored": caches(
        "if layer.chunk is None else min(tokens, layer.chunk)", "", "test_a_chunk_holds_its_size"
    ),
    "shared keys cached twice": caches(
        "if layer.keys_of is not None:\n        return 0",
        "",
        "test_shared_keys_are_cached_once",
    ),
    "scales and zeros of codes forgotten": caches(
        " + SCALE_AND_ZERO * ceil_div(width, group) if group else codes",
        "",
        SCALES,
        "test_codes_are_those_of_the_cache",
    ),
    "zeros forgotten": caches(
        "SCALE_AND_ZERO = 4", "SCALE_AND_ZERO = 2", SCALES, "test_codes_are_those_of_the_cache"
    ),
    "scales in float32": caches("SCALE_AND_ZERO = 4", "SCALE_AND_ZERO = 8", SCALES),
    "the last group of channels forgotten": caches(
        "ceil_div(width, group)", "(ceil_div(width + 1, group) - 1)", SCALES
    ),
    "half bytes of codes lost": caches(
        "ceil_div(width * bits, 8)", "(ceil_div(width * bits + 1, 8) - 1)", SCALES
    ),
    "the batch forgotten": caches(
        NEEDED, NEEDED.removeprefix("work.batch * "), "test_rows_of_the_batch_have_their_own_tokens"
    ),
    "positions of a latent forgotten": caches(
        " + tokens * POSITION", "", "test_positions_are_cached_beside_a_latent"
    ),
    "positions in the dtype of the latent": caches(
        " + tokens * POSITION",
        " + tokens * work.itemsize",
        "test_positions_are_cached_beside_a_latent",
    ),
    "a state that grows": caches(
        "work.batch * layer.state_elements",
        "work.batch * work.tokens * layer.state_elements",
        "test_a_state_does_not_grow",
    ),
    "growth of the buffers ignored": caches(
        "tokens = _growing(work.tokens)",
        "tokens = _needed(layer, work)",
        "test_buffers_double",
    ),
    "buffers doubled before they are full": caches(
        "FIRST_CAPACITY if tokens < FIRST_CAPACITY else 2 * tokens",
        "max(FIRST_CAPACITY, 2 * tokens)",
        "test_buffers_double",
    ),
    "the first buffers forgotten": caches(
        "FIRST_CAPACITY if tokens < FIRST_CAPACITY else 2 * tokens",
        "2 * tokens",
        "test_buffers_double",
    ),
    "no room beside a window": caches(
        "window + window // 4",
        "window",
        "test_buffers_of_a_window_have_a_quarter_more",
    ),
    "a quarter rounded up": caches(
        "window // 4",
        "ceil_div(window, 4)",
        "test_buffers_of_a_window_have_a_quarter_more",
    ),
    "heads of a rank rounded down": Mutant(
        "shapes",
        "return ceil_div(layer.num_kv_heads, self.tp)",
        "return layer.num_kv_heads // self.tp",
        ("test_cache_bytes:test_ranks_share_heads_rounded_up",),
    ),
    "a latent shared by ranks": caches(
        "_keys(layer.latent + layer.qk_rope_head_dim,",
        "_keys(ceil_div(layer.latent + layer.qk_rope_head_dim, work.tp),",
        "test_a_latent_is_on_every_rank",
    ),
    "all tokens on every rank": Mutant(
        "shapes",
        "return ceil_div(self.context, self.cp)",
        "return self.context",
        ("test_cache_bytes:test_ranks_share_tokens_rounded_up",),
    ),
    "biases forgotten": weights(
        'biases = {f"{name}.bias": outputs[name] for name in layer.bias}',
        "biases = {}",
        "test_biases_norms_sinks_and_gates_are_counted",
        "test_parameters_are_those_of_layers",
    ),
    "sinks forgotten": weights(
        '{"sinks": work.query_heads(layer)} if layer.sinks else {}',
        "{}",
        "test_biases_norms_sinks_and_gates_are_counted",
    ),
    "norms of latents forgotten": weights(
        'layer.kind == "MLA" and layer.latent_norm', "False", "test_projections_by_hand"
    ),
    "the output as wide as the hidden states": weights(
        '"o_proj": work.query_heads(layer) * layer.v_head_dim',
        '"o_proj": layer.hidden_size',
        "test_projections_by_hand",
    ),
    "keys of the part with RoPE computed from latents": weights(
        "(unrotated + layer.v_head_dim)",
        "(layer.head_dim + layer.v_head_dim)",
        "test_projections_by_hand",
    ),
    "projections of shared keys": weights(
        "if layer.keys_of is None:\n        outputs |=",
        "if True:\n        outputs |=",
        "test_shared_keys_have_no_projections",
    ),
    "a multiply-add counted as 1": flops(
        "MULTIPLY_ADD = 2", "MULTIPLY_ADD = 1", "test_a_multiply_add_is_two_operations"
    ),
    "absorbed counted as expanded": flops(
        'form == "absorbed" and (joint or layer.kind == "MLA")',
        "False",
        "test_the_forms_differ_as_their_authors_say",
    ),
    "expanded counted as absorbed": flops(
        'form == "absorbed" and (joint or layer.kind == "MLA")',
        'joint or layer.kind == "MLA"',
        "test_the_forms_differ_as_their_authors_say",
    ),
    "of a joint latent, values of every key": flops(
        "heads = keys * work.key_heads(layer) + tokens * work.query_heads(layer)",
        "heads = 2 * keys * work.key_heads(layer)",
        "test_values_of_a_joint_latent_are_absorbed_and_its_keys_are_not",
    ),
    "of a joint latent with a bias, absorbed": flops(
        ' and "kv_b_proj" not in layer.bias',
        "",
        "test_values_of_a_joint_latent_are_absorbed_and_its_keys_are_not",
    ),
    "scores of key heads alone": flops(
        "work.query_heads(layer) * pairs",
        "layer.num_kv_heads * pairs",
        "test_ranks_share_heads_and_tokens",
    ),
    "weighted sums forgotten": flops(
        "pairs * (keys + values)",
        "pairs * keys",
        "test_a_multiply_add_is_two_operations",
    ),
    "the mask's half for a triangle with its diagonal": flops(
        "tokens * (tokens + 1) // 2",
        "tokens * tokens // 2",
        "test_visible_pairs_are_those_of_dense_masks",
    ),
    "a window as long for the first queries": flops(
        "_triangle(first) + (context - first) * (layer.window or 0)",
        "context * (layer.window or context)",
        "test_visible_pairs_are_those_of_dense_masks",
    ),
    "the new token's own key forgotten": flops(
        "keys = layer.within_window(ceil_div(work.context + 1, work.cp))",
        "keys = layer.within_window(ceil_div(work.context, work.cp))",
        "test_a_step_reads_its_window_or_chunk",
    ),
    "weights read for every row": traffic(
        "parameters(layer, work) * work.itemsize",
        "work.batch * parameters(layer, work) * work.itemsize",
        "test_a_step_reads_weights_and_cache_once",
    ),
    "the whole context read in spite of a window": traffic(
        "keys = visible_keys(layer, work)",
        "keys = work.context + 1",
        "test_a_step_reads_visible_keys",
    ),
    "a new token not written": traffic(
        "else read + written", "else read", "test_a_step_reads_weights_and_cache_once"
    ),
    "shared keys written": traffic(
        "read if layer.keys_of is not None else read + written",
        "read + written",
        "test_shared_keys_are_read_and_not_written",
    ),
    "a first page of codes": pages("max(page, start)", "start", NBYTES),
    "an open page of codes": pages(
        "page * (work.tokens // page)", "page * ceil_div(work.tokens, page)", NBYTES
    ),
    "a first page that is sealed": pages("max(1, released)", "released", NBYTES),
    "no room in the open page": pages(
        "ceil_div(tokens, page) - released", "tokens // page - released", NBYTES
    ),
    "pages released a token early": pages(
        "tokens + 1 - layer.window", "tokens + 2 - layer.window", RELEASED
    ),
    "pages read as they were given": traffic(
        "read = stored_bytes(layer, storage, work, keys, coded_keys(storage, work, keys))",
        "read = keys * written",
        "test_a_step_reads_pages_as_they_are_stored",
    ),
    "one layer of each kind": Mutant(
        "cost", "len(indices)", "1", ("test_cost:test_costs_of_layers_add_up",)
    ),
    "the batch forgotten in a step": flops(
        "MULTIPLY_ADD * work.batch * (tokens * sum(products.values()) + up)",
        "MULTIPLY_ADD * (tokens * sum(products.values()) + up)",
        "test_mla_in_both_forms",
    ),
}
ARGUMENTS = {  # of named tests with parameters
    **{name: {"storage": storages_of(["K8V4"], page_size=4)[0]} for name in (NBYTES, RELEASED)},
    IN_ALL: {"part": 0},
    "test_flops:test_mla_in_both_forms": {"form": "absorbed", "q_lora_rank": 6},
}
OUT_OF_REACH = {  # of the random shapes: one layer on one rank, no chunks, no pages
    "values as wide as keys",
    "the chunk ignored",
    "shared keys cached twice",
    "a state that grows",
    "codes dropped behind a window",
    "heads of a rank rounded down",
    "a latent shared by ranks",
    "all tokens on every rank",
    "projections of shared keys",
    "the mask's half for a triangle with its diagonal",
    "a window as long for the first queries",
    "weights read for every row",
    "the whole context read in spite of a window",
    "a new token not written",
    "shared keys written",
    "a first page of codes",
    "an open page of codes",
    "a first page that is sealed",
    "no room in the open page",
    "pages released a token early",
    "pages read as they were given",
    "one layer of each kind",
}


def built(mutant: Mutant, monkeypatch) -> SimpleNamespace:
    """The costs by modules with the mistake in one of them."""
    for name in ("shapes",) * (mutant.module == "shapes") + MODULES:
        source = (SOURCES / f"{name}.py").read_text()
        if name == mutant.module:
            assert source.count(mutant.right) == 1, f"{mutant.right!r} is not once in {name}.py"
            source = source.replace(mutant.right, mutant.wrong)
        module = ModuleType(f"regard.plan.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compiled(source), vars(module))
    return costs()


@cache
def compiled(source: str) -> CodeType:
    return compile(source, "costs with a mistake", "exec")


def run(name: str, cost: SimpleNamespace) -> None:
    """A test of another file, given all costs."""
    file, _, test = name.partition(":")
    getattr(importlib.import_module(f"plan.{file}"), test)(**ARGUMENTS.get(name, {}), cost=cost)


def noticed(name: str, cost: SimpleNamespace) -> bool:
    try:
        run(name, cost)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("mistake", few(MUTANTS, 6))
def test_a_mistake_is_noticed_by_the_tests_it_names(mistake, monkeypatch):
    mutant = MUTANTS[mistake]
    wrong = built(mutant, monkeypatch)
    for name in mutant.noticed_by:
        assert not noticed(name, real_cost)
        assert noticed(name, wrong)


def test_the_random_shapes_notice_what_is_in_their_reach(monkeypatch):
    for mistake in MUTANTS.keys() - OUT_OF_REACH:
        with monkeypatch.context() as patched:
            assert noticed(IN_ALL, built(MUTANTS[mistake], patched)), mistake


def test_the_same_modules_without_a_mistake_are_right(monkeypatch):
    unchanged = built(Mutant("cost", "len(indices)", "len(indices)", ()), monkeypatch)
    names = {IN_ALL, *(name for mutant in MUTANTS.values() for name in mutant.noticed_by)}
    assert not [name for name in sorted(names) if noticed(name, unchanged)]
