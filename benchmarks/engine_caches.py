"""What do the small caches of regard and of other engines cost the predictions of a model?

    python benchmarks/corpora.py texts
    python benchmarks/engine_caches.py --corpora texts           SmolLM2-135M, 512 tokens
    python benchmarks/engine_caches.py --corpora texts --docs    writes docs/engine-caches.json
    python benchmarks/engine_caches.py --engines regard --length 160 --windows 1

Every engine reads the same tokens, with the same weights (rounded to bfloat16; OpenVINO stores them
in float16), and gives the log-likelihood of each next token. A figure is the perplexity over that
of the same engine with a cache of numbers, at tokens from 128 on, with the 95 % interval of a
bootstrap over the texts' windows. Texts are of kinds on which nothing was chosen.

regard and llama.cpp decode token by token: a query reads codes of all tokens before it. llama.cpp
(`xllamacpp`) is made to continue with the token of the text by a bias, and reports its likelihood
without it. OpenVINO GenAI echoes the likelihoods of its prompt, which it reads `CHUNK` tokens at a
time: a query reads codes of the tokens before its chunk. It evicts tokens only while it generates,
and cannot be made to generate a given text, so its eviction is not measured.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import THREADS, finish, installed, introduce, machine
from corpora import ELSEWHERE, some
from elsewhere import SKIPPED
from torch import Tensor
from whole_model import MODULES, convert

import regard.hf
from regard.compare.frontiers import bootstrap
from regard.convert import windows_of
from regard.convert.texts import python_topics

FIRST = 128  # the first token whose prediction is counted
CHUNK = 32  # tokens, of a block of OpenVINO's cache
DOCS = Path(__file__).parents[1] / "docs/engine-caches.json"
ENGINES = "regard", "llama.cpp", "openvino"
BUDGET = "a budget of half"
Losses = Callable[[Tensor], Tensor]  # of a window [L]: the losses [L - 1] of all its next tokens
REGARD: dict[str, tuple[str, dict[str, Any]]] = {  # kinds of `regard.hf.cache`, with options
    "float32": ("growing", {}),
    "int8": ("int8", {}),
    "K8V4": ("K8V4", {}),
    "K4V4": ("K4V4", {}),
    "K8V4 in pages": ("paged", {"format": "K8V4", "prefixes": False}),
    "K4V4 in pages": ("paged", {"format": "K4V4", "prefixes": False}),
    BUDGET: ("evicting", {}),
}
LLAMA = {"float16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
OPENVINO = {"float32": "f32", "u8": "u8", "u4": "u4"}


def by_regard(model: Any, name: str, length: int) -> Losses:
    """regard: the first `FIRST` tokens at once, the others one by one."""
    kind, options = REGARD[name]
    if name == BUDGET:
        options = {"budget": length // 2}
    if kind == "paged":
        options = {**options, "tokens": length + 64}

    def losses(window: Tensor) -> Tensor:
        cache, ids = regard.hf.cache(model, kind, **options), window[None]
        logits = [model(ids[:, :FIRST], past_key_values=cache).logits]
        for at in range(FIRST, len(window) - 1):
            logits.append(model(ids[:, at : at + 1], past_key_values=cache).logits)
        found = torch.cat(logits, 1)[0, : len(window) - 1]
        return torch.nn.functional.cross_entropy(found, window[1:], reduction="none")

    return losses


def by_llama(path: Path, name: str, length: int) -> Losses:
    """llama.cpp, which keeps the keys of the tokens before from one request to the next."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.verbosity = length + 16, 1, 0
    kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{LLAMA[name]}")
    params.cache_type_k = params.cache_type_v = kind
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    server = xllamacpp.Server(params)
    request = {"n_predict": 1, "temperature": 0.0, "logprobs": 1, "cache_prompt": True}

    def losses(window: Tensor) -> Tensor:
        tokens, found = window.tolist(), torch.zeros(len(window) - 1)
        for at in range(FIRST, len(tokens)):
            wanted = {"prompt": tokens[:at], "logit_bias": [[tokens[at], 1e6]]}
            answer = server.handle_completions({**request, **wanted})
            answer = json.loads(answer) if isinstance(answer, str) else answer
            (told,) = answer["choices"][0]["logprobs"]["content"]
            assert told["id"] == tokens[at], "the bias decides"
            found[at - 1] = -told["logprob"]
        return found

    return losses


