"""heal: a converted student learns from the model that it was made of, on any text of the user's.

The teacher's own outputs are what is learned, so no labels are needed and little text goes far:
every token says what every layer should have put out. Attention learns, the rest stays.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.convert.healing.losses import Lesson
from regard.convert.healing.recipe import Budget, Recipe, positions_of, rows_of
from regard.convert.healing.setting import attention_in, only_these_learn, rest_in
from regard.convert.healing.state import Record, fingerprint, load_record, load_state, save_state
from regard.hf.families.finding import find
from regard.hf.loading.loading import require

DEFAULT = Recipe()
SAVE_SECONDS = 120.0  # what an interruption may cost
Progress = Callable[[str, int, int], None]  # what is done now, steps (or seconds) done, in all


@dataclass(frozen=True)
class Healed:
    """What healing took, and how the loss fell: one number a step.

    The first `aligned` losses are the mean share of a layer's energy that is wrong; the others
    are nats a token, and layers' errors by the recipe's `layer_weight`.
    """

    losses: tuple[float, ...]
    aligned: int
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
    """Teach a converted model, in place, to do what the original does. Dropout is off.

    Runs on whatever `accelerate` finds: under `accelerate launch`, every process takes its part of
    each batch. Several processes write one state, the first one's.

    Args:
        student: a transformers causal language model in float32.
        teacher: the original, of any dtype, with weights of its own.
        tokens: windows of text, `[N, L]` (`windows_of`); seen in an order of the recipe's seed.
        steps: when to end. Then the same call gives the same weights, interrupted or not.
        minutes: when to end, by the clock; with `steps`, whichever comes first.
        recipe: all that changes the result.
        attention: the student's attention modules in order; found if None.
        state: a folder to write the state to now and then, and to go on from.
        progress: called after every step.

    Raises:
        ValueError: if there is neither `steps` nor `minutes`, the models do not fit each other,
            weights are shared or not float32, the windows are too few, or `state` is another
            task's. Nothing is then changed.
        ImportError: if accelerate is missing.
    """
    require("transformers", "accelerate", "safetensors")
    budget = _budget(steps, minutes)
    pupils = list(attention) if attention is not None else attention_like(student)
    masters = attention_like(teacher)
    _check_models(student, teacher, pupils, masters)
    _check_tokens(tokens, recipe, student)
    learning = learning_parameters(student, pupils, recipe.train)
    _check_learning(learning, teacher)
    lesson = Lesson(student, teacher, pupils, masters, layer_weight=recipe.layer_weight)
    task = _task(recipe, budget, tokens, learning)
    record = Record(task) if state is None else load_record(Path(state), task)
    dtype = recipe.autocast
    with only_these_learn(student, teacher, learning), rest_in(dtype, student, learning):
        run = _Run(lesson, tokens, recipe, budget, record, learning, state, progress)
        with attention_in(dtype, run.accelerator.device, student, teacher):
            run.to_the_end()
    return Healed(
        tuple(record.losses),
        record.aligned,
        record.seconds,
        record.steps * recipe.batch * tokens.shape[1],
    )


class _Run:
    """One healing under way."""

    def __init__(
        self,
        lesson: Lesson,
        tokens: Tensor,
        recipe: Recipe,
        budget: Budget,
        record: Record,
        learning: dict[str, nn.Parameter],
        state: Path | None,
        progress: Progress,
    ) -> None:
        self.tokens, self.recipe, self.budget, self.record = tokens, recipe, budget, record
        self.learning, self.progress = learning, progress
        self.state = None if state is None else Path(state)
        self.accelerator = _accelerator(recipe)
        adam = torch.optim.AdamW(
            learning.values(), betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
        )
        self.lesson, self.optimizer = self.accelerator.prepare(lesson, adam)
        if self.state is not None and record.steps:
            load_state(self.state, learning, self._adam)

    @property
    def _adam(self) -> torch.optim.Optimizer:
        plain: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return plain

    def to_the_end(self) -> None:
        """Step by step until the budget is used up; the state is written now and then, and last."""
        started, before = time.perf_counter(), self.record.seconds
        saved = started
        while (share := self._share()) < 1:
            aligned, loss = self.recipe.aligns(share), self._step(share)
            now = time.perf_counter()
            self.record.losses.append(loss)
            self.record.aligned += aligned
            self.record.seconds = before + now - started
            self._tell(aligned, loss)
            if now - saved >= SAVE_SECONDS:
                self._save()
                saved = now
        self._save()
        self.accelerator.wait_for_everyone()

    def _share(self) -> float:
        """How much of the budget is used up, by the first process's clock."""
        from accelerate.utils import broadcast_object_list

        share = [self.budget.share(self.record.steps, self.record.seconds)]
        return broadcast_object_list(share)[0] if self.accelerator.num_processes > 1 else share[0]

    def _step(self, share: float) -> float:
        if self.record.steps == self.record.aligned and not self.recipe.aligns(share):
            self._adam.state.clear()  # gradients of another loss have other sizes
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(share)
        losses = []
        for piece, chosen in self._pieces(share):
            with self.accelerator.accumulate(self.lesson):
                with self._precision():
                    loss = self.lesson(piece, chosen)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.learning.values(), self.recipe.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        mean: Tensor = self.accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        return float(mean)

    def _pieces(self, share: float) -> Iterator[tuple[Tensor, Tensor | None]]:
        """This process's part of the step's windows, as many at once as memory is meant to hold."""
        recipe, step = self.recipe, self.record.steps
        device = self.accelerator.device
        windows, length = self.tokens.shape
        rows = rows_of(step, windows=windows, batch=recipe.batch, seed=recipe.seed)
        mine = rows[self.accelerator.process_index :: self.accelerator.num_processes]
        chosen = None
        if not recipe.aligns(share):
            chosen = positions_of(step, length=length, share=recipe.positions, seed=recipe.seed)
            chosen = chosen.to(device)
        for piece in self.tokens[mine].split(recipe.at_once or recipe.batch):
            yield piece.to(device), chosen

    def _precision(self) -> Any:
        dtype = self.recipe.autocast
        return (
            nullcontext() if dtype is None else torch.autocast(self.accelerator.device.type, dtype)
        )

    def _tell(self, aligned: bool, loss: float) -> None:
        budget, record = self.budget, self.record
        what = f"{'aligning layers' if aligned else 'imitating'}, loss {loss:.3f}"
        if budget.steps is not None:
            self.progress(what, record.steps, budget.steps)
        else:
            assert budget.seconds is not None
            self.progress(what, min(int(record.seconds), int(budget.seconds)), int(budget.seconds))

    def _save(self) -> None:
        if self.state is not None and self.accelerator.is_main_process:
            save_state(self.state, self.record, self.learning, self._adam)


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
    """The attention modules of a model in order, of a known family or not: layers of regard that
    have taken their places count."""
    found = find(model)
    return [
        module
        for name, module in model.named_modules()
        if name in found.known or name in found.unknown
    ]


