"""The job of `regard convert`: check, load, measure, convert, place, heal, measure, save."""

import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from regard.convert.converting import Converted, convert
from regard.convert.exact.portable import check_surroundings, to_deepseek_v3
from regard.convert.healing.heal import Healed, heal
from regard.convert.healing.own_text import stored_own_text
from regard.convert.healing.recipe import Recipe
from regard.convert.lossy.refining import PASSES
from regard.convert.measuring import Measured, dtype_name, measure, measure_speeds
from regard.convert.report import Report, card
from regard.convert.saving import cast, check_free, save
from regard.convert.targets import Form, Target, target_of
from regard.convert.texts import LENGTH, calibration, many_kinds, python_topics, windows_of
from regard.hf.families.finding import attention_modules
from regard.hf.families.layers import attention_of
from regard.hf.loading.checkpoints import load, skeleton, stored_dtype
from regard.hf.placing.place import has_placed_layers, place, sharing
from regard.rates import processor

BY_LAYER = 0.6  # share of keys and values below which a budget gives a rank to each layer
MEASURED = 2  # windows of each text to measure on
OWN = "Python's own texts and short ones of many kinds"  # name of the default in the report
BY_ITSELF = "short texts of many kinds", "text that the original wrote"  # names of `own_text` there
WRITTEN = 8  # windows of its own text that the original writes for each minute of healing, as many
# as `benchmarks/elsewhere.py --own-text only` measures for half an hour
LR = {"heads": 5e-4}  # of healing, where it is not the recipe's: MQA lost more at 2e-4 and 1e-3
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Job:
    """The options of a conversion, which is computed in float32; texts are given by name."""

    model: Path  # a folder or a GGUF file
    to: str  # `mha`, `gqa:N`, `mqa`, `mla:RANK` or `mla:RANK+ROPE`; `mla` with a budget
    out: Path  # the folder to write
    form: Form | None = None  # this and the next two: see `target_of`
    portable: bool = False
    budget: float | None = None
    by_layer: bool = False  # whether the latents' ranks differ by layer
    # texts to calibrate on, besides those of `heal`; those of `calibration` if there are none
    calibrate: Mapping[str, str] = field(default_factory=dict)
    # texts to heal on, by distillation from the original; no healing without them or `own_text`
    heal: Mapping[str, str] = field(default_factory=dict)
    own_text: bool = False  # whether it is healed on text that the original writes, too
    minutes: float = 30.0  # of healing
    # texts to measure on, besides a half of Python's reference
    held_out: Mapping[str, str] = field(default_factory=dict)
    low_memory: bool = False  # whether weights stay on disk, except those of the present layer
    dtype: torch.dtype | None = None  # of the weights that are written; None: the checkpoint's own
    device: str = "cpu"  # where it is computed


def run_job(
    job: Job, *, recipe: Recipe | None = None, progress: Progress = lambda what, done, total: None
) -> Report:
    """Convert the model, save it in a new folder, and return the report.

    Before any work, a FileExistsError or FileNotFoundError is raised if `out` cannot be written,
    and a ValueError if a text is too short; before weights are read, a CheckpointError if the model
    is not a sound checkpoint, and a ValueError if it cannot be converted to that.
    """
    started = time.perf_counter()
    # absolute: "." has no name, and an empty folder that is filled is another folder afterwards
    job = replace(job, model=job.model.absolute(), out=check_free(job.out))
    progress("reading the configuration", 0, 0)
    stored = stored_dtype(job.model)
    dtype = job.dtype or stored
    target, was = _target(job, skeleton(job.model), dtype, stored)
    progress("loading", 0, 0)
    where: dict[str, Any] = {"device": job.device, "low_memory": job.low_memory}
    model, tokenizer = load(job.model, **where, progress=progress)  # in float32
    texts = _Texts.of(job, tokenizer, _length(model))
    progress("measuring as shipped", 0, 0)
    before = measure(model, texts.measured, stored)
    # with weights on disk, a step takes as long as reading them: speeds are then not measured
    shipped = None if job.low_memory else sharing(model)
    (converted,) = convert(model, [target], texts.calibration, progress=progress)
    made = _placed(job, model, converted)
    recipe = recipe or Recipe(autocast=_fast_dtype(job.device), lr=LR.get(target.kind, Recipe.lr))
    unhealed, healing = _healed(job, made, texts, tokenizer, dtype, recipe, progress)
    progress("measuring as converted", 0, 0)
    round_weights(made, dtype)
    after = measure(made, texts.measured, dtype)
    window = next(iter(texts.measured.values()))[0]
    speeds = [{}, {}] if shipped is None else measure_speeds([shipped, made], window)
    report = Report(
        model=job.model.name,
        was=was,
        target=target,
        stock=not has_placed_layers(made),
        calibrated_on=tuple(dict.fromkeys([*job.calibrate, *job.heal])) or (OWN,),
        calibration_tokens=texts.calibration.numel(),
        before=replace(before, **speeds[0]),
        after=replace(after, **speeds[1]),
        dtype=dtype_name(dtype),
        layers=tuple(converted.report),
        healing=healing,
        healed_on=(*job.heal, *(BY_ITSELF if job.own_text else ())),
        unhealed=unhealed,
        seconds=time.perf_counter() - started,
    )
    progress("writing", 0, 0)
    made = made if job.low_memory else made.to(dtype)
    save(made, tokenizer, job.out, card=card(report), report=report.as_dict(), dtype=dtype)
    shutil.rmtree(_state(job), ignore_errors=True)
    return report


