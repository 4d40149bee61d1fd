"""What does regard save in a whole model? One decoding step, installed or not, with each cache.

    python benchmarks/generating.py                 SmolLM2-135M and a small DeepSeek-V3
    python benchmarks/generating.py --compile       transformers' compiled static cache as well

Targets: SmolLM2 no slower than transformers' best at 128 tokens of context, and at 4,096 at least
1.1x as fast in float32 and 1.3x in bfloat16; DeepSeek-V3 (4 layers, hidden 1024, 16 heads, rank
512 + 64) at least 8x as fast at 4,096.
"""

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from common import card, finish, interleave, summary
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, StaticCache

import regard.hf

ROUNDS = 15
ROOM = 256  # tokens: more than a benchmark generates


def smollm2(dtype: torch.dtype) -> Any:
    return regard.hf.smollm2(dtype=dtype)[0]


def deepseek(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=32768,
    )
    return DeepseekV3ForCausalLM(config).to(dtype).eval()


MODELS = {"SmolLM2-135M": smollm2, "DeepSeek-V3, 4 layers": deepseek}


def twin(model: Any) -> Any:
    """A copy whose modules share the weights."""
    return copy.deepcopy(model, {id(p): p for p in (*model.parameters(), *model.buffers())})


def contestants(model: Any, context: int, compiled: bool) -> dict[str, Callable[[], Any]]:
    """One decoding step for each setting; every step adds a token to its own cache."""
    theirs, ours = model, twin(model)
    eager = twin(model)
    eager.set_attn_implementation("eager")
    regard.hf.install(ours)
    length = context + ROOM
    steps = {
        "transformers, sdpa": (theirs, DynamicCache()),
        "transformers, eager": (eager, DynamicCache()),
        "transformers, sdpa, static cache": (
            theirs,
            StaticCache(config=model.config, max_cache_len=length),
        ),
        "regard, transformers' cache": (ours, DynamicCache()),
        "regard": (ours, regard.hf.cache(ours)),
        "regard, int8 cache": (ours, regard.hf.cache(ours, "quantized")),
    }
    ready = {name: stepping(each, cache, context) for name, (each, cache) in steps.items()}
    if compiled:
        cache = StaticCache(config=model.config, max_cache_len=length)
        ready["transformers, compiled"] = stepping(theirs, cache, context, torch.compile(theirs))
    return ready


def stepping(model: Any, cache: Any, context: int, call: Any = None) -> Callable[[], Any]:
    """Fill the cache, and return the decoding step."""
    tokens = torch.randint(3, 1000, (1, context), generator=torch.Generator().manual_seed(0))
    for chunk in tokens.split(1024, dim=1):
        model(chunk, past_key_values=cache, logits_to_keep=1)
    return lambda: (call or model)(tokens[:, :1], past_key_values=cache, logits_to_keep=1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--contexts", type=int, nargs="*", default=[128, 4096])
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    results = []
    for name in options.models:
        for dtype in (torch.float32, torch.bfloat16):
            model = MODELS[name](dtype)
            for context in options.contexts:
                steps = contestants(model, context, options.compile)
                times = interleave(steps, rounds=ROUNDS, sample=0)
                rows = summary(times, "transformers, sdpa")
                best = min(
                    row["ms"]
                    for label, row in rows.items()
                    if "transformers," in label and "regard" not in label
                )
                title = f"{name}, {str(dtype)[6:]}, {context:,} tokens"
                card(title, rows, "transformers, sdpa")
                faster = best / rows["regard"]["ms"]
                print(f"  regard is {faster:.2f}x as fast as transformers' best")
                results.append({"case": title, "rows": rows, "faster": faster})
    for name, seconds in installing().items():
        print(f"  {name}: {1e3 * seconds:.0f} ms")
        results.append({"case": name, "seconds": seconds})
    finish("generating", results)


def installing() -> dict[str, float]:
    """How long `install` takes."""
    model = smollm2(torch.float32)
    start = time.perf_counter()
    regard.hf.install(model)
    return {"install on SmolLM2-135M": time.perf_counter() - start}


if __name__ == "__main__":
    main()
