"""The state of a healing on disk: one file of weights and moments, with the record in its metadata.

The file is renamed into place when it is complete, so that an interruption at any point leaves a
complete state, the newest or the one before.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.cache.files import TensorFile, open_tensors, write_tensors

FILE = "healing.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Record:
    """The losses and the time so far. A run resumes it only if its `task` is equal."""

    task: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.losses)


def save_state(
    folder: Path,
    record: Record,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write weights, moments and the record, in place of an earlier state. Raises an OSError if the
    disk is full or read-only; an earlier state is as before."""
    tensors = {f"weight.{name}": each for name, each in parameters.items()}
    for name, each in parameters.items():
        for moment in MOMENTS:
            if each in optimizer.state:
                tensors[f"{moment}.{name}"] = optimizer.state[each][moment]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / FILE, {"record": json.dumps(vars(record))}, tensors)
    except OSError as error:
        raise OSError(
            f"the healing so far is not stored in {folder}: {error}; make room on its disk and "
            "start the same job again, which continues from the last state that was stored"
        ) from error


def load_record(folder: Path, task: dict[str, Any]) -> Record:
    """The record in a folder, or a new one if there is none. Raises a ValueError if it is of
    another task, or cannot be read."""
    if not (folder / FILE).exists():
        return Record(task)
    with open_tensors(folder / FILE) as file:
        stored = _record_in(file)
    names = sorted(task.keys() | stored.task.keys())
    for name in names:
        if stored.task.get(name) != task.get(name):
            raise ValueError(
                f"{folder} holds a healing with {name}={stored.task.get(name)!r}, this one has "
                f"{task.get(name)!r}; go on with the same task, or give another folder"
            )
    return stored


def load_state(
    folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Load the weights and the moments of a folder into these parameters and this optimiser. Raises
    a ValueError if they are not those of these parameters; nothing is then changed."""
    with open_tensors(folder / FILE) as file:
        steps = _record_in(file).steps
        kinds = ("weight", *MOMENTS) if steps else ("weight",)
        for name, parameter in parameters.items():
            for kind in kinds:
                entry = file.entries.get(f"{kind}.{name}")
                if entry is None or entry.shape != parameter.shape:
                    raise ValueError(
                        f"{file.path} has {kind}.{name} as {entry and entry.shape}, the student "
                        f"has {tuple(parameter.shape)}; give another folder"
                    )
        for name, parameter in parameters.items():
            stored = {kind: file.read(f"{kind}.{name}").to(parameter) for kind in kinds}
            parameter.data.copy_(stored.pop("weight"))
            if steps:
                step = torch.tensor(float(steps), device=parameter.device)
                optimizer.state[parameter] = {"step": step, **stored}


def _record_in(file: TensorFile) -> Record:
    try:
        return Record(**json.loads(file.metadata.get("record", "")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{file.path} is not the state of a healing ({error}); give another folder"
        ) from error