def learning_parameters(
    student: Any, pupils: Sequence[nn.Module], train: str
) -> dict[str, nn.Parameter]:
    """What learns, by its name in the student: the attention's, or all but embeddings and head."""
    if train == "attention":
        chosen = {id(each) for module in pupils for each in module.parameters()}
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


def _check_models(
    student: Any, teacher: Any, pupils: Sequence[nn.Module], masters: Sequence[nn.Module]
) -> None:
    if not pupils or len(pupils) != len(masters):
        raise ValueError(
            f"the student has {len(pupils)} attention modules and the teacher {len(masters)}; "
            "each learns from its own, so give as many, in order, as attention="
        )
    for what, name in (("hidden_size", "input"), ("vocab_size", "output")):
        axis = 1 if what == "hidden_size" else 0
        ours, theirs = (
            getattr(model, f"get_{name}_embeddings")().weight.shape[axis]
            for model in (student, teacher)
        )
        if ours != theirs:
            raise ValueError(
                f"the student has {what}={ours:,} and the teacher {theirs:,}; "
                "a student learns from the model that it was made of"
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
    vocabulary = student.get_output_embeddings().weight.shape[0]
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise ValueError(
            f"tokens are {int(tokens.min())} to {int(tokens.max())}, the vocabulary has "
            f"{vocabulary:,}; use the student's own tokenizer"
        )


def _check_learning(learning: dict[str, nn.Parameter], teacher: nn.Module) -> None:
    if not learning:
        raise ValueError(
            "nothing of the student would learn: attention= is to name modules that are in it"
        )
    held = {each.data_ptr() for each in teacher.parameters()}
    for name, parameter in learning.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} is {parameter.dtype}, whose steps round away; load the student in "
                "float32, and give Recipe(autocast=torch.bfloat16) for speed"
            )
        if parameter.data_ptr() in held:
            raise ValueError(
                f"{name} is the teacher's own weight and would change with the student; "
                "give the student a copy: copy.deepcopy(student)"
            )


def _task(
    recipe: Recipe, budget: Budget, tokens: Tensor, learning: dict[str, nn.Parameter]
) -> dict[str, Any]:
    """What has to be the same for a run to go on where another stopped, fit for JSON."""
    shapes = {name: list(each.shape) for name, each in learning.items()}
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(recipe).items()}
    values["autocast"] = None if recipe.autocast is None else str(recipe.autocast)
    return {**values, **asdict(budget), "tokens": fingerprint(tokens), "learning": shapes}
