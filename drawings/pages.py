"""A pool of pages that two samples of one prompt share; drawn from the pool itself.

python drawings/pages.py
"""

from pathlib import Path

import torch
from common import program

from regard import PagedCache, PagePool
from regard.cache import Context
from regard.see.pool_picture import pool_svg

PAGE = 16  # tokens
HEADS, WIDTH = 3, 64  # one layer of SmolLM2-135M, in bfloat16
MODEL = Context("weights of the model", "bfloat16, K8V4, Rotary(64)")


def draw(folder: Path) -> list[Path]:
    """Draw a prompt with two samples, and a stored prefix that no sequence holds."""
    pool = PagePool(64, PAGE, format="K8V4")
    earlier = PagedCache(pool)
    append(earlier, 3 * PAGE)
    pool.store(range(3 * PAGE), [earlier], context=MODEL)
    earlier.release()
    prompt = PagedCache(pool)
    append(prompt, 4 * PAGE + 5)
    samples = [prompt.fork(), prompt.fork()]
    prompt.release()
    append(samples[0], PAGE)
    append(samples[1], 2 * PAGE)
    for sample in samples:
        append(sample, 1)  # what the call before returned is no longer read
    path = folder / ("pages-pool" + ".svg")
    path.write_text(pool_svg(pool, samples) + "\n", encoding="utf-8")
    return [path]


def append(cache: PagedCache, tokens: int) -> None:
    new = torch.randn(1, HEADS, tokens, WIDTH, generator=torch.Generator().manual_seed(0))
    cache.update(new.bfloat16(), new.bfloat16())


if __name__ == "__main__":
    program(draw)
