"""What does a decoding step cost besides arithmetic: in Python, and in starting kernels?

    python benchmarks/step_costs.py          a layer, its caches, an installed model, two ranks
    python benchmarks/step_costs.py --docs   writes docs/step-costs.json as well

All sizes are so small that arithmetic takes next to no time. One step of each case is recorded: its
torch functions, its compiled kernels, its messages. Played back in the same order on the same
tensors, without the code between them, they take the time of starting the kernels, which any
library would need for them. The rest of the step is Python: of regard, and in the model of
transformers too. Steps and recordings take turns; a ratio is the median over rounds.
"""

import argparse
import ctypes
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from common import finish, introduce, machine, quartiles
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from two_ranks import start

import regard.hf
from regard import (
    Causal,
    GroupedQueryAttention,
    KVCache,
    LatentKVAttention,
    MultiHeadLatentAttention,
    PagedCache,
    PagePool,
    QuantizedCache,
    Rotary,
    StaticCache,
)
from regard.cache import Cache
from regard.distributed import ShardedCache
from regard.hf.running import decoder_models
from regard.ops.kernels import (
    chaining,
    latent_stepping,
    launching,
    model_stepping,
    paged_stepping,
    stepping,
)

PAGE = Path(__file__).parent.parent / "docs" / "step-costs.json"
SIZE, HEADS, KV_HEADS, WIDTH = 64, 8, 2, 8  # of a layer: hidden size, heads, key heads, head dim
PAST, ROOM, LAYERS = 20, 64, 4  # tokens before the steps and after them; layers of the model
LAUNCHING = launching, stepping, latent_stepping, chaining, model_stepping
PACKAGE = str(Path(regard.__file__).parent)
Run = Callable[[], Any]


class Recording(TorchFunctionMode):
    """The torch functions, kernels and messages of what runs in its `with` block, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Run] = []
        self.results: list[Any] = []  # kernels are given their addresses

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        run = partial(func, *args, **(kwargs or {}))
        found = run()
        self.results.append(found)
        first = found[0] if isinstance(found, (tuple, list)) and found else found
        if isinstance(first, Tensor):  # not a question such as `x.shape`
            self.runs.append(run)
        return found

    def __enter__(self) -> "Recording":
        self.patches = ExitStack()
        kept: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            # kernels count their tasks in memory that has to be zero before each call
            "memset": (self._kept, (ctypes,)),
            "memmove": (self._kept, (ctypes,)),
            "launch": (self._kept, LAUNCHING),
            "append_kernel": (self._kept_of, (stepping, latent_stepping, paged_stepping)),
            "isend": (self._kept, (dist,)),
            "irecv": (self._kept, (dist,)),
        }
        for name, (keep, modules) in kept.items():
            for module in modules:
                wrapped = keep(getattr(module, name))
                self.patches.enter_context(patch.object(module, name, wrapped))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.patches.close()
        # kernels of the recording work in this memory, also after another one has replaced it
        self.results.append(getattr(launching._local, "space", None))
        self.results += [each for held in decoder_models._steps.values() for each in held.values()]

    def play(self) -> None:
        """All of them again; then messages are waited for."""
        for work in [run() for run in self.runs]:
            if isinstance(work, dist.Work):
                work.wait()

    def _kept(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def kept(*args: Any, **given: Any) -> Any:
            self.runs.append(partial(function, *args, **given))
            return function(*args, **given)

        return kept

    def _kept_of(self, make: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
        return lambda *args: self._kept(make(*args))


def steps(step: Callable[[], Any], cache: Any) -> Run:
    """One step after another; the cache is cut back when it holds `ROOM` tokens."""

    def run() -> Any:
        if cache.length == ROOM:
            cache.truncate(PAST)
        return step()

    return run


def filled(layer: nn.Module, cache: Cache) -> Run:
    """Steps of a layer after some tokens."""
    layer(torch.randn(1, PAST, SIZE), cache=cache)
    new = torch.randn(1, 1, SIZE)
    return steps(lambda: layer(new, cache=cache), cache)


def layer_cases() -> dict[str, Run]:
    """A layer of each kind with each cache, and an installed model."""
    rules: dict[str, Any] = {"rope": Rotary(WIDTH), "mask": Causal()}
    gqa = GroupedQueryAttention(SIZE, HEADS, KV_HEADS, **rules).eval()
    wide = GroupedQueryAttention(SIZE, 4, 2, rope=Rotary(16), mask=Causal()).eval()
    heads: dict[str, Any] = {"qk_nope_head_dim": WIDTH, "qk_rope_head_dim": WIDTH}
    mla = MultiHeadLatentAttention(
        SIZE, HEADS, kv_lora_rank=16, v_head_dim=WIDTH, **heads, **rules
    ).eval()
    latent = LatentKVAttention(
        SIZE, HEADS, num_kv_heads=KV_HEADS, head_dim=WIDTH, kv_lora_rank=16, **rules
    ).eval()
    return {
        "layer, KVCache": filled(gqa, KVCache()),
        "layer, StaticCache": filled(gqa, StaticCache(ROOM)),
        "layer, int8": filled(wide, QuantizedCache(8)),
        "layer, pages": filled(gqa, PagedCache(PagePool(num_pages=16, page_size=16))),
        "MLA, KVCache": filled(mla, KVCache()),
        "joint latent, KVCache": filled(latent, KVCache()),
    }


def model_cases() -> dict[str, Run]:
    """A model of four layers, by transformers and by regard."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.cache_utils import DynamicCache

    config = LlamaConfig(
        hidden_size=SIZE,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=SIZE,
        num_hidden_layers=LAYERS,
        vocab_size=64,
    )
    cases: dict[str, Run] = {}
    kinds = {"transformers": None, "installed": "growing", "int8": "int8", "pages": "paged"}
    for name, kind in kinds.items():
        model = LlamaForCausalLM(config).eval()
        cache: Any = DynamicCache(config=config)
        if kind is not None:
            regard.hf.install(model)
            pool = PagePool(num_pages=16, page_size=16)
            options = {"pool": pool, "prefixes": False} if kind == "paged" else {}
            cache = regard.hf.cache(model, kind, **options)
        cases[f"model, {name}"] = stepping_model(model, cache)
    return cases


