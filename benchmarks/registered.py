"""What does a window cost in a whole model of transformers, under each attention implementation?

python benchmarks/registered.py

A Mistral of random weights reads 8,192 tokens under a window of 1,024, one row of two padded.
Times are taken in turns; peaks are each a process's own, less what it held before the call.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import card, finish, interleave, summary
from training_window import highest
from transformers import MistralConfig, MistralForCausalLM

import regard.auto  # noqa: F401 - "regard" becomes an attention implementation

NAMES = ("sdpa", "flex_attention", "regard")
SIZES = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128,
    "intermediate_size": 1024, "num_hidden_layers": 4, "sliding_window": 1024,
}  # fmt: skip


def forward(name: str, length: int, padded: bool) -> Callable[[], object]:
    """A call of the model, with keys kept in no cache."""
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, max_position_embeddings=length)
    config._attn_implementation = name
    model: Any = MistralForCausalLM(config).eval()
    ids = torch.randint(3, 128, (2 if padded else 1, length))
    mask = torch.ones_like(ids)
    mask[0, : length // 8 if padded else 0] = 0
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": False, "logits_to_keep": 1}

    def call() -> object:
        with torch.inference_mode():
            return model(**given)

    return call


def peak(name: str, length: int, padded: bool) -> float:
    """Bytes at the peak of the second call, in a process of its own."""
    command = [sys.executable, __file__, "--once", name, "--length", str(length)]
    command += ["--padded"] * padded
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def once(name: str, length: int, padded: bool) -> float:
    """Bytes at the peak of a call, above those before it."""
    forward(name, 256, padded)()  # libraries are loaded, threads started
    call = forward(name, length, padded)
    before = highest()
    call()
    return highest() - before


def case(length: int, padded: bool, rounds: int) -> dict[str, object]:
    """Times and peaks of all implementations."""
    calls = {name: forward(name, length, padded) for name in NAMES}
    rows = summary(interleave(calls, rounds=rounds), NAMES[0])
    rows_of = "two rows, one padded" if padded else "one row"
    card(f"{length:,} tokens, {rows_of}, window {SIZES['sliding_window']:,}", rows, NAMES[0])
    peaks = {name: peak(name, length, padded) for name in NAMES}
    for name, each in peaks.items():
        print(f"  {name:16} peak {each / 2**20:,.0f} MiB")
    return {"length": length, "padded": padded, "times": rows, "peaks": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--once", choices=NAMES, help="one call; prints bytes")
    parser.add_argument("--padded", action="store_true", help="of --once")
    args = parser.parse_args()
    if args.once:
        print(once(args.once, args.length, args.padded))
        return
    cases = [case(args.length, padded, args.rounds) for padded in (False, True)]
    finish("registered", cases)


if __name__ == "__main__":
    main()
