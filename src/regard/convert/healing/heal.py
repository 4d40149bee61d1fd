"""Healing: distillation of the original model, the teacher, into the converted one, the student.

The targets are the teacher's predictions, so any text serves. By default only attention is trained.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache.paging.contexts import fingerprint, tensor_digest
from regard.convert.healing.environment import fast_attention, only_training, others_in
from regard.convert.healing.recipe import Budget, Recipe, positions_of, rows_of
from regard.convert.healing.state import Record, load_record, load_state, save_state
from regard.convert.measuring import divergence
from regard.convert.texts import check_tokens
from regard.hf.families.finding import find
from regard.hf.generating.predicting import hidden_states
from regard.hf.packages import require

DEFAULT = Recipe()
SAVE_SECONDS = 120.0  # between two states on disk: the most work that an interruption loses
Progress = Callable[[str, int, int], None]  # the present stage, steps or seconds done, in all


@dataclass(frozen=True)
class Healed:
    """The loss of every step, and the time and tokens that healing took.

    Attributes:
        losses: the divergence of predictions in each step, in nats a token.
        seconds: in total.
        tokens: read in total.

    Examples:
        >>> from regard.convert import Healed
        >>> Healed(losses=(0.9, 0.4, 0.3), seconds=60.0, tokens=4608).steps
        3
    """

    losses: tuple[float, ...]
    seconds: float
    tokens: int

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.losses)


def heal(
    student: Any,
    teacher: Any,
    tokens: Int[Tensor, "N L"],
    *,
    steps: int | None = None,
    minutes: float | None = None,
    recipe: Recipe = DEFAULT,
    attention: Sequence[nn.Module] | None = None,
    state: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Healed:
    """Train a converted model, in place, to imitate the original. Dropout is off.

    Knowledge distillation of predictions (Hinton et al. 2015, arXiv:1503.02531). Runs on the
    devices that `accelerate` finds; under `accelerate launch`, every process takes a part of each
    batch, and the first process writes the state.

    Args:
        student: a transformers causal language model in float32.
        teacher: the original, of any dtype, which shares no weights with the student.
        tokens: windows of text, `[N, L]` (`windows_of`); shuffled with the recipe's seed.
        steps: number of steps. Then the weights are reproducible, interrupted or not.
        minutes: time limit; with `steps`, whichever comes first.
        recipe: everything else that changes the result.
        attention: the student's attention modules; found if None.
        state: a folder to write the state to every two minutes, and to resume from.
        progress: called after every step.

    Raises:
        ValueError: if there is neither `steps` nor `minutes`, the models do not fit each other,
            weights are shared or not float32, the windows are too few, or `state` is of another
            task. Nothing is then changed.
        ImportError: if accelerate is missing.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.convert import heal
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=1, intermediate_size=16)
        >>> teacher, student = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
        >>> healed = heal(student, teacher, torch.randint(20, (4, 8)), steps=2)
        >>> healed.steps, healed.tokens
        (2, 32)
    """
    require("transformers", "accelerate", "safetensors")
    budget = _budget(steps, minutes)
    students = list(attention) if attention is not None else attention_like(student)
    _check_models(student, teacher)
    _check_tokens(tokens, recipe, student)
    trained = trained_parameters(student, students, recipe.train)
    _check_trained(trained, teacher)
    loss = Distillation(student, teacher)
    state = None if state is None else Path(state)
    task = {} if state is None else _task(recipe, budget, tokens, trained, teacher)
    record = Record(task) if state is None else load_record(state, task)
    dtype = recipe.autocast
    with only_training(student, teacher, trained), others_in(dtype, student, trained):
        run = _Run(loss, tokens, recipe, budget, record, trained, state, progress)
        with fast_attention(dtype, run.accelerator.device, student, teacher):
            run.run()
    return Healed(
        tuple(record.losses), record.seconds, record.steps * recipe.batch * tokens.shape[1]
    )


class Distillation(nn.Module):
    """The loss of a student and its teacher, the model that it was converted from, on one batch.

    It is a module, so that wrappers for several devices (DDP) run every forward.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, tokens: Int[Tensor, "B L"], chosen: Int[Tensor, " P"]) -> Float[Tensor, ""]:
        """The mean `KL(teacher || student)` of the predictions at the `chosen` positions, in nats a
        token."""
        with torch.no_grad():
            wanted = hidden_states(self.teacher, tokens)
        hidden = hidden_states(self.student, tokens)
        return divergence(self.student, hidden[:, chosen], self.teacher, wanted[:, chosen])