def stepping_model(model: Any, cache: Any) -> Run:
    """Steps of a model after some tokens."""
    tokens = torch.arange(PAST)[None]
    model(tokens, past_key_values=cache, use_cache=True)

    def run() -> Any:
        if cache.get_seq_length() == ROOM:
            cache.crop(PAST - ROOM)
        return model(tokens[:, -1:], past_key_values=cache, use_cache=True)

    return run


def python_calls(run: Run) -> int:
    """Calls of Python functions inside regard, of a step that does not cut back."""
    return min(_calls(run) for _ in range(3))


def _calls(run: Run) -> int:
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def in_turns(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of each. The number of rounds is fixed, so that ranks stay in step."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return times


def measured(name: str, run: Run, rounds: int) -> dict[str, Any]:
    """A row: microseconds of a step, of its recording, and what is left."""
    for _ in range(5):
        run()
    recording = Recording()
    with recording:
        run()
    times = in_turns({"step": run, "started": recording.play}, rounds)
    step, started = (1e6 * statistics.median(times[each]) for each in ("step", "started"))
    ratio, low, high = quartiles(times["step"], times["started"])
    return {
        "case": name,
        "step_us": step,
        "starting_us": started,
        "python_us": step - started,
        "started": len(recording.runs),
        "python_calls": python_calls(run),
        "ratio": ratio,
        "low": low,
        "high": high,
    }


def ranks(mesh: DeviceMesh, options: tuple[int, str]) -> None:
    """On each of two ranks: a layer whose cache is spread over both."""
    torch.set_grad_enabled(False)
    rounds, file = options
    gqa = GroupedQueryAttention(SIZE, HEADS, KV_HEADS, rope=Rotary(WIDTH), mask=Causal()).eval()
    cache, new = ShardedCache(mesh, page_size=4), torch.randn(1, 1, SIZE)
    gqa(torch.randn(1, PAST, SIZE), cache=cache)
    row = measured("layer, two ranks", steps(lambda: gqa(new, cache=cache), cache), rounds)
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(row))


@contextmanager
def temporary_file() -> Iterator[Path]:
    """A path in a folder that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "row.json"


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    heads = ("step, us", "starting", "Python", "started", "calls", "ratio")
    print(f"\n{'':<24}" + "".join(f"{each:>10}" for each in heads) + "   quartiles")
    for row in rows:
        numbers = f"{row['step_us']:>10.0f}{row['starting_us']:>10.0f}{row['python_us']:>10.0f}"
        counts = f"{row['started']:>10}{row['python_calls']:>10}"
        spread = f"[{row['low']:.2f}, {row['high']:.2f}]"
        print(f"{row['case']:<24}{numbers}{counts}{row['ratio']:>10.2f}   {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--docs", action="store_true", help="write docs/step-costs.json")
    options = parser.parse_args()
    introduce("transformers")
    torch.manual_seed(0)
    with temporary_file() as file:
        start(ranks, (options.rounds, str(file)))
        of_ranks = json.loads(file.read_text())
    with torch.no_grad():
        cases = layer_cases() | model_cases()
        rows = [measured(name, run, options.rounds) for name, run in cases.items()]
    rows.append(of_ranks)
    show(rows)
    if options.docs:
        whole = {"benchmark": "step_costs", "machine": machine(), "results": rows}
        PAGE.write_text(json.dumps(whole, indent=1) + "\n")
    finish("step_costs", rows)


if __name__ == "__main__":
    main()
