"""How time and memory grow with ranks and tokens: a model of arithmetic, not a measurement.

`python benchmarks/scaling_model.py prefill`, `decode` or `published` prints a table of
docs/scaling.md, which lists the assumptions.

A rank computes at a share of its device's rate, reads its memory at a share of its bandwidth, and
sends at a share of its link's rate; what can go on at the same time costs the longer of the two.
`python benchmarks/scaling.py` compares the model with what was measured.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

from regard.ops.estimates import FLASH, READ
from regard.plan.cost import cost_of
from regard.plan.devices import Device, device_of
from regard.plan.flops import attention_flops, visible_pairs
from regard.plan.sent import SINGLE, Sent, forward_sums, sent_of
from regard.plan.shapes import STORAGES, LayerShape, ModelShape, Workload

SENDS = 0.82  # share of a link's rate that messages reach: NCCL counts 20.6 of NVLink 4's 25 GB/s
Number = int | float
NODE = 8  # ranks that NVLink connects: of an HGX H100 or H200
BACKWARD = 2  # products of a backward pass for each of the forward pass: two gradients
BACKWARD_SCORES = 2.5  # the same of scores, which are computed again (Dao 2023, arXiv:2307.08691)
TRAINED = 16  # bytes of a trained parameter: weight, gradient and two moments of Adam in float32
PLAIN = STORAGES["plain"]
HALF = 2  # bytes of a number in bfloat16


@dataclass(frozen=True)
class Machine:
    """What a rank reaches, of one kind of device and link.

    Args:
        flops: operations a second.
        bandwidth: bytes a second of its memory.
        sends: bytes a second to other ranks.
        latency: seconds of a step of messages.
    """

    flops: Number
    bandwidth: Number
    sends: Number
    latency: Number

    def computing(self, flops: Number, moved: Number = 0) -> Number:
        """Seconds of some operations and bytes read and written: the longer of both (roofline)."""
        return max(flops / self.flops, moved / self.bandwidth)

    def sending(self, nbytes: Number, steps: Number = 0) -> Number:
        """Seconds of some bytes in some steps that wait for one another (Hockney 1994)."""
        return steps * self.latency + nbytes / self.sends


@dataclass(frozen=True)
class Link:
    """A link between ranks, with rates from the documents of its makers.

    Args:
        bytes_per_second: that a rank sends at most, while it receives as many.
        latency: seconds until the first byte of a message arrives, at least.
    """

    bytes_per_second: float
    latency: float


# Rates: NVIDIA's data sheets of the H100 (900 GB/s in both directions together) and of ConnectX-7
# (400 Gb/s in each direction, a port for each rank). Latencies: NCCL, src/graph/tuning.cc, `hwLat`,
# one step of a ring of large messages.
NVLINK_4, INFINIBAND_NDR = Link(450e9, 3.4e-6), Link(50e9, 9.6e-6)


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind: those of a node behind one link, nodes behind another.

    Args:
        device: of each rank.
        inside: of ranks in a node.
        outside: between nodes.
        node: ranks of a node.
    """

    device: Device
    inside: Link
    outside: Link
    node: int = NODE

    def machine(self, ranks: int) -> Machine:
        """The machine of each rank, with the link inside a node, or between nodes if more ranks
        than a node has are given."""
        link = self.inside if ranks <= self.node else self.outside
        return Machine(
            flops=FLASH * self.device.flops["bfloat16"],
            bandwidth=READ * self.device.memory_bandwidth,
            sends=SENDS * link.bytes_per_second,
            latency=link.latency,
        )


@dataclass(frozen=True)
class Model:
    """A whole model: its layers of attention, and the number of all its parameters.

    Args:
        shape: its layers.
        parameters: all of them.
        active: those that a token is multiplied with, fewer where it has experts.
        intermediate: channels between the matrices of an MLP, of all experts of a token.
        source: the paper.
    """

    shape: ModelShape
    parameters: Number
    active: Number
    intermediate: int
    source: str


def _model(name: str, layers: int, layer: LayerShape, **sizes: object) -> Model:
    shape = ModelShape(
        name=name,
        architecture="",
        layers=(layer,) * layers,
        hidden_size=layer.hidden_size,
        dtype="bfloat16",
    )
    return Model(shape, **sizes)  # type: ignore[arg-type]


