"""Text that a model writes itself: of its own predictions, from beginnings of two kinds."""

import pytest
import torch

from regard.convert import own_text
from regard.convert.healing import own_text as module
from regard.convert.healing.own_text import GIVEN, _drawn, stored_own_text
from regard.convert.texts import many_kinds
from regard.hf.running.binding import is_changed
from tiny import FAMILIES, VOCABULARY, tiny

SPECIAL = [0, 1, 2, VOCABULARY + 5]  # the last has no embedding


class Letters:
    """A token for each character, of those that are not special; before each text a first one."""

    bos_token_id = 1
    all_special_ids = SPECIAL

    def __init__(self, begins=False):
        self.begins = begins

    def __call__(self, text, add_special_tokens=True, **options):
        own = [3 + ord(each) % (VOCABULARY - 3) for each in text]
        return {"input_ids": [1] * (self.begins and add_special_tokens) + own}


def sharp(family="llama"):
    """A model that is nearly sure of each next token."""
    model = tiny(family)
    model.get_output_embeddings().weight.data *= 1e4
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_tokens_are_the_models_own_predictions(family):
    model = sharp(family)
    rows = own_text(model, Letters(), windows=7, length=31)
    assert rows.shape == (7, 31) and not is_changed(model)
    logits = model(input_ids=rows, use_cache=False).logits.double()
    logits[..., SPECIAL[:3]] = -torch.inf
    likeliest = logits.argmax(-1)[:, :-1]
    assert rows[:4, GIVEN:].equal(likeliest[:4, GIVEN - 1 :])  # four go on from passages
    assert rows[4:, 1:].equal(likeliest[4:])  # three from a token
    assert len(rows[:, 0].unique()) > 1


@pytest.mark.parametrize("begins", [False, True])
def test_beginnings(begins):
    """Those of passages are somewhere in them; the special token that begins texts is before."""
    rows = own_text(tiny("llama"), Letters(begins), windows=5, length=30)
    passages = Letters()(many_kinds())["input_ids"]
    places = {tuple(passages[at : at + GIVEN]) for at in range(len(passages) - GIVEN)}
    assert (rows[:, 0] == 1).tolist() == [begins] * 5
    given = [tuple(row[begins:][:GIVEN]) in places for row in rows.tolist()]
    assert given == [True] * 3 + [False] * 2
    assert not torch.isin(rows[:, int(begins) :], torch.tensor(SPECIAL)).any()


def test_tokens_are_drawn_as_often_as_predicted():
    """Of predictions that are the same everywhere, at the temperature, without improbable ones."""
    model = tiny("llama")
    chances = torch.full((VOCABULARY,), 1e-9).index_fill(0, torch.tensor([5, 6, 7]), 1.0)
    chances *= torch.arange(VOCABULARY) - 4.0
    chances[7] = 0.01  # of the most probable, 0.006 at the temperature
    model.model.norm.weight.data.zero_()
    model.lm_head.bias = torch.nn.Parameter(chances.clamp_min(1e-9).log())
    rows = own_text(model, Letters(), windows=60, length=60)[30:, 1:]
    counts = rows.flatten().bincount(minlength=VOCABULARY)
    assert counts[5] + counts[6] == rows.numel()
    share = 1 / (1 + 2 ** (1 / module.TEMPERATURE))
    spread = (share * (1 - share) / rows.numel()) ** 0.5
    assert abs(counts[5] / rows.numel() - share) < 4 * spread


def test_a_seed_gives_the_same_text():
    model = tiny("llama")
    first, again, other = (
        own_text(model, Letters(), windows=2, length=40, seed=seed) for seed in (0, 0, 1)
    )
    assert first.equal(again) and not first.equal(other)


def test_dropout_is_off_and_modes_are_restored():
    model = tiny("llama")
    wanted = own_text(model, Letters(), windows=2, length=40)
    model.config.attention_dropout = 0.9
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    model.train()
    model.lm_head.eval()
    assert own_text(model, Letters(), windows=2, length=40).equal(wanted)
    assert model.training and model.model.training and not model.lm_head.training


