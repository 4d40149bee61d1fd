"""Results of every verb that were never measured, and the functions that print them."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from regard.bench.load import Load
from regard.bench.short import Bench, Entry, Measured, Shape
from regard.bench.tuning import Tuning
from regard.cli import bench, compare, convert, generate, tune
from regard.compare import Comparison, Proof, Row
from regard.compare.verdict import verdict
from regard.convert import measuring
from regard.convert.report import Report as Conversion
from regard.convert.targets import Target
from regard.hf.generating.text import Written
from regard.rates import DEFAULT
from regard.turns import Ratio

REFUSAL = "this attention has no place for qk_norm; a cache of fewer bits keeps the model as it is"


SHIPPED = 19.7, 13.546  # decode tokens a second, perplexity


def row(name, exact=False, *, bytes=46_080.0, speed=19.7, perplexity=13.546, decoded="fused"):
    more, worse = speed / SHIPPED[0], perplexity / SHIPPED[1]
    first = "shipped" in name
    return Row(
        name,
        exact,
        cache_bytes_per_token=bytes,
        run_bytes_per_token=2 * bytes + 12,
        context_in_memory=int((1 << 30) // bytes),
        prefill_tokens_per_second=1_615.0,
        decode_tokens_per_second=speed,
        prefill_speed=None if first else Ratio(0.97, 0.91, 1.04, 6),
        decode_speed=None if first else Ratio(more, 0.97 * more, 1.02 * more, 24),
        perplexity=perplexity,
        decode_perplexity=0.9 * perplexity,
        perplexity_ratio=None if first else Ratio(worse, 0.999 * worse, 1.001 * worse, 2046),
        decode_perplexity_ratio=None if first else Ratio(worse, 0.99 * worse, 1.01 * worse, 128),
        largest_logit_difference=1.5e-4,
        prefill_backend="sdpa",
        decode_backend=decoded,
    )


ROWS = (
    row("GQA, as shipped", exact=True),
    row("GQA, int8 cache", bytes=12_240.0, speed=14.8, decoded="grouped"),
    row("MHA, spelled out", exact=True, bytes=138_240.0, perplexity=1_013.546),
    row(
        "joint latent, full rank", exact=True, bytes=46_200.0, speed=8.6, decoded="blocked and sdpa"
    ),
    row("joint latent, 50 %", bytes=23_160.0, speed=8.6, perplexity=14.7),
    row("DeepSeek's MLA, 50 %, int8 cache", bytes=6_120.0, perplexity=16.6, decoded="grouped"),
    Row("joint latent, 75 %", False, remark=REFUSAL),
    Row("joint latent, 25 %", False, remark=REFUSAL),
    Row("MQA, aligned", False, remark="1 key head cannot become fewer"),
)
COMPARISON = Comparison(
    "SmolLM2-135M-Instruct", "GQA", 30, 1_024, 1 << 30, "float32", 1, "topics of Python's help",
    Proof(1.3e-4, 2.4e-3, 20.0), ROWS, verdict(ROWS, "float16"), 212.0, 128,
    "float16",
)  # fmt: skip


def _measured(name, absent):
    entries = [
        Entry("torch sdpa", 12.345, 1.0, 1.0, 1.0, 0.16, 15),
        Entry("regard: grouped", 1_234.567, 12.24, 10.09, 15.75, 0.07, 15),
        Entry("backend blocked", 2.5, 1.02, 0.97, 1.4, 1.47, 15),
    ]
    return Measured(
        Shape(name, 32, 8, 128, 1, 64), "bfloat16", "grouped", "reads", 1.0, entries, absent
    )


BENCH = Bench(
    "2.13.0+cpu", 2, "bfloat16", 1.1e10, 3.2e11,
    [
        _measured("decode, 1,024 keys, batch of 4", {"fused": "fused needs numba"}),
        _measured("prefill, 512 tokens", {"fused": "fused needs numba", "eager": "eager is slow"}),
    ],
)  # fmt: skip
TUNING = Tuning(DEFAULT, {"call": 1.05, "products": 39.49}, {"call": 1.0}, Load(0.0, 0.0))
TEXTS = ("Python's reference", "a long name of a text.txt")
CONVERSION = Conversion(
    "Qwen3-0.6B", "GQA, 16 heads on 8 of 128", Target("deepseek", rank=384, rope_dim=64), True,
    ("law.txt",), 6_144,
    measuring.Measured(dict.fromkeys(TEXTS, 1_234.5), 4e4, 615.0, 19.7),
    measuring.Measured(
        dict.fromkeys(TEXTS, 1_300.0), 2e4, 600.0, 17.0,
        Ratio(0.98, 0.9, 1.02, 6), Ratio(0.86, 0.84, 0.88, 24), "sdpa", "fused",
    ),
    seconds=99.0,
)  # fmt: skip
WRITTEN = [
    Written(
        name,
        name.replace("regard", "auto"),
        "text",
        (1, 2),
        34,
        302.0,
        23.0,
        7 << 20,
        1 << 30,
        *on,
        prefill_speed=Ratio(0.97, 0.93, 1.02, 12) if name == "regard" else None,
        decode_speed=Ratio(0.8, 0.78, 0.83, 12) if name == "regard" else None,
    )
    for name, on in (("regard", ("sdpa", "fused")), ("transformers", ("sdpa", "sdpa")))
]

PRINTED = {
    "compare": partial(compare.show, COMPARISON),
    "bench": partial(bench.show, BENCH),
    "bench --all": partial(bench.show, BENCH, every=True),
    "convert": partial(convert.show, CONVERSION, Path("a folder/of mine")),
    "tune": partial(tune.show, DEFAULT, replace(DEFAULT, call=2e-6, products=320e9), TUNING),
    "generate": partial(generate.show, WRITTEN),
}