GQA = _model(
    "GQA, as Llama 3 8B",
    32,
    LayerShape(hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128),
    parameters=8.03e9,
    active=8.03e9,
    intermediate=14336,
    source="Grattafiori et al. 2024, arXiv:2407.21783, table 3",
)
MLA = _model(
    "MLA, as DeepSeek-V3",
    61,
    LayerShape(
        hidden_size=7168,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        v_head_dim=128,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
    ),
    parameters=671e9,
    active=37e9,
    intermediate=9 * 2048,  # 8 experts of 256 and a shared one
    source="DeepSeek-AI 2024, arXiv:2412.19437, section 4.2",
)


LARGE = _model(
    "GQA, as Llama 3 405B",
    126,
    LayerShape(hidden_size=16384, num_heads=128, num_kv_heads=8, head_dim=128, v_head_dim=128),
    parameters=405e9,
    active=405e9,
    intermediate=53248,
    source="Grattafiori et al. 2024, arXiv:2407.21783, table 3",
)


@dataclass(frozen=True)
class Step:
    """What a step takes on each rank.

    Attributes:
        seconds: of the step.
        computing: seconds of it, were nothing sent.
        sending: seconds that messages alone would take.
        weights: bytes of the weights, and in training of all that is kept of them.
        cache: bytes of keys and values, or latents.
        activations: bytes of hidden states, and of what a layer computes.
    """

    seconds: Number
    computing: Number
    sending: Number
    weights: Number
    cache: Number
    activations: Number

    @property
    def memory(self) -> Number:
        """Bytes of the rank."""
        return self.weights + self.cache + self.activations


def ring_seconds(computing: Number, sending: Number, ranks: int) -> Number:
    """Seconds of a ring: each rank attends to its own tokens and to those of each other rank, while
    those of the next are on their way.

    The first of `ranks` equal rounds of computing and all but the last have a message beside them:
    each costs the longer of both, and the last round is computed alone.

    Args:
        computing: seconds of a rank in all rounds.
        sending: seconds of all of its messages.
        ranks: of the ring.
    """
    if ranks == 1:
        return computing
    round_, message = computing / ranks, sending / (ranks - 1)
    return (ranks - 1) * max(round_, message) + round_


