"""Train a small language model with FSDP2 and context parallel, and resume when a rank was killed.

Each rank holds a shard of the parameters (FSDP2) and a shard of every sequence (context parallel).
One process, the reference, has the same loss at every step.

    python examples/train_on_several_ranks.py
    torchrun --standalone --nproc-per-node 2 examples/train_on_several_ranks.py --attention mla
    torchrun --standalone --nproc-per-node 2 examples/train_on_several_ranks.py --resume
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from train_small_lm import HEADS, LAYERS, TEXT, WIDTH, LanguageModel, gqa, mla

from regard.distributed import ContextParallel, context_parallel, counted
from regard.plan import LayerShape, sent_of

ATTENTIONS = {"gqa": gqa, "mla": mla}
SIZES = {"hidden_size": WIDTH, "num_heads": HEADS, "v_head_dim": 16}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}
SHAPES = {  # of which `regard.plan` counts bytes
    "gqa": LayerShape(**SIZES, num_kv_heads=2, head_dim=16),
    "mla": LayerShape(**SIZES, num_kv_heads=HEADS, head_dim=20, **LATENT),
}
BATCH, LENGTH = 8, 129  # rows, and tokens of each: the number of ranks need not divide them


class Training:
    """What a checkpoint holds: model, optimizer, the step, and how many windows were read."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.step = self.read = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step, "read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        self.step, self.read = state["step"], state["read"]


def newest(folder: Path) -> Path | None:
    return max(folder.glob("step-??????"), default=None)


def save(training: Training, folder: Path) -> None:
    """Write a checkpoint under another name, and rename it once every rank has written its part."""
    finished = folder / f"step-{training.step:06}"
    unfinished = finished.with_suffix(".unfinished")
    dcp.save({"training": training}, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(finished)


def load(training: Training, folder: Path) -> None:
    """Continue from the newest checkpoint that was finished, by any number of ranks."""
    dcp.load({"training": training}, checkpoint_id=newest(folder))


def join() -> int:
    """Join the ranks that torchrun started, or be one alone. Returns their number."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    settings = {} if "RANK" in os.environ else alone
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **settings)
    return dist.get_world_size()


def split(model: LanguageModel, ranks: int) -> ContextParallel:
    """Give each rank its shard of every sequence, and of every parameter."""
    mesh = init_device_mesh("cpu", (ranks,))
    plan = context_parallel(model, mesh)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return plan


def batch_of(windows: Tensor, read: int) -> Tensor:
    """The next rows in an order that depends on neither the ranks nor where a run began."""
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return windows[order[torch.arange(read, read + BATCH) % len(order)]]


def share_of_loss(model: nn.Module, batch: Tensor, plan: ContextParallel | None) -> Tensor:
    """The loss of this rank's tokens over the tokens of all: the shares add up to the mean."""
    tokens, labels = batch[:, :-1], batch[:, 1:]  # shifted before they are sharded
    if plan is not None:
        tokens, labels = plan.shard(tokens), plan.shard(labels)
    losses = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    return losses / batch[:, 1:].numel()


def step(training: Training, batch: Tensor, plan: ContextParallel | None) -> tuple[float, float]:
    """One step of the optimizer: the mean loss over all ranks' tokens, and the gradient's norm."""
    loss = share_of_loss(training.model, batch, plan)
    training.optimizer.zero_grad()
    (
        dist.get_world_size() * loss
    ).backward()  # FSDP2 averages gradients over the ranks, and theirs add up
    norm = nn.utils.clip_grad_norm_(training.model.parameters(), max_norm=1.0)
    training.optimizer.step()
    training.step, training.read = training.step + 1, training.read + len(batch)
    total = loss.detach()
    dist.all_reduce(total)
    return total.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--attention", choices=ATTENTIONS, default="gqa")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    if options.resume == (newest(options.folder) is None):
        has = "no" if options.resume else "already"
        parser.error(f"{options.folder} has {has} checkpoints; --resume continues from the newest")

    ranks = join()
    torch.manual_seed(0)  # the same parameters on every rank, before FSDP2 shards them
    model = LanguageModel([ATTENTIONS[options.attention]() for _ in range(LAYERS)])
    plan = split(model, ranks) if ranks > 1 else None
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    if options.resume:
        load(training, options.folder)
    count = sent_of([SHAPES[options.attention]] * LAYERS, context=LENGTH, batch=BATCH, cp=ranks)
    windows = TEXT.unfold(0, LENGTH + 1, LENGTH + 1)
    while training.step < options.steps:
        with counted() as sent:
            loss, norm = step(training, batch_of(windows, training.read), plan)
        if dist.get_rank() == count.rank:  # the rank that sends most
            found = f"step {training.step:>4}  loss {loss:.6f}  norm {norm:.4f}"
            told = f"rank {count.rank} sent {sent.bytes:,} of {count.training:,} bytes"
            print(found, told, sep="  ", flush=True)
        if training.step % options.every == 0:
            save(training, options.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
