"""The time of a decoding step that reads some pages, beside one that reads all, taken in turns.

    python benchmarks/selecting.py
    python benchmarks/selecting.py --tokens 65536 --pages 0.0625 --format K8V4
    python benchmarks/selecting.py --corpora texts --page-size 16
    python benchmarks/selecting.py --corpora texts --page-size 16 --exact

One layer's attention, without projections: `PagedCache` and `SelectingCache` over equal pages. The
keys are random, which changes no time. With `--threads 1` the clock is the process's own, which
other programs of a busy machine change little. The limit is the share of the pages.

With `--corpora`, of `corpora.py`, it measures the loss instead: SmolLM2-135M-Instruct reads 7,680
tokens of each of four texts and predicts the next 512, one step a token, with all pages and with
some. A figure is a perplexity over the other, with the 95 % interval of a bootstrap over pieces of
64 tokens. With `--exact` pages are chosen by their very share of the attention, for which a step
reads all keys: no bound of equally many pages can be expected to lose less.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import corpora
import torch

from regard import Causal, PagedCache, PagePool, SelectingCache, Span
from regard.compare.frontiers import bootstrap
from regard.compare.runner import Runner
from regard.convert import windows_of
from regard.hf import fetch_smollm2, load
from regard.ops.attend import prepare
from regard.sparse import selecting
from regard.sparse.bounds import Bounds
from regard.turns import in_turns, ratio_of


class Exact(Bounds):
    """All keys of the pages, in place of their mean."""

    @classmethod
    def of(cls, keys, page_size):
        return cls(keys.unflatten(2, (-1, page_size)).flatten(3), keys[:, :, ::page_size, :0])

    def highest(self, q):
        keys, width = self.mean, q.shape[3]
        grouped = q.unflatten(1, (keys.shape[1], -1)).squeeze(3)  # [B, G, heads, D]
        scores = grouped @ keys.unflatten(3, (-1, width)).flatten(2, 3).mT
        pages = scores.unflatten(3, (keys.shape[2], -1)).logsumexp(-1)
        return pages.log_softmax(-1).amax(2)


READ, PREDICTED, PIECE = 7_680, 512, 64  # tokens: SmolLM2 has 8,192 positions


def filled(cache, streams, chunk=4096):
    for some in zip(*(x.split(chunk, 2) for x in streams), strict=True):
        cache.update(*some)
    return cache


def stepper(cache, q, new):
    """A function that times one step."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def step():
        begun = clock()
        length = cache.length
        parts = cache.update(*new)
        span = Span(length, length + 1, 0, length + 1)
        prepared = prepare(q, new[0], new[1], mask=Causal(), span=span)
        if isinstance(cache, SelectingCache):
            cache.attend(prepared, q, parts, None)
        else:
            prepared.run(q, parts)
        return clock() - begun

    return step


def losses(model, cache, tokens):
    """The loss of each token after the first `READ`, one step a token."""
    runner, found = Runner(model, cache=cache), []
    head = model.get_output_embeddings()
    logits = head(runner.hidden(tokens[None, :READ])[:, -1:])
    for token in tokens[READ:].split(1):
        found.append(torch.nn.functional.cross_entropy(logits[0].float(), token))
        logits = runner.step(token[None])
    return torch.stack(found).view(-1, PIECE)


def lost(folder, pages, page_size, stored):
    """The loss with some pages beside that with all, text by text."""
    model, tokenizer = load(fetch_smollm2())

    def all_pages():
        num_pages = (READ + PREDICTED) // page_size + 8
        return PagedCache(PagePool(num_pages, page_size=page_size, format=stored))

    caches = all_pages, lambda: SelectingCache(all_pages(), pages)
    found = [[], []]
    for name, text in corpora.some(folder, corpora.ELSEWHERE).items():
        (tokens,) = windows_of(tokenizer, [text], length=READ + PREDICTED, most=1)
        for each, cache in zip(found, caches, strict=True):
            each.append(losses(model, cache, tokens))
        ratio = (found[1][-1].mean() - found[0][-1].mean()).exp()
        print(f"{name}: perplexity {found[0][-1].mean().exp():.2f}, times {ratio:.4f}", flush=True)
    return bootstrap(torch.cat(found[1]), torch.cat(found[0]))


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 65_536])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--pages", type=float, default=0.125)
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page")
    parser.add_argument("--format", default="plain")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--corpora", type=Path, help="measure the loss on texts of corpora.py")
    parser.add_argument("--exact", action="store_true", help="choose the pages by all their keys")
    given = parser.parse_args()
    if given.exact:
        selecting.Bounds = Exact
    torch.set_num_threads(given.threads)
    settings = {name: getattr(given, name) for name in ("pages", "page_size", "format", "exact")}
    if given.corpora is not None:
        ratio = lost(given.corpora, given.pages, given.page_size, given.format)
        print(f"all texts: {ratio.value:.4f} ({ratio.low:.4f}-{ratio.high:.4f})")
        print(json.dumps({**settings, "loss": asdict(ratio)}))
        return
    found = []
    for tokens in given.tokens:
        torch.manual_seed(0)
        shape = 1, given.kv_heads, tokens, given.head_dim
        streams = torch.randn(shape), torch.randn(shape)
        q = torch.randn(1, given.heads, 1, given.head_dim)
        new = tuple(x[:, :, :1].clone() for x in streams)
        runs = {}
        for name in ("full", "selected"):
            num_pages = tokens // given.page_size + 8
            pool = PagePool(num_pages, page_size=given.page_size, format=given.format)
            cache = PagedCache(pool)
            cache = cache if name == "full" else SelectingCache(cache, given.pages)
            runs[name] = stepper(filled(cache, streams), q, new)
        del streams
        for run in runs.values():
            run(), run()
        times = in_turns(runs, given.rounds)
        ratio = ratio_of(times["selected"], times["full"])
        row = {name: statistics.median(x) * 1e3 for name, x in times.items()}
        row |= {"tokens": tokens, "ratio": ratio.value, "low": ratio.low, "high": ratio.high}
        found.append(row)
        full, selected = f"{row['full']:.2f} ms", f"{row['selected']:.2f} ms"
        print(f"{tokens:,} tokens: full {full}, selected {selected}, {ratio}")
    print(json.dumps({**settings, "rows": found}))


if __name__ == "__main__":
    main()