@dataclass
class _Run:
    """A run of healing: the optimiser's steps until the budget is used up."""

    loss: Any
    tokens: Tensor
    recipe: Recipe
    budget: Budget
    record: Record
    trained: dict[str, nn.Parameter]
    state: Path | None
    progress: Progress

    def __post_init__(self) -> None:
        recipe, self.accelerator = self.recipe, _accelerator(self.recipe)
        adam = torch.optim.AdamW(
            self.trained.values(), betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
        )
        self.loss, self.optimizer = self.accelerator.prepare(self.loss, adam)
        if self.state is not None and self.record.steps:
            load_state(self.state, self.trained, self._adam)

    @property
    def _adam(self) -> torch.optim.Optimizer:
        plain: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return plain

    def run(self) -> None:
        """Run all steps; write the state every `SAVE_SECONDS` and at the end."""
        started, before = time.perf_counter(), self.record.seconds
        saved = started
        while (share := self._share()) < 1:
            loss = self._step(share)
            now = time.perf_counter()
            self.record.losses.append(loss)
            self.record.seconds = before + now - started
            self._report(loss)
            if now - saved >= SAVE_SECONDS:
                self._save()
                saved = now
        self._save()
        self.accelerator.wait_for_everyone()

    def _share(self) -> float:
        """The share of the budget that is used up, by the first process's clock."""
        from accelerate.utils import broadcast_object_list

        share = [self.budget.share(self.record.steps, self.record.seconds)]
        return broadcast_object_list(share)[0] if self.accelerator.num_processes > 1 else share[0]

    def _step(self, share: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(share)
        losses = []
        for piece, chosen in self._pieces():
            with self.accelerator.accumulate(self.loss):
                with self._precision():
                    loss = self.loss(piece, chosen)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.trained.values(), self.recipe.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        mean: Tensor = self.accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        return float(mean)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's windows of the step, `at_once` at a time, and the positions to compare."""
        recipe, step = self.recipe, self.record.steps
        device = self.accelerator.device
        windows, length = self.tokens.shape
        rows = rows_of(step, windows=windows, batch=recipe.batch, seed=recipe.seed)
        mine = rows[self.accelerator.process_index :: self.accelerator.num_processes]
        chosen = positions_of(step, length=length, share=recipe.positions, seed=recipe.seed)
        for piece in self.tokens[mine].split(recipe.at_once or recipe.batch):
            yield piece.to(device), chosen.to(device)

    def _precision(self) -> Any:
        dtype = self.recipe.autocast
        return (
            nullcontext() if dtype is None else torch.autocast(self.accelerator.device.type, dtype)
        )

    def _report(self, loss: float) -> None:
        budget, record = self.budget, self.record
        what = f"imitating, loss {loss:.3f}"
        if budget.steps is not None:
            self.progress(what, record.steps, budget.steps)
        else:
            assert budget.seconds is not None
            self.progress(what, min(int(record.seconds), int(budget.seconds)), int(budget.seconds))

    def _save(self) -> None:
        if self.state is not None and self.accelerator.is_main_process:
            save_state(self.state, self.record, self.trained, self._adam)


def _accelerator(recipe: Recipe) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    unused = DistributedDataParallelKwargs(find_unused_parameters=recipe.train == "all")
    made = Accelerator(kwargs_handlers=[unused])
    mine, left = divmod(recipe.batch, made.num_processes)
    at_once = min(mine, recipe.at_once or mine)
    if left or mine % max(at_once, 1):
        raise ValueError(
            f"batch={recipe.batch} does not divide among {made.num_processes} processes, "
            f"{at_once} at once"
        )
    made.gradient_accumulation_steps = mine // at_once
    return made


def attention_like(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a model in order, of a known family or not, and layers of regard
    placed in it."""
    found = find(model)
    return [
        module
        for name, module in model.named_modules()
        if name in found.known or name in found.unknown
    ]


def trained_parameters(
    student: Any, students: Sequence[nn.Module], train: str
) -> dict[str, nn.Parameter]:
    """The parameters to train, by name: those of attention, or all but embeddings and head."""
    if train == "attention":
        chosen = {id(each) for module in students for each in module.parameters()}
        return {name: each for name, each in student.named_parameters() if id(each) in chosen}
    ends = (student.get_input_embeddings(), student.get_output_embeddings())
    fixed = {id(each) for module in ends for each in module.parameters()}
    return {name: each for name, each in student.named_parameters() if id(each) not in fixed}


def _budget(steps: int | None, minutes: float | None) -> Budget:
    if steps is None and minutes is None:
        raise ValueError("healing ends after some steps or some minutes; give steps= or minutes=")
    if (steps is not None and steps < 1) or (minutes is not None and not minutes > 0):
        raise ValueError(f"steps and minutes are above 0, got steps={steps}, minutes={minutes}")
    return Budget(steps, None if minutes is None else 60.0 * minutes)


def _check_models(student: Any, teacher: Any) -> None:
    for what, name in (("hidden_size", "input"), ("vocab_size", "output")):
        axis = 1 if what == "hidden_size" else 0
        ours, theirs = (
            getattr(model, f"get_{name}_embeddings")().weight.shape[axis]
            for model in (student, teacher)
        )
        if ours != theirs:
            raise ValueError(
                f"the student has {what}={ours:,} and the teacher {theirs:,}; "
                "the teacher must be the model that the student was converted from"
            )


def _check_tokens(tokens: Tensor, recipe: Recipe, student: Any) -> None:
    windows, length = tokens.shape
    if windows < recipe.batch or length < 2:
        raise ValueError(
            f"there are {windows:,} windows of {length:,} tokens, and a batch takes "
            f"{recipe.batch} of at least 2; give more text, or a smaller batch"
        )
    longest = getattr(student.config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ValueError(f"windows of {length:,} tokens; the student has {longest:,} positions")
    check_tokens(tokens, student)


def _check_trained(trained: dict[str, nn.Parameter], teacher: nn.Module) -> None:
    if not trained:
        raise ValueError(
            "no parameter of the student would be trained: give attention= modules that are in it"
        )
    held = {each.data_ptr() for each in teacher.parameters()}
    for name, parameter in trained.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} is {parameter.dtype}, where small steps round to zero; load the student "
                "in float32, and give Recipe(autocast=torch.bfloat16) for speed"
            )
        if parameter.data_ptr() in held:
            raise ValueError(
                f"{name} is the teacher's own weight and would change with the student; "
                "give the student a copy: copy.deepcopy(student)"
            )


def _task(
    recipe: Recipe,
    budget: Budget,
    tokens: Tensor,
    trained: dict[str, nn.Parameter],
    teacher: nn.Module,
) -> dict[str, Any]:
    """All that must be equal for a run to resume another, as data that JSON holds."""
    shapes = {name: list(each.shape) for name, each in trained.items()}
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(recipe).items()}
    values["autocast"] = None if recipe.autocast is None else str(recipe.autocast)
    digest = tensor_digest("tokens", tokens.to(torch.int64)).hex()
    own = {"tokens": digest, "trained": shapes, "teacher": fingerprint(teacher)}
    return {**values, **asdict(budget), **own}