@torch.no_grad()
def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Round the weights to a dtype, in place and without changing their own: what is measured then
    is what is written. Weights on disk are left alone. Raises a ValueError if a weight is too large
    for the dtype."""
    for name, weight in model.named_parameters():
        if weight.is_meta or weight.dtype == dtype:
            continue
        weight.copy_(cast(name, weight, dtype))


def _target(job: Job, model: Any, dtype: torch.dtype, stored: torch.dtype) -> tuple[Target, str]:
    """Parse the job's target; return it with a description of the shipped attention."""
    if job.low_memory and job.device != "cpu":
        raise ValueError(f"low_memory computes on the CPU, got device={job.device!r}")
    if job.low_memory and (job.heal or job.own_text or job.portable):
        raise ValueError(
            "low_memory holds one layer in memory at a time; healing and portable need all of them"
        )
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    target = target_of(
        job.to,
        shipped,
        form=job.form,
        portable=job.portable,
        budget=job.budget,
        dtype=dtype,
        stored=stored,
    )
    if job.by_layer and target.kind != "exact-rope":
        raise ValueError(
            f"by_layer allots ranks of a joint latent with exact rotation; {target} has none"
        )
    if target.portable:
        check_surroundings(model)
    first = shipped[0]
    was = f"{first.kind}, {first.num_heads} heads on {first.num_kv_heads} of {first.head_dim}"
    share = target.rank / (2 * first.num_kv_heads * first.head_dim)
    few = target.kind == "exact-rope" and ":" not in job.to and share < BY_LAYER
    by_layer = job.by_layer or (few and not job.low_memory)
    return replace(target, by_layer=by_layer, passes=0 if job.low_memory else PASSES), was


def _length(model: Any) -> int:
    return min(LENGTH, int(getattr(model.config, "max_position_embeddings", None) or LENGTH))


class _Texts(NamedTuple):
    """Windows of tokens to calibrate on, to measure on, and to heal on; the last may be none."""

    calibration: Int[Tensor, "N L"]
    measured: dict[str, Int[Tensor, "N L"]]
    healing: Int[Tensor, "N L"]

    @classmethod
    def of(cls, job: Job, tokenizer: Any, length: int) -> "_Texts":
        read = [*job.calibrate.values(), *job.heal.values()]
        tokens = calibration(tokenizer, read, length=length).to(job.device)
        shorter = 3 * length // 4
        healing = torch.empty(0, shorter, dtype=torch.int64)
        if given := [*job.heal.values(), *([many_kinds()] if job.own_text else [])]:
            healing = windows_of(tokenizer, given, length=shorter)
        held_out = {"Python's reference": python_topics()[1], **job.held_out}
        measured = {
            name: windows_of(tokenizer, [text], length=length, most=MEASURED).to(job.device)
            for name, text in held_out.items()
        }
        return cls(tokens, measured, healing.to(job.device))


def _placed(job: Job, model: Any, converted: Converted) -> Any:
    layers: Any = converted.layers
    return (to_deepseek_v3 if converted.target.portable else place)(model, layers)


def _healed(
    job: Job,
    made: Any,
    texts: _Texts,
    tokenizer: Any,
    dtype: torch.dtype,
    recipe: Recipe,
    progress: Progress,
) -> tuple[Measured | None, Healed | None]:
    """Measure the converted model, and heal it; None twice if the job has no text to heal on."""
    tokens, length = texts.healing, texts.healing.shape[1]
    if not len(tokens):
        return None, None
    unhealed = measure(made, texts.measured, dtype)
    teacher, _ = load(job.model, device=job.device)
    if recipe.autocast is not None:
        teacher = teacher.to(recipe.autocast)
    if job.own_text:
        windows = math.ceil(WRITTEN * job.minutes)
        own = stored_own_text(
            _state(job), teacher, tokenizer, windows=windows, length=length, progress=progress
        )
        tokens = torch.cat([tokens, own.to(tokens)])
    return unhealed, heal(
        made, teacher, tokens,
        minutes=job.minutes, recipe=recipe, state=_state(job), progress=progress,
    )  # fmt: skip


def _fast_dtype(device: str) -> torch.dtype | None:
    """bfloat16 where the device has products of it, else None."""
    if device != "cpu":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
    instructions = set(" ".join(processor()).lower().split())
    return torch.bfloat16 if instructions & {"avx512_bf16", "amx_bf16", "bf16"} else None


def _state(job: Job) -> Path:
    """The folder of healing's state until the model is saved: the same job resumes from it."""
    return job.out.with_name(f".{job.out.name}.healing")
