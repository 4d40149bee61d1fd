"""What do time and memory of a conversion of a model of 1B parameters or more come to?

    python benchmarks/layer_by_layer.py --shape llama-3.2-1b --to latent-50
    python benchmarks/layer_by_layer.py --shape qwen3-1.7b --to latent-50        norms of each head
    python benchmarks/layer_by_layer.py --shape llama-3.1-8b --layers 2          a thin run

No package has such weights, so they are random: perplexity says nothing, time and memory are those
of a checkpoint of the same shape. The checkpoint is written in bfloat16 to a temporary folder; a
new process opens it with its weights on disk (`low_memory=True`), converts layer by layer in
float32 and writes the result. `peak` is that process's largest resident memory. With fewer layers
than the shape has, the time of the others is extrapolated from those that ran, and the row says so.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import finish

from regard.convert import convert, save, target_of
from regard.convert.texts import LENGTH
from regard.hf import attention_modules, attention_of, load, place
from regard.hf.packages import quiet

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # class, and settings of the configuration
    "llama-3.2-1b": (
        "Llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_parameters": LLAMA3 | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.1-8b": (
        "Llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_parameters": LLAMA3 | {"factor": 8.0},
        },
    ),
    "qwen3-1.7b": (
        "Qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "tie_word_embeddings": True,
        },
    ),
}


def made(shape: str, layers: int | None, folder: Path) -> tuple[int, int]:
    """Write a checkpoint of that shape with random weights; its parameters, and its layers."""
    import transformers

    name, settings = SHAPES[shape]
    settings = settings | ({} if layers is None else {"num_hidden_layers": layers})
    config = getattr(transformers, f"{name}Config")(**settings, max_position_embeddings=131_072)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return sum(each.numel() for each in model.parameters()), config.num_hidden_layers


@torch.no_grad()
def converted(folder: Path, to: str, windows: int, out: Path) -> dict[str, Any]:
    """Convert the checkpoint, weights on disk, and write it; the seconds of each part."""
    torch.manual_seed(0)
    started = time.perf_counter()
    reached: list[float] = []
    with quiet():
        model, _ = load(folder, low_memory=True)
    shipped = [attention_of(module) for module in attention_modules(model).values()]
    tokens = torch.randint(model.config.vocab_size, (windows, LENGTH))
    loaded = time.perf_counter()

    def told(what: str, done: int, total: int) -> None:
        reached.append(time.perf_counter())

    target = target_of(to, shipped, dtype=torch.bfloat16, stored=torch.bfloat16)
    (made,) = convert(model, [target], tokens, progress=told)
    writing = time.perf_counter()
    save(place(model, made.layers), None, out, card="", report={}, dtype=torch.bfloat16)
    seconds = [after - before for before, after in pairwise(reached)]
    return {
        "target": str(target),
        "load_s": loaded - started,
        "layer_s": seconds,
        "write_s": time.perf_counter() - writing,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--to", default="latent-50", help="as `regard convert --to` reads it")
    parser.add_argument("--windows", type=int, default=2, help="of 1,024 tokens, to calibrate on")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--once", nargs=2, metavar=("FOLDER", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        folder, out = map(Path, options.once)
        print(json.dumps(converted(folder, options.to, options.windows, out)))
        return
    whole = SHAPES[options.shape][1]["num_hidden_layers"]
    with tempfile.TemporaryDirectory() as work:
        folder, out = Path(work) / "model", Path(work) / "converted"
        parameters, layers = made(options.shape, options.layers, folder)
        given = ["--to", options.to, "--windows", str(options.windows)]
        command = [sys.executable, __file__, *given, "--once", str(folder), str(out)]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        row = json.loads(said.splitlines()[-1])
    each = sum(row["layer_s"]) / layers
    row |= {
        "shape": options.shape,
        "parameters": parameters,
        "layers": layers,
        "extrapolated": layers < whole,
        "calibration_tokens": options.windows * LENGTH,
        "seconds": row["load_s"] + each * whole + row["write_s"] * whole / layers,
    }
    print(
        f"{options.shape}, {parameters / 1e9:.2f}B parameters in {layers} of {whole} layers, to "
        f"{row['target']}: {each:.1f} s a layer, {row['seconds']:.0f} s for {whole}, at most "
        f"{row['peak_gib']:.2f} GiB, {row['calibration_tokens']:,} tokens of calibration"
    )
    finish("layer_by_layer", [row])


if __name__ == "__main__":
    main()
