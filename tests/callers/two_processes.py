"""Layers under DDP and FSDP2 on two processes of gloo, each with half of the batch.

Run by test_distributed in a Python of its own. Prints what is wrong, a line each.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from callers import judging
from callers.cell import CALLS
from callers.programs import LayerProgram
from callers.table import Found, cotangent

RANKS = 2
NAMES = [
    "SelfAttention float64",
    "MHA float64",
    "MQA float64",
    "GQA float64",
    "GQA of all options float64",
    "MLA auto float64",
    "MLA auto, KVCache float64",
    "LatentKV float64",
    "GQA, KVCache float64",
    "LatentKV, KVCache float64",
]


def replicated(layer: nn.Module) -> nn.Module:
    return DistributedDataParallel(layer)


def sharded(layer: nn.Module) -> nn.Module:
    return fully_shard(layer)


def sharded_by_parts(layer: nn.Module) -> nn.Module:
    """Each projection gathered when it is called, so that nothing may read its weight before."""
    for child in layer.children():
        if isinstance(child, nn.Linear):
            fully_shard(child)
    return fully_shard(layer)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def check(name: str, wrap, rank: int) -> list[str]:
    """The output of this rank's row, and the gradients of all, against the definition."""
    program = CALLS[name].build()
    assert isinstance(program, LayerProgram)
    wanted = {n: x.detach().clone() for n, x in program.leaves().items()}
    wrapped = wrap(program.layer)
    program.call_by(wrapped)
    row = slice(rank, rank + 1)
    out = program(program.inputs[0][row])
    out.backward(cotangent(torch.empty(RANKS, *out.shape[1:], dtype=out.dtype))[row])
    grads = {n: whole(p.grad) * RANKS for n, p in program.layer.named_parameters()}
    outs = [torch.empty_like(out) for _ in range(RANKS)]
    dist.all_gather(outs, out.detach().contiguous())
    values = {f"grad layer.{n}": x for n, x in grads.items()}
    found = Found({"out": torch.cat(outs), **values}, wanted)
    return [f"{name}, {wrap.__name__}: {words}" for words in judging.judge(program, found)]


def work(rank: int, store: str, wrong) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for wrap in (replicated, sharded, sharded_by_parts):
        for name in NAMES:
            try:
                wrong.extend(check(name, wrap, rank))
            except Exception as error:
                wrong.append(f"{name}, {wrap.__name__}: {type(error).__name__}: {error}")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Manager() as manager:
        wrong = manager.list()
        multiprocessing.spawn(work, (f"{folder}/store", wrong), nprocs=RANKS)
        print("\n".join(wrong))
        sys.exit(bool(len(wrong)))


if __name__ == "__main__":
    main()
