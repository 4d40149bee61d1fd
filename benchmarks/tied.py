"""Keys that are values: bytes and time of a decoding step in a global layer of Gemma 4.

Question: does one stream instead of two (`TiedKVAttention`) save time as well as bytes? The peers
are a layer of the same sizes with keys and values apart, which is the cache of every other library,
in regard's own kernels and in torch's. The limit is the time of reading the cached bytes once,
measured in the same run. Sizes: 512 channels a head, 128 of them rotated, 8 query heads to a key
head.

    python benchmarks/tied.py
    python benchmarks/tied.py --contexts 4096 --kv-heads 1 --dtype bfloat16
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from regard import Attention, Causal, Frequencies, KVCache, Rotary, TiedKVAttention
from regard.rope.frequencies import plain_frequencies

HEAD, ROTATED, GROUP, WIDTH = 512, 128, 8, 256  # WIDTH: of hidden states; projections cost little


def layers(kv_heads: int, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    """The same function of hidden states, with one stream and with two."""
    plain = plain_frequencies(HEAD, 1e6)[: ROTATED // 2].tolist()
    rope = Rotary(HEAD, scaling=Frequencies([*plain, *[0.0] * (HEAD // 2 - len(plain))]))
    sizes = {"num_kv_heads": kv_heads, "head_dim": HEAD, "rope": rope, "scale": 1.0}
    options = {**sizes, "mask": Causal()}
    heads = kv_heads * GROUP
    return {
        "two streams": Attention(WIDTH, heads, **options).to(dtype),
        "two streams, torch": Attention(WIDTH, heads, **options, backend="sdpa").to(dtype),
        "tied, absorbed": TiedKVAttention(WIDTH, heads, **options).to(dtype),
        "tied, expanded": TiedKVAttention(WIDTH, heads, **options, form="expanded").to(dtype),
    }


def step(
    layer: torch.nn.Module, context: int, dtype: torch.dtype
) -> tuple[Callable[[], None], int]:
    """A decoding step after so many tokens, which is then taken back; and the bytes held."""
    cache, x = KVCache(), torch.randn(1, 1, WIDTH, dtype=dtype)
    layer(torch.randn(1, 1, WIDTH, dtype=dtype), cache=cache)
    (part,) = cache.peek(*(each.new_empty(each.shape) for each in cache.empty_streams))
    filled = [
        torch.randn(*each.shape[:2], context, each.shape[3]).to(each.dtype)
        if each.is_floating_point()
        else torch.arange(context, dtype=each.dtype).view(1, 1, -1, 1)
        for each in part.streams
    ]
    cache = KVCache()
    cache.update(*filled)

    def run() -> None:
        layer(x, cache=cache)
        cache.truncate(context)

    return run, cache.nbytes


def reading(nbytes: int) -> Callable[[], Tensor]:
    """Reading so many bytes once."""
    held = torch.ones(nbytes // 4)
    return lambda: held.sum()


def times(runs: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """The median milliseconds of each, in turns, after two that are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn > 1:
                seconds[name].append(time.perf_counter() - start)
    return {name: round(statistics.median(each) * 1e3, 2) for name, each in seconds.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    dtype, rows = getattr(torch, options.dtype), []
    for context in options.contexts:
        runs, sizes = {}, {}
        for name, layer in layers(options.kv_heads, dtype).items():
            runs[name], sizes[name] = step(layer, context, dtype)
            runs[f"reading {name}"] = reading(sizes[name])
        found = times(runs, options.turns)
        for name, nbytes in sizes.items():
            limit = found[f"reading {name}"]
            row = {"context": context, "form": name, "mib": round(nbytes / 2**20, 1)}
            rows.append(row | {"ms": found[name], "reading_ms": limit})
            print(f"{context:7,} {name:20}{row['mib']:8} MiB{found[name]:9} ms, {limit} to read it")
    print(json.dumps({"dtype": options.dtype, "kv_heads": options.kv_heads, "rows": rows}))


if __name__ == "__main__":
    main()