def test_more_windows_than_at_once(monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 2)
    seen = []
    rows = own_text(
        tiny("llama"), Letters(), windows=5, length=26, progress=lambda *each: seen.append(each)
    )
    assert rows.shape == (5, 26)
    assert seen == [("writing text", done, 5) for done in (2, 3, 5)]


def test_refusals():
    model = tiny("llama")
    with pytest.raises(ValueError, match="windows have more than 24 tokens, got length=24"):
        own_text(model, Letters(), windows=1, length=24)
    with pytest.raises(ValueError, match="more than 25 tokens, got length=25"):
        own_text(model, Letters(begins=True), windows=1, length=25)
    with pytest.raises(ValueError, match="windows"):
        own_text(model, Letters(), windows=0, length=30)


def test_a_model_that_fails_is_restored():
    model = tiny("llama")
    model.lm_head.register_forward_hook(lambda *each: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        own_text(model, Letters(), windows=1, length=30)
    assert not is_changed(model)


def test_stored_text_is_of_one_model_and_size(tmp_path):
    model, given = tiny("llama"), {"tokenizer": Letters(), "progress": lambda *each: None}
    folder = tmp_path / "state"
    first = stored_own_text(folder, model, windows=2, length=30, **given)
    model.lm_head.register_forward_hook(lambda *each: 1 / 0)  # is not asked again
    assert stored_own_text(folder, model, windows=2, length=30, **given).equal(first)
    model.lm_head._forward_hooks.clear()
    assert stored_own_text(folder, model, windows=2, length=31, **given).shape == (2, 31)
    other = stored_own_text(folder, sharp(), windows=2, length=31, **given)
    assert not other.equal(stored_own_text(folder, model, windows=2, length=31, **given))


def test_tokens_are_drawn_in_proportion_to_their_weights():
    weights, chance = torch.tensor([0.0, 1.0, 0.0, 5.0, 2.0, 0.0]), torch.Generator().manual_seed(0)
    found = _drawn(weights.expand(40_000, -1), chance)
    assert found.shape == (40_000, 1)
    counts = found.flatten().bincount(minlength=6)
    assert counts[weights == 0].eq(0).all()
    expected = 40_000 * weights / weights.sum()
    deviation = (expected * (1 - weights / weights.sum())).sqrt()
    assert ((counts - expected).abs() <= 4 * deviation).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_another_default_dtype_draws_as_many_tokens(dtype):
    before, weights = torch.get_default_dtype(), torch.ones(4000, 1000)
    wanted = _drawn(weights, torch.Generator().manual_seed(0))
    torch.set_default_dtype(dtype)
    try:
        found = _drawn(weights, torch.Generator().manual_seed(0))
    finally:
        torch.set_default_dtype(before)
    assert found.equal(wanted) and len(found.unique()) > 900


def test_each_row_has_its_own_weights_and_the_seed_decides():
    rows = torch.eye(7, dtype=torch.bfloat16)
    assert _drawn(rows, torch.Generator().manual_seed(1)).flatten().tolist() == list(range(7))
    some = torch.rand(50, 30)
    one, other, third = (_drawn(some, torch.Generator().manual_seed(n)) for n in (1, 1, 2))
    assert one.equal(other) and not one.equal(third)


def test_no_token_behind_the_last_with_a_weight_is__drawn(monkeypatch):
    """A share that rounds to 1."""
    monkeypatch.setattr(torch, "rand", lambda *sizes, **given: torch.ones(*sizes))
    weights = torch.tensor([[0.25, 0.5, 0.0], [3.0, 0.0, 0.0]])
    assert _drawn(weights, torch.Generator()).flatten().tolist() == [1, 0]


def test_a_model_that_predicts_nan_is_refused():
    for bad in (torch.nan, torch.inf, 0.0):
        with pytest.raises(ValueError, match="predicts NaN, so it writes no text"):
            _drawn(torch.tensor([[1.0, 2.0], [0.0, bad]]), torch.Generator())