def prefill(model: Model, cluster: Cluster, tokens: int, ranks: int, tp: int = 1) -> Step:
    """A prefill, its tokens shared by groups of `tp` ranks that share heads and weights.

    Args:
        model: `GQA`, `MLA` or another.
        cluster: the devices.
        tokens: of the prompt.
        ranks: in all.
        tp: of tensor parallelism, within a node; a divisor of `ranks`.
    """
    machine, node, cp = cluster.machine(ranks), cluster.machine(tp), ranks // tp
    products, scores = _prefill_flops(model, tokens, tp, cp)
    rest, attention = machine.computing(products), machine.computing(scores)
    both = _sent(model, tokens, tp=tp, cp=cp)
    sums = _sent(model, -(-tokens // cp), tp=tp)
    summing = node.sending(2 * sums.prefill, 2 * sums.prefill_steps)  # of attention, and of MLPs
    sending = machine.sending(both.prefill - sums.prefill, both.prefill_steps - sums.prefill_steps)
    return Step(
        seconds=rest + summing + ring_seconds(attention, sending, cp),
        computing=rest + attention,
        sending=summing + sending,
        weights=HALF * model.parameters / tp,
        cache=_cache(model, tokens, cp=cp, tp=tp),
        activations=_working(model, tokens, cp, tp),
    )


def training(model: Model, cluster: Cluster, tokens: int, ranks: int) -> Step:
    """A forward and a backward pass over one sequence, its tokens and the weights shared by the
    ranks (FSDP2), with activations computed again from the inputs of layers.

    Args:
        model: `GQA`, `MLA` or another.
        cluster: the devices.
        tokens: of the sequence.
        ranks: of context parallelism and of FSDP2.
    """
    machine = cluster.machine(ranks)
    products, scores = _prefill_flops(model, tokens, 1, ranks)
    sent = _sent(model, tokens, cp=ranks)
    # the forward pass twice: once for the loss, once for the activations
    rest = machine.computing((2 + BACKWARD) * products)
    attention = machine.computing((2 + BACKWARD_SCORES) * scores)
    streams = machine.sending(
        sent.training + sent.prefill, sent.training_steps + sent.prefill_steps
    )
    # weights are gathered for both passes, and the gradients' shares are summed
    weights = machine.sending(3 * (ranks - 1) / ranks * HALF * model.parameters)
    return Step(
        seconds=max(rest, weights) + ring_seconds(attention, streams, ranks),
        computing=rest + attention,
        sending=streams + weights,
        weights=TRAINED * model.parameters / ranks,
        cache=0.0,
        activations=_working(model, tokens, ranks)
        + HALF * len(model.shape.layers) * tokens / ranks * model.shape.hidden_size,
    )


def decode(
    model: Model, cluster: Cluster, tokens: int, ranks: int, tp: int, *, sharded: bool = True
) -> Step:
    """One more token of one row after `tokens` tokens, with heads and weights split over the ranks.

    Of `tp` ranks in all, each has a share of the heads, of the weights, and, if `sharded`, of the
    tokens. Of more ranks each group of `tp` shares heads and weights, and the groups share the
    tokens.

    Args:
        model: `GQA`, `MLA` or another.
        cluster: the devices.
        tokens: in the cache.
        ranks: in all.
        tp: that share the heads; a divisor of `ranks`.
        sharded: whether the `tp` ranks share the tokens where they are all the ranks.
    """
    machine, node, cp = cluster.machine(ranks), cluster.machine(tp), ranks // tp
    together = sharded and tp == ranks > 1
    cache = _cache(model, tokens, cp=ranks) if together else _cache(model, tokens, cp=cp, tp=tp)
    weights = HALF * model.active / tp
    alone = cost_of(model.shape, PLAIN, context=tokens)
    flops = alone.visible_decode_flops + 2 * (model.active - alone.parameters)
    computing = machine.computing(flops / ranks, cache + weights)
    layers, sums = len(model.shape.layers), _sent(model, tokens, tp=tp).decode
    # two sums a layer, of attention and of the MLP, up and down a tree of the ranks
    sending = node.sending(2 * sums, 2 * layers * 2 * math.ceil(math.log2(tp)))
    if together:  # queries and new keys, then outputs
        sending += machine.sending(_together(model, tokens, tp) - sums, 2 * layers)
    elif cp > 1:
        sent = _sent(model, tokens, tp=tp, cp=cp).decode - sums
        sending += machine.sending(sent, layers)
    return Step(
        seconds=computing + sending,
        computing=computing,
        sending=sending,
        weights=HALF * model.parameters / tp,
        cache=cache,
        activations=0.0,
    )


def fastest_decode(model: Model, cluster: Cluster, tokens: int, ranks: int) -> Step:
    """A token with the faster of two plans: heads and tokens shared by all ranks, or heads by the
    ranks of a node and tokens by the nodes.

    Args:
        model: `GQA`, `MLA` or another.
        cluster: the devices.
        tokens: in the cache.
        ranks: in all; a multiple of a node's, or fewer.
    """
    plans = {ranks, min(ranks, cluster.node)}
    steps = (decode(model, cluster, tokens, ranks, tp) for tp in plans)
    return min(steps, key=lambda step: step.seconds)


def _sent(model: Model, tokens: int, tp: int = 1, cp: int = 1) -> Sent:
    return sent_of(model.shape.layers, context=tokens, dtype="bfloat16", tp=tp, cp=cp)


def sharded_decode_sent(layer: LayerShape, work: Workload) -> int:
    """Bytes for one more token of each row, where the ranks that share the heads share the tokens,
    too (Helix parallelism: Bhatia et al. 2025, arXiv:2507.07120).

    Each rank attends to its tokens for the heads of all ranks: it sends its queries, and its key
    heads' new keys and values, to each other rank, and gets the outputs and log-sum-exps of its own
    heads from each; then the sum of the outputs. Exact where the heads divide.

    Args:
        layer: of any kind but linear attention and `LatentKVAttention`, which has no such plan.
        work: rows, dtype and ranks.
    """
    heads = work.query_heads(layer)
    width = layer.latent if layer.kind == "MLA" else layer.v_head_dim  # of a partial output
    gathered = heads * layer.head_dim
    gathered += work.key_heads(layer) * (layer.head_dim + layer.v_head_dim)
    if layer.kind == "MLA":
        gathered = heads * (layer.latent + layer.qk_rope_head_dim)
    outputs = (layer.num_heads - heads) * (width + 1) * max(work.itemsize, SINGLE)
    exchanged = (work.tp - 1) * work.batch * gathered * work.itemsize + work.batch * outputs
    return exchanged + forward_sums(layer, work, 1)


def _together(model: Model, tokens: int, ranks: int) -> Number:
    """Bytes of a token where the ranks that share the heads share the tokens."""
    work = Workload(context=tokens, dtype="bfloat16", tp=ranks)
    return sum(
        len(same) * sharded_decode_sent(layer, work)
        for layer, same in model.shape.distinct().items()
    )


def _prefill_flops(model: Model, tokens: int, tp: int, cp: int) -> tuple[float, float]:
    """Operations of a rank: in products with weights, and in scores and sums of visible values.

    Keys and values of latents are computed on each rank that receives them.
    """
    shape = model.shape
    cost = cost_of(shape, PLAIN, context=tokens, tp=tp, cp=cp)
    of_layers = cost_of(shape, PLAIN, context=0).parameters
    scores = sum(
        len(same) * _score_flops(layer, tokens) for layer, same in shape.distinct().items()
    ) / (tp * cp)
    others = 2 * (model.active - of_layers) * tokens / (tp * cp)
    return cost.visible_prefill_flops - scores + others, scores


def _score_flops(layer: LayerShape, tokens: int) -> float:
    return attention_flops(layer, Workload(context=tokens), visible_pairs(layer, tokens))


def _cache(model: Model, tokens: int, *, cp: int, tp: int = 1) -> Number:
    found = cost_of(model.shape, PLAIN, context=tokens, dtype="bfloat16", cp=cp, tp=tp)
    return found.cache_bytes


def _working(model: Model, tokens: int, cp: int, tp: int = 1) -> float:
    """Bytes of the hidden states and of what an MLP computes of them: its input, its output, and
    the two factors of its inner product. Attention of a layer needs less."""
    channels = 2 * model.shape.hidden_size + 2 * model.intermediate / tp
    return HALF * tokens / cp * channels


def cluster_of(device: str) -> Cluster:
    """Nodes of 8 of a device behind NVLink 4, and InfiniBand NDR between them."""
    return Cluster(device_of(device), NVLINK_4, INFINIBAND_NDR)


def prefill_table() -> Iterator[str]:
    """Prefills of GQA on H200: seconds, and gigabytes of a rank."""
    yield "ranks   128K tokens      1M tokens     10M tokens"
    for ranks in (1, 8, 64, 1024):
        row = f"{ranks:5,}"
        for tokens in (131_072, 1 << 20, 10_000_000):
            step = prefill(GQA, cluster_of("h200"), tokens, ranks, tp=min(ranks, 8))
            row += f"{step.seconds:9,.3g} s{step.memory / 1e9:6,.0f} GB"
        yield row


def decode_table() -> Iterator[str]:
    """A token after a million, with heads alone split and with tokens, too."""
    h200 = cluster_of("h200")
    for model in (GQA, MLA):
        for ranks in (1, 8, 64, 1024):
            alone = decode(model, h200, 1 << 20, ranks, tp=ranks, sharded=False)
            both = fastest_decode(model, h200, 1 << 20, ranks)
            times = f"{1e3 * alone.seconds:5.1f} ms heads alone, {1e3 * both.seconds:4.1f} ms"
            caches = f"{alone.cache / 1e9:6.1f} GB and {both.cache / 1e9:6.1f} GB"
            yield f"{model.shape.name:20} {ranks:5,} ranks: {times} with tokens; {caches}"


def published_table() -> Iterator[str]:
    """Llama 3 405B on 128 H100 in 16 nodes (Yang et al. 2024, arXiv:2411.01783)."""
    for tokens, published in ((1_000_000, 77), (128 * 1024, 3.8)):
        modelled = prefill(LARGE, cluster_of("h100"), tokens, ranks=128, tp=8).seconds
        yield f"{tokens:,} tokens: {modelled:.1f} s modelled, {published} s published"


TABLES = {"prefill": prefill_table, "decode": decode_table, "published": published_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    print("\n".join(TABLES[parser.parse_args().table]()))


if __name__ == "__main__":
    main()
