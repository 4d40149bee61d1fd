"""A student with damaged attention is trained to imitate its teacher, interrupted or not."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.convert import Healed, Recipe, draw_losses
from regard.convert.healing import heal as healing
from regard.convert.healing.heal import heal
from regard.convert.healing.losses import relative_error
from regard.convert.healing.recipe import positions_of, rows_of
from regard.convert.measuring import divergence
from regard.hf import attention_modules, attention_of
from regard.hf.running.attending import precision_of
from session import LONG
from tiny import VOCABULARY, tiny, tokens

WINDOWS = tokens(6, 17)
QUICK = Recipe(batch=2, aligning=0.5, lr=2e-3, aligning_lr=4e-3, layer_weight=1.0, positions=1.0)


class Interrupted(Exception):
    """Raised to interrupt a run."""


class Placed(nn.Module):
    """A layer of regard in the place of a module of transformers."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, **given):
        return self.layer(hidden_states), None


def pair(family="llama", placed=False):
    """A teacher, and a student whose keys and values have lost half of their rank."""
    teacher = tiny(family)
    student = copy.deepcopy(teacher)
    for name, module in attention_modules(student).items():
        for each in (module.k_proj, module.v_proj):
            u, s, v = torch.linalg.svd(each.weight.detach(), full_matrices=False)
            each.weight.data = (u[:, :6] * s[:6]) @ v[:6]
        if placed:
            block = student.get_submodule(name.rpartition(".")[0])
            block.self_attn = Placed(attention_of(module))
    return student, teacher


def distance(student, teacher):
    """The divergence of the predictions, in nats a token, by its definition."""
    with torch.no_grad():
        ours, theirs = (m(tokens(3, 19)).logits.double().softmax(-1) for m in (student, teacher))
    return float((theirs * (theirs / ours).log()).sum(-1).mean())


