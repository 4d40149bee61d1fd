"""What does a token cost that fills a page, whose prefix is then stored?

    python benchmarks/full_pages.py                      SmolLM2-135M, 150 tokens after 1,024
    python benchmarks/full_pages.py --context 16 --tokens 70

A stored prefix belongs to the weights, so all of them are read before it is stored: by checksums
of their bytes, which are compared with those of the last time, or else by a digest. Both are timed
beside the steps over pages.
"""

import argparse
import statistics
import time

import torch
from common import finish, introduce

import regard.hf
from regard.cache import fingerprint
from regard.cache.paging import checksums, contexts


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5, help="of the weights")
    options = parser.parse_args()
    introduce("numba", "transformers")
    model, _ = regard.hf.smollm2(dtype=torch.float32)
    regard.hf.install(model)
    cache = regard.hf.cache(model, "paged")
    token = torch.zeros(1, 1, dtype=torch.int64)
    model(token.expand(1, options.context), past_key_values=cache, logits_to_keep=1)
    size = cache.pool.page_size
    steps: dict[bool, list[float]] = {True: [], False: []}  # by whether the token fills a page
    for i in range(options.tokens):
        begun = time.perf_counter()
        model(token, past_key_values=cache, logits_to_keep=1)
        if i > 2:  # the first steps are recorded
            steps[cache.get_seq_length() % size == 0].append(time.perf_counter() - begun)
    times = {"step": statistics.median(steps[False])}
    times |= {"step that fills a page": statistics.median(steps[True])} if steps[True] else {}
    times["token, on average"] = statistics.mean(steps[True] + steps[False])
    times["weights compared by checksums"] = read_again(model, options.rounds)
    gains, contexts.gains = checksums.gains, lambda tensor: False
    times["weights digested"] = read_again(model, options.rounds)
    contexts.gains = gains
    print()
    for name, seconds in times.items():
        print(f"  {name:<26}{1e3 * seconds:>8.1f} ms")
    finish("full_pages", [{"case": name, "seconds": x} for name, x in times.items()])


def read_again(model: torch.nn.Module, rounds: int) -> float:
    """Seconds in which all weights are read that were read before."""
    found = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        fingerprint(model)
        found.append(time.perf_counter() - begun)
    return statistics.median(found[1:])


if __name__ == "__main__":
    main()