def by_openvino(path: Path, name: str, length: int) -> Losses:
    """OpenVINO GenAI, which echoes a prompt that it reads in pieces."""
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens = 1, CHUNK
    scheduler.dynamic_split_fuse = True
    properties = {"KV_CACHE_PRECISION": OPENVINO[name], "INFERENCE_PRECISION_HINT": "f32"}
    properties |= {"INFERENCE_NUM_THREADS": THREADS}
    pipeline = genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", properties)
    config = genai.GenerationConfig(max_new_tokens=1, echo=True, logprobs=1, do_sample=False)
    config.apply_chat_template = False

    def losses(window: Tensor) -> Tensor:
        ids = openvino.Tensor(window[None].numpy())
        handle = pipeline.add_request(0, ids, config)
        while pipeline.has_non_finished_requests():
            pipeline.step()
        (told,) = handle.read_all()
        assert told.generated_ids[: len(window)] == window.tolist()
        return -torch.tensor(told.generated_log_probs[1 : len(window)])

    return losses


def rows_of(engine: str, folder: Path, length: int) -> Iterator[tuple[str, Losses]]:
    """The caches of an engine, that of numbers first; each is made when it is measured."""
    if engine == "regard":
        model, _ = regard.hf.smollm2(dtype=torch.float32)
        regard.hf.install(model)
        yield from ((name, by_regard(model, name, length)) for name in REGARD)
    elif engine == "llama.cpp":
        path = convert(folder, ["F32"])["F32"]
        yield from ((name, by_llama(path, name, length)) for name in LLAMA)
    else:
        path = convert(folder, ["F16"])["F16"]
        yield from ((name, by_openvino(path, name, length)) for name in OPENVINO)


def measure(engine: str, folder: Path, windows: Tensor) -> Iterator[dict[str, Any]]:
    """A row for each cache of an engine."""
    base: Tensor | None = None
    for name, losses in rows_of(engine, folder, windows.shape[1]):
        mine = torch.stack([losses(window) for window in windows])[:, FIRST - 1 :]
        base = mine if base is None else base
        ratio = bootstrap(mine, base)
        row = {"engine": engine, "cache": name, "perplexity": float(mine.mean().exp())}
        print(
            f"{engine:<12}{name:<20}{row['perplexity']:>9.3f}{ratio.value:>9.4f}"
            f"  ({ratio.low:.4f}-{ratio.high:.4f})",
            flush=True,
        )
        yield row | {"ratio": asdict(ratio)}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", type=Path, help="that corpora.py has written; else a manual")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=2, help="of each text")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--folder", type=Path, help="keeps the files of other engines")
    parser.add_argument("--docs", action="store_true", help=f"write {DOCS.name}")
    options = parser.parse_args()
    introduce("numba", "transformers", "xllamacpp", "openvino-genai")
    _, tokenizer = regard.hf.smollm2()
    texts = some(options.corpora, ELSEWHERE) or {"manual": python_topics()[1]}
    parts = [text[int(SKIPPED * len(text)) :] for text in texts.values()]
    given = {"length": options.length, "most": options.windows}
    windows = torch.cat([windows_of(tokenizer, [part], **given) for part in parts])
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for engine in options.engines:
            if engine == "regard" or installed(MODULES[engine]):
                results += measure(engine, options.folder or Path(scratch), windows)
    if options.docs:
        sizes = {"texts": [*texts], "tokens": options.length, "windows": len(windows)}
        content = {"machine": machine(), **sizes, "results": results}
        DOCS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    finish("engine_caches", results)


if __name__ == "__main__":
    main()
