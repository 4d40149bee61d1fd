"""A healing that was interrupted resumes from its state, and only from its own."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from full_disk import files_of_at_most
from regard.convert import Recipe
from regard.convert.healing import heal as healing
from regard.convert.healing.heal import heal
from regard.convert.healing.state import MOMENTS
from students import QUICK, WINDOWS, pair, state_of


class Interrupted(Exception):
    """Raised to interrupt a run."""


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
    assert healed.losses == expected.losses
    for name, value in state_of(whole).items():
        assert state_of(resumed)[name].equal(value), name


def test_a_finished_state_is_only_loaded(tmp_path):
    student, teacher = pair()
    first = heal(student, teacher, WINDOWS, steps=3, recipe=QUICK, state=tmp_path)
    again, _ = pair()
    assert heal(again, teacher, WINDOWS, steps=3, recipe=QUICK, state=tmp_path) == first
    assert all(value.equal(state_of(student)[name]) for name, value in state_of(again).items())


def test_a_state_is_one_file_of_safetensors(tmp_path, monkeypatch):
    monkeypatch.setattr(healing, "SAVE_SECONDS", 0.0)
    student, teacher = pair()
    seen = set()

    def list_files(what, done, total):
        seen.update(file.name for file in tmp_path.glob("**/*"))

    heal(student, teacher, WINDOWS, steps=3, recipe=QUICK, state=tmp_path, progress=list_files)
    assert seen == {"healing.safetensors"}
    (path,) = tmp_path.iterdir()
    with safe_open(path, framework="pt") as file:
        assert len(json.loads(file.metadata()["record"])["losses"]) == 3
        assert {name.partition(".")[0] for name in file.keys()} == {*MOMENTS, "weight"}  # noqa: SIM118


def test_another_task_does_not_resume_from_a_state(tmp_path):
    student, teacher = pair()
    heal(student, teacher, WINDOWS, steps=1, recipe=QUICK, state=tmp_path)
    was = state_of(student)
    other = Recipe(**{**vars(QUICK), "lr": 1.0})
    with pytest.raises(ValueError, match=r"healing with lr=0\.002, this one has 1\.0"):
        heal(student, teacher, WINDOWS, steps=1, recipe=other, state=tmp_path)
    changed = copy.deepcopy(teacher)
    with torch.no_grad():
        changed.get_input_embeddings().weight.add_(1)
    with pytest.raises(ValueError, match="holds a healing with teacher="):
        heal(student, changed, WINDOWS, steps=1, recipe=QUICK, state=tmp_path)
    with pytest.raises(ValueError, match="holds a healing with tokens="):
        heal(student, teacher, WINDOWS[:4], steps=1, recipe=QUICK, state=tmp_path)
    save_file({}, tmp_path / "healing.safetensors", metadata={"record": "{}"})
    with pytest.raises(ValueError, match="is not the state of a healing"):
        heal(student, teacher, WINDOWS, steps=1, recipe=QUICK, state=tmp_path)
    assert all(value.equal(was[name]) for name, value in state_of(student).items())


def test_a_full_disk_is_one_sentence_and_leaves_no_half_file(tmp_path):
    student, teacher = pair()
    sentence = rf"not stored in {tmp_path}: .*; make room on its disk and start the same job again"
    with files_of_at_most(1000), pytest.raises(OSError, match=sentence):
        heal(student, teacher, WINDOWS, steps=1, recipe=QUICK, state=tmp_path)
    assert list(tmp_path.iterdir()) == []
