"""The state of a healing on disk: weights and moments as safetensors, the rest as JSON.

The JSON names its file of weights and is renamed into place last, so that an interruption at any
point leaves one complete state, the newest or the one before.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

RECORD = "healing.json"
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


def fingerprint(tokens: Int[Tensor, "N L"]) -> str:
    """A digest of the windows."""
    return hashlib.sha256(tokens.to(torch.int64).cpu().contiguous().numpy().tobytes()).hexdigest()


def save_state(
    folder: Path,
    record: Record,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write weights and moments, then the record that names them; then remove older weights.

    Raises:
        OSError: if the disk is full or read-only; an earlier state is as before.
    """
    from safetensors import SafetensorError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, record, parameters, optimizer)
    except (OSError, SafetensorError) as error:
        for part in folder.glob("*.unfinished"):
            part.unlink()
        raise OSError(
            f"the healing so far is not stored in {folder}: {error}; make room on its disk and "
            "start the same job again, which continues from the last state that was stored"
        ) from error


def _write(
    folder: Path,
    record: Record,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    from safetensors.torch import save_file

    weights = f"step-{record.steps}.safetensors"
    tensors = {f"weight.{name}": each.detach().contiguous() for name, each in parameters.items()}
    for name, each in parameters.items():
        for moment in MOMENTS:
            if each in optimizer.state:
                tensors[f"{moment}.{name}"] = optimizer.state[each][moment]
    save_file(tensors, folder / f"{weights}.unfinished")
    (folder / f"{weights}.unfinished").replace(folder / weights)
    written = {
        "weights": weights,
        "steps": record.steps,
        "seconds": record.seconds,
        "losses": record.losses,
        "task": record.task,
    }
    unfinished = folder / f"{RECORD}.unfinished"
    unfinished.write_text(json.dumps(written, indent=1), encoding="utf-8")
    unfinished.replace(folder / RECORD)
    for old in folder.glob("step-*"):
        if old.name != weights:
            old.unlink()


def load_record(folder: Path, task: dict[str, Any]) -> Record:
    """The record in a folder, or a new one if there is none.

    Raises:
        ValueError: if it is of another task, or cannot be read.
    """
    path = folder / RECORD
    if not path.exists():
        return Record(task)
    read = _read(path)
    different = sorted(
        name
        for name in task.keys() | read["task"].keys()
        if read["task"].get(name) != task.get(name)
    )
    if different:
        name = different[0]
        raise ValueError(
            f"{folder} holds a healing with {name}={read['task'].get(name)!r}, this one has "
            f"{task.get(name)!r}; go on with the same task, or give another folder"
        )
    return Record(task, read["losses"], read["seconds"])


def load_state(
    folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Load the weights and the moments of a folder into these parameters and this optimiser.

    Raises:
        ValueError: if they are not those of these parameters. Nothing is then changed.
    """
    from safetensors.torch import load_file

    read = _read(folder / RECORD)
    tensors = load_file(folder / read["weights"])
    kinds = ("weight", *MOMENTS) if read["steps"] else ("weight",)
    for name, parameter in parameters.items():
        for kind in kinds:
            stored = tensors.get(f"{kind}.{name}")
            if stored is None or stored.shape != parameter.shape:
                raise ValueError(
                    f"{folder / read['weights']} has {kind}.{name} as "
                    f"{None if stored is None else tuple(stored.shape)}, the student has "
                    f"{tuple(parameter.shape)}; give another folder"
                )
    for name, parameter in parameters.items():
        parameter.data.copy_(tensors[f"weight.{name}"])
        if read["steps"]:
            moments = {kind: tensors[f"{kind}.{name}"].to(parameter) for kind in MOMENTS}
            step = torch.tensor(float(read["steps"]), device=parameter.device)
            optimizer.state[parameter] = {"step": step, **moments}


def _read(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not {"weights", "steps", "seconds", "losses", "task"} <= read.keys():
            raise ValueError("fields are missing")
    except ValueError as error:
        raise ValueError(
            f"{path} is not the record of a healing ({error}); give another folder"
        ) from error
    return read
