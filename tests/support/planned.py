"""Plans and comparisons whose pages tests explore, and the costs of their lines, from layers."""

from dataclasses import replace

from regard.compare import Comparison, Proof, Row
from regard.plan.cost import cost_of
from regard.plan.devices import DEVICES, roofline_seconds
from regard.plan.planning import plan
from regard.plan.shapes import STORAGES, LayerShape, ModelShape
from regard.turns import Ratio

HOSTILE = "</script><img src=x onerror=alert(1)><b>bold</b>"
FULL = LayerShape(
    hidden_size=96, num_heads=8, num_kv_heads=4, head_dim=12, v_head_dim=12, qk_rope_head_dim=12
)
WINDOWED = replace(FULL, window=700)
MODEL = ModelShape(
    name=HOSTILE,
    architecture="llama",
    layers=(FULL, WINDOWED, WINDOWED),
    hidden_size=96,
    dtype="bfloat16",
    max_positions=4096,
)
DEVICE = "l4"
START = {"context": 3000, "batch": 2, "storage": "plain", "memory": 1 << 28}


def planned(model=MODEL, **options):
    """A plan of the model with the values of `START`."""
    given = {"context": 3000, "batch": 2, "memory": 1 << 28, "devices": [DEVICE], **options}
    return plan(model, **given)


def attentions():
    """The layers of every line of the page of `planned()`."""

    def changed(**sizes):
        return [replace(each, **sizes) for each in MODEL.layers]

    latents = {f"latent({rank}), {share} %": rank for rank, share in ((46, 50), (22, 25))}
    return {
        "GQA-4, as shipped": list(MODEL.layers),
        "MHA": changed(num_kv_heads=8),
        "GQA-2": changed(num_kv_heads=2),
        "MQA": changed(num_kv_heads=1),
        **{
            f"MLA({rank}+{rotary}), {share} %": changed(
                num_kv_heads=8,
                head_dim=12 + rotary,
                qk_rope_head_dim=rotary,
                kv_lora_rank=rank,
                latent_norm=False,
            )
            for rank, rotary, share in ((40, 8, 50), (18, 6, 25))
        },
        **{
            name: changed(kv_lora_rank=rank, keys_by_position=True)
            for name, rank in latents.items()
        },
    }


def figures(layers, chosen, device=DEVICE, **options):
    """Bytes of the cache, and seconds of a decode step, of layers together."""
    given = {"context": chosen["context"], "batch": chosen["batch"], "dtype": "bfloat16"}
    costs = [cost_of(each, STORAGES[chosen["storage"]], **given | options) for each in layers]
    seconds = [
        roofline_seconds(each.visible_decode_flops, each.decode_bytes, DEVICES[device], "bfloat16")[
            0
        ]
        for each in costs
    ]
    return sum(each.cache_bytes for each in costs), sum(seconds)


def compared(**changes):
    """A comparison that was never run, of layers whose caches have formulas, and of others."""
    latent = replace(FULL, kv_lora_rank=30, keys_by_position=True)
    number = {"cache_bytes_per_token": 1_234.0, "context_in_memory": 870_000}
    number |= {"prefill_tokens_per_second": 1_615.0, "decode_tokens_per_second": 19.7}
    number |= {"prefill_speed": Ratio(0.9, 0.8, 1.1, 6), "decode_speed": Ratio(0.8, 0.7, 0.9, 24)}
    number |= {"perplexity": 13.546, "decode_perplexity": 12.6, "largest_logit_difference": 1.5e-4}
    rows = (
        Row("GQA, as shipped", True, **number, layers=(FULL,) * 3, storage=STORAGES["plain"]),
        Row("GQA, int8", False, **number, layers=(FULL,) * 3, storage=STORAGES["int8"]),
        Row(HOSTILE, False, **number, layers=(latent,) * 3, storage=STORAGES["plain"]),
        Row("another cache", False, **number, layers=(FULL,) * 3),
        Row("MQA, aligned", False, remark=f"no place for {HOSTILE}"),
    )
    given = {
        "model": HOSTILE, "kind": "GQA", "num_layers": 3, "context": 1000, "memory": 1 << 30,
        "dtype": "float32", "threads": 2, "text": HOSTILE, "proof": Proof(1.3e-4, 2.4e-3, 20.0),
        "rows": rows, "verdict": f"{HOSTILE} is best.", "seconds": 212.0,
    }  # fmt: skip
    return Comparison(**given | changes)