def state_of(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("aligning", [0.0, 0.5, 1.0])
def test_healing_reduces_the_divergence(aligning, placed):
    student, teacher = pair(placed=placed)
    before = distance(student, teacher)
    recipe = Recipe(**{**vars(QUICK), "aligning": aligning})
    healed = heal(student, teacher, WINDOWS, steps=20, recipe=recipe)
    assert (healed.steps, healed.aligned) == (20, round(20 * aligning))
    assert healed.tokens == 20 * 2 * 17
    assert distance(student, teacher) < 0.7 * before
    for stage in (healed.losses[: healed.aligned], healed.losses[healed.aligned :]):
        assert not stage or sum(stage[-3:]) < sum(stage[:3])


@pytest.mark.parametrize("train", ["attention", "all"])
def test_only_trained_parameters_change(train):
    student, teacher = pair("llama with biases")
    was, taught = state_of(student), state_of(teacher)
    recipe = Recipe(**{**vars(QUICK), "train": train})
    heal(student, teacher, WINDOWS, steps=4, recipe=recipe)
    for name, value in state_of(student).items():
        ends = name.startswith(("model.embed", "lm_head"))
        trained = not ends if train == "all" else ".self_attn." in name
        assert value.equal(was[name]) is not trained, name
    assert all(value.equal(taught[name]) for name, value in state_of(teacher).items())


def test_the_models_gradients_and_modes_are_restored():
    student, teacher = pair()
    student.model.norm.weight.requires_grad_(False)
    student.train()
    trained = []
    heal(
        student, teacher, WINDOWS, steps=1, recipe=QUICK,
        progress=lambda *report: trained.extend(
            name for name, each in student.named_parameters() if each.requires_grad
        ),
    )  # fmt: skip
    assert trained
    assert all(".self_attn." in name for name in trained)
    flags = {name: each.requires_grad for name, each in student.named_parameters()}
    assert not flags.pop("model.norm.weight")
    assert all(flags.values())
    assert student.training and student.model.layers[0].training and not teacher.training
    assert all(each.grad is None for each in (*student.parameters(), *teacher.parameters()))


def interrupted(step):
    def progress(what, done, total):
        if done == step:
            raise Interrupted

    return progress


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_interrupted_and_resumed_is_the_same_to_the_last_bit(tmp_path, monkeypatch, stop):
    monkeypatch.setattr(healing, "SAVE_SECONDS", 0.0)
    given = {"steps": 6, "recipe": QUICK}
    whole, teacher = pair()
    expected = heal(whole, teacher, WINDOWS, **given)
    half, _ = pair()
    with pytest.raises(Interrupted):
        heal(half, teacher, WINDOWS, **given, state=tmp_path, progress=interrupted(stop))
    resumed, _ = pair()
    healed = heal(resumed, teacher, WINDOWS, **given, state=tmp_path)
    assert (healed.losses, healed.aligned) == (expected.losses, expected.aligned)
    for name, value in state_of(whole).items():
        assert state_of(resumed)[name].equal(value), name


def test_a_finished_state_is_only_loaded(tmp_path):
    student, teacher = pair()
    first = heal(student, teacher, WINDOWS, steps=3, recipe=QUICK, state=tmp_path)
    again, _ = pair()
    assert heal(again, teacher, WINDOWS, steps=3, recipe=QUICK, state=tmp_path) == first
    assert all(value.equal(state_of(student)[name]) for name, value in state_of(again).items())


def test_a_state_is_safetensors_and_json(tmp_path, monkeypatch):
    monkeypatch.setattr(healing, "SAVE_SECONDS", 0.0)
    student, teacher = pair()
    seen = set()

    def list_files(what, done, total):
        seen.update(file.name for file in tmp_path.glob("**/*"))

    heal(student, teacher, WINDOWS, steps=3, recipe=QUICK, state=tmp_path, progress=list_files)
    assert seen == {"healing.json", "step-1.safetensors", "step-2.safetensors"}
    assert {file.name for file in tmp_path.iterdir()} == {"healing.json", "step-3.safetensors"}
    written = json.loads((tmp_path / "healing.json").read_text())
    assert written["steps"] == len(written["losses"]) == 3
    for file in tmp_path.glob("*.safetensors"):
        assert b"pickle" not in file.read_bytes()


def test_another_task_does_not_resume_from_a_state(tmp_path):
    student, teacher = pair()
    heal(student, teacher, WINDOWS, steps=1, recipe=QUICK, state=tmp_path)
    was = state_of(student)
    other = Recipe(**{**vars(QUICK), "lr": 1.0})
    with pytest.raises(ValueError, match=r"healing with lr=0\.002, this one has 1\.0"):
        heal(student, teacher, WINDOWS, steps=1, recipe=other, state=tmp_path)
    with pytest.raises(ValueError, match="holds a healing with tokens="):
        heal(student, teacher, WINDOWS[:4], steps=1, recipe=QUICK, state=tmp_path)
    (tmp_path / "healing.json").write_text("{}")
    with pytest.raises(ValueError, match="is not the record of a healing"):
        heal(student, teacher, WINDOWS, steps=1, recipe=QUICK, state=tmp_path)
    assert all(value.equal(was[name]) for name, value in state_of(student).items())


def test_windows_in_pieces_are_the_same_batch():
    outcomes = []
    for at_once in (None, 2, 1):
        student, teacher = pair()
        recipe = Recipe(**{**vars(QUICK), "batch": 4, "at_once": at_once, "layer_weight": 0.0})
        recipe = Recipe(**{**vars(recipe), "aligning": 0.0})
        outcomes.append((heal(student, teacher, WINDOWS, steps=3, recipe=recipe), student))
    for healed, student in outcomes[1:]:
        assert healed.losses == pytest.approx(outcomes[0][0].losses, rel=1e-4)
        for name, value in state_of(student).items():
            torch.testing.assert_close(value, state_of(outcomes[0][1])[name], atol=1e-3, rtol=1e-3)


TWO = """
import json, sys
import test_heal as here
student, teacher = here.pair()
options = {"batch": 4, "at_once": int(sys.argv[1]), "aligning": 0.5, "layer_weight": 0.0}
recipe = here.Recipe(**{**vars(here.QUICK), **options})
healed = here.heal(student, teacher, here.WINDOWS, steps=4, recipe=recipe)
from accelerate import PartialState
if PartialState().is_main_process:
    print(json.dumps([PartialState().num_processes, healed.losses]))
"""


@pytest.mark.skipif(not LONG, reason="starts several processes")
def test_two_processes_share_a_batch(tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here, here.parent / "support")))
    environment = {**os.environ, "PYTHONPATH": paths, "ACCELERATE_USE_CPU": "1"}

    def losses(*command):
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout.strip().splitlines()[-1])

    script = str(tmp_path / "two.py")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script)
    (one, alone), (two, shared), (_, pieces) = (
        losses(script, "4"), losses(*launch, "2"), losses(*launch, "1")
    )  # fmt: skip
    assert (one, two) == (1, 2)
    assert shared[2:] == pytest.approx(alone[2:], rel=0.05)  # layers' errors are by the piece
    assert pieces[2:] == pytest.approx(alone[2:], rel=0.05)


def test_minutes_end_a_run():
    student, teacher = pair()
    reports = []
    healed = heal(
        student, teacher, WINDOWS, minutes=1e-3, steps=10_000, recipe=QUICK,
        progress=lambda *given: reports.append(given),
    )  # fmt: skip
    assert 1 <= healed.steps < 10_000
    assert 0.06 <= healed.seconds < 5
    assert reports[-1][1:] == (healed.steps, 10_000)


def test_autocast_and_a_teacher_in_half_precision():
    student, teacher = pair()
    before = distance(student, teacher)
    half = copy.deepcopy(teacher).to(torch.bfloat16)
    recipe = Recipe(**{**vars(QUICK), "autocast": torch.bfloat16})
    heal(student, half, WINDOWS, steps=16, recipe=recipe)
    assert all(each.dtype == torch.float32 for each in student.parameters())
    assert distance(student, teacher) < 0.7 * before


