"""A student with damaged attention is trained to imitate its teacher."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.convert import Recipe
from regard.convert.healing.heal import Distillation, heal
from regard.hf import attention_modules
from regard.hf.running.calls import precision_of
from students import QUICK, WINDOWS, distance, pair, state_of
from tiny import VOCABULARY, tokens


@torch.no_grad()
def test_the_loss_of_the_predictions_is_their_divergence():
    student, teacher = pair()
    loss = Distillation(student, teacher)
    every = torch.arange(WINDOWS.shape[1])
    ours, theirs = (m(WINDOWS).logits.double().log_softmax(-1) for m in (student, teacher))
    wanted = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert float(loss(WINDOWS, every)) == pytest.approx(float(wanted), rel=1e-4)
    assert distance(student, teacher) > 0


@pytest.mark.parametrize("placed", [False, True])
def test_healing_reduces_the_divergence(placed):
    student, teacher = pair(placed=placed)
    before = distance(student, teacher)
    healed = heal(student, teacher, WINDOWS, steps=20, recipe=QUICK)
    assert healed.steps == 20
    assert healed.tokens == 20 * 2 * 17
    assert distance(student, teacher) < 0.7 * before
    assert sum(healed.losses[-3:]) < sum(healed.losses[:3])


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


def test_windows_in_pieces_are_the_same_batch():
    outcomes = []
    for at_once in (None, 2, 1):
        student, teacher = pair()
        recipe = Recipe(**{**vars(QUICK), "batch": 4, "at_once": at_once})
        outcomes.append((heal(student, teacher, WINDOWS, steps=3, recipe=recipe), student))
    for healed, student in outcomes[1:]:
        assert healed.losses == pytest.approx(outcomes[0][0].losses, rel=1e-4)
        for name, value in state_of(student).items():
            torch.testing.assert_close(value, state_of(outcomes[0][1])[name], atol=1e-3, rtol=1e-3)


TWO = """
import json, sys
import test_heal as here
student, teacher = here.pair()
options = {"batch": 4, "at_once": int(sys.argv[1])}
recipe = here.Recipe(**{**vars(here.QUICK), **options})
healed = here.heal(student, teacher, here.WINDOWS, steps=4, recipe=recipe)
from accelerate import PartialState
if PartialState().is_main_process:
    print(json.dumps([PartialState().num_processes, healed.losses]))
"""


@pytest.mark.long
def test_two_processes_share_a_batch(tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here, here.parents[1] / "support")))
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
    assert shared == pytest.approx(alone, rel=0.05)
    assert pieces == pytest.approx(alone, rel=0.05)


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
    heal(student, half, WINDOWS, steps=20, recipe=recipe)
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
    refuses("windows of 129 tokens; the student has 128", windows=tokens(2, 129))
    heal(*pair(), tokens(2, 128), steps=1, recipe=QUICK)
    refuses(f"tokens are in 0..{VOCABULARY - 1}, as the model has them, got 0 to {VOCABULARY}", windows=WINDOWS * 0 + torch.tensor([[0], [VOCABULARY]] * 3))  # fmt: skip  # noqa: E501
    refuses("no parameter of the student would be trained", attention=[nn.Linear(1, 1)])


def test_models_that_do_not_fit_are_refused():
    student, teacher = pair()
    wide, many = copy.deepcopy(teacher), copy.deepcopy(teacher)
    wide.set_input_embeddings(nn.Embedding(VOCABULARY, 20))
    refuses("the student has hidden_size=24 and the teacher 20", student, wide)
    many.set_output_embeddings(nn.Linear(24, 99))
    refuses("the student has vocab_size=61 and the teacher 99", student, many)
    refuses("is the teacher's own weight", teacher, teacher)
    refuses(r"k_proj.weight is torch.bfloat16|q_proj.weight is torch.bfloat16", student.bfloat16(), teacher)  # fmt: skip  # noqa: E501