def test_meanwhile_other_weights_are_in_bfloat16_and_attention_is_fast():
    """Afterwards the original tensors and transformers' own attention are back."""
    student, teacher = pair()
    was = {name: each.data_ptr() for name, each in student.named_parameters()}
    half = copy.deepcopy(teacher).to(torch.bfloat16)
    recipe = Recipe(**{**vars(QUICK), "autocast": torch.bfloat16})
    seen = []

    def progress(*told):
        wide = {name for name, each in student.named_parameters() if each.dtype == torch.float32}
        modules = attention_modules(student).values()
        seen.append((wide, [precision_of(module) for module in modules]))

    heal(student, half, WINDOWS, steps=1, recipe=recipe, progress=progress)
    ((wide, precisions),) = seen
    assert wide == {name for name in was if ".self_attn." in name}
    assert set(precisions) == {"fast"}
    assert was == {name: each.data_ptr() for name, each in student.named_parameters()}
    for model in (student, half):
        for module in attention_modules(model).values():
            assert "forward" not in vars(module)
            assert precision_of(module) == "strict"


@pytest.mark.parametrize("count", [1, 255, 256, 300])
def test_the_divergence_and_its_gradient_are_those_of_the_definition(count):
    student, teacher = pair()
    ours, theirs = torch.randn(2, 1, count, 24)
    ours.requires_grad_()
    value = divergence(student, ours, teacher, theirs)
    (got,) = torch.autograd.grad(value, ours)
    p, q = (m.lm_head(h).double().softmax(-1) for m, h in ((teacher, theirs), (student, ours)))
    expected = (p * (p.log() - q.log())).sum() / count
    (wanted,) = torch.autograd.grad(expected, ours)
    torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)


def test_relative_error_is_a_share_of_the_teachers_energy():
    assert relative_error(torch.zeros(3), torch.tensor([1.0, 2.0, 2.0])) == 1
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])) == 0


def test_an_epoch_contains_every_window_once():
    orders = []
    for epoch in range(3):
        steps = range(epoch * 5, epoch * 5 + 5)
        seen = [row for s in steps for row in rows_of(s, windows=15, batch=3, seed=1)]
        assert sorted(seen) == list(range(15))
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]
    assert rows_of(0, windows=15, batch=3, seed=2) != orders[0][:3]


def test_positions_differ_from_step_to_step():
    first, second = (positions_of(step, length=40, share=0.25, seed=0) for step in (0, 1))
    assert len(first) == len(second) == len(set(first.tolist())) == 10
    assert first.tolist() != second.tolist()
    assert len(positions_of(0, length=40, share=1e-6, seed=0)) == 1


def refuses(message, *models, windows=WINDOWS, **given):
    student, teacher = models or pair()
    was = state_of(student)
    with pytest.raises(ValueError, match=message):
        heal(student, teacher, windows, **{"steps": 1, "recipe": QUICK, **given})
    assert all(value.equal(was[name]) for name, value in state_of(student).items())


def test_what_cannot_be_healed_is_refused_before_any_work():
    refuses("give steps= or minutes=", steps=None)
    refuses("steps and minutes are above 0", steps=0)
    refuses("1 windows of 17 tokens, and a batch takes 2", windows=WINDOWS[:1])
    refuses("windows of 200 tokens; the student has 128 positions", windows=tokens(2, 200))
    refuses(f"tokens are 0 to {VOCABULARY}, the vocabulary", windows=WINDOWS * 0 + torch.tensor([[0], [VOCABULARY]] * 3))  # fmt: skip  # noqa: E501
    refuses("the student has 1 attention modules and the teacher 2", attention=[nn.Linear(1, 1)])
    refuses("no parameter of the student would be trained", attention=[nn.Linear(1, 1)] * 2)


def test_models_that_do_not_fit_are_refused():
    student, teacher = pair()
    wide, many = copy.deepcopy(teacher), copy.deepcopy(teacher)
    wide.set_input_embeddings(nn.Embedding(VOCABULARY, 20))
    refuses("the student has hidden_size=24 and the teacher 20", student, wide)
    many.set_output_embeddings(nn.Linear(24, 99))
    refuses("the student has vocab_size=61 and the teacher 99", student, many)
    refuses("is the teacher's own weight", teacher, teacher)
    refuses(r"k_proj.weight is torch.bfloat16|q_proj.weight is torch.bfloat16", student.bfloat16(), teacher)  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch is above 0"),
        ({"lr": 0.0}, "lr is above 0"),
        ({"aligning": 1.5}, "aligning is a share"),
        ({"batch": 4, "at_once": 3}, "at_once=3 does not divide batch=4"),
        ({"train": "head"}, "train is 'attention' or 'all'"),
    ],
)
def test_recipes_out_of_range_are_refused(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        Recipe(**options)


def test_the_loss_curve_is_drawn(tmp_path):
    healed = Healed(tuple(1.0 / (1 + i) for i in range(50)), 20, 65.0, 12_800)
    for stages in (healed, Healed(healed.losses, 0, 1.0, 1), Healed(healed.losses, 50, 1.0, 1)):
        draw_losses(stages, tmp_path / "losses.png")
        assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no step"):
        draw_losses(Healed((), 0, 0.0, 0), tmp_path / "none.png")
