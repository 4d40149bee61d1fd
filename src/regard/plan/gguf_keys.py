"""Keys and tensors of a GGUF's header: lists for each layer, RoPE, and what tensors say."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from regard.hf.loading.untrusted import COUNT, refused
from regard.hf.loading.untrusted_gguf import Header
from regard.plan.reading import LONGEST, UNKNOWN, Keys
from regard.rope import Pairing, Rotary
from regard.rope.scaling import LinearScaling, Yarn

TENSOR = re.compile(r"blk\.(\d+)\.(.+)")
PROJECTIONS = {
    "attn_q": ("q_proj",),
    "attn_k": ("k_proj",),
    "attn_v": ("v_proj",),
    "attn_qkv": ("q_proj", "k_proj", "v_proj"),
    "attn_output": ("o_proj",),
}
# keys about attention or experts that say nothing of what is cached or visible
HARMLESS = frozenset(
    {
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "attention.group_norm_epsilon",
        "expert_shared_count",
        "expert_shared_feed_forward_length",
        "final_logit_softcapping",
        "rope.scaling.finetuned",
    }
)
YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


@dataclass(frozen=True)
class Block:
    """The dimensions of the tensors of one block, by their names without its number."""

    tensors: Mapping[str, tuple[int, ...]]

    def bias(self) -> tuple[str, ...]:
        """The projections with a bias."""
        found = [
            name
            for tensor, names in PROJECTIONS.items()
            if f"{tensor}.bias" in self.tensors
            for name in names
        ]
        return tuple(found)

    def outputs(self, name: str) -> int | None:
        """The output channels of a projection; None without one."""
        dims = self.tensors.get(f"{name}.weight")
        return dims[1] if dims is not None and len(dims) == 2 else None


@dataclass(frozen=True)
class Described:
    """What the keys of a GGUF say, for every layer.

    Args:
        header: of the file.
        keys: of the architecture, without its name.
        architecture: its name.
        layers: how many.
        hidden_size: channels of the hidden states.
        heads: query heads of each layer.
        kv_heads: key heads of each layer.
        key_length: channels of a key.
        value_length: channels of a value.
        blocks: the tensors of each.
    """

    header: Header
    keys: Keys
    architecture: str
    layers: int
    hidden_size: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    key_length: int
    value_length: int
    blocks: Mapping[int, Block]

    def block(self, index: int) -> Block:
        """The tensors of one block."""
        return self.blocks.get(index, Block({}))


def blocks_of(header: Header) -> dict[int, Block]:
    """The tensors of every block, in one pass over their names."""
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, (dims, _, _) in header.tensors.items():
        matched = TENSOR.fullmatch(name)
        if matched is not None:
            found.setdefault(int(matched[1]), {})[matched[2]] = dims
    return {index: Block(tensors) for index, tensors in found.items()}


def per_layer(keys: Keys, name: str, count: int, otherwise: tuple[int, ...] | None) -> Any:
    """The number of each layer: of a key that holds one for all, or a list.

    Raises:
        CheckpointError: if a list has another length, or a number is not a count.
    """
    value = keys.get(name)
    if value is None and otherwise is not None:
        return otherwise
    if not isinstance(value, list):
        return (keys.size(name, COUNT),) * count
    if len(value) != count:
        raise keys.refused(name, f"a list of {count} numbers, one for each layer", len(value))
    for each in value:
        if type(each) is not int or not 1 <= each <= COUNT:
            rule = f"made of whole numbers of 1 to {COUNT}: layers without attention are not known"
            raise keys.refused(name, rule, each, UNKNOWN)
    return tuple(value)


def windows(keys: Keys, count: int, period: int) -> list[bool]:
    """Which layers have the window: `sliding_window_pattern`, as a list or a period, or the rule of
    the architecture. A period of 0 is all of them.
    """
    name = "attention.sliding_window_pattern"
    value = keys.get(name)
    if isinstance(value, list):
        found = keys.flags(name, count)
        assert found is not None
        return found
    if value is not None:
        period = keys.size(name)
    return [period == 0 or (at + 1) % period != 0 for at in range(count)]


def rope_of_layer(
    model: Described, pairing: Pairing, *, sliding: bool, local: float | None, dim: int
) -> Rotary:
    """The rotary embedding of a layer, from the keys under `rope.`.

    Args:
        model: whose keys they are.
        pairing: of the channels.
        sliding: whether the layer has a window.
        local: the base of such layers, where it is another one; they are not scaled then.
        dim: channels of a head that can be rotated.

    Raises:
        CheckpointError: if the type of the scaling is unknown, or numbers do not fit.
    """
    keys = model.keys
    dim = keys.optional_size("rope.dimension_count", dim) or dim
    theta = keys.number("rope.freq_base") if keys.get("rope.freq_base") is not None else 1e4
    own = keys.optional_number("rope.freq_base_swa")
    try:
        scaling = _scaling(keys)
        if sliding and (local is not None or own is not None):
            theta, scaling = own if own is not None else local or theta, None
        return Rotary(dim, theta=theta, pairing=pairing, scaling=scaling)
    except (ValueError, TypeError, OverflowError) as error:
        raise keys.refused("rope", "a rotary embedding that can be computed", str(error)) from error


def _scaling(keys: Keys) -> LinearScaling | Yarn | None:
    kind = keys.get("rope.scaling.type")
    factor = keys.optional_number("rope.scaling.factor")
    original = keys.optional_size("rope.scaling.original_context_length", LONGEST)
    attention = keys.optional_number("rope.scaling.attn_factor")
    betas = {to: keys.optional_number(f"rope.scaling.{name}") for name, to in YARN.items()}
    if kind in (None, "none", "longrope"):
        return None
    if kind == "linear" and factor is not None:
        return LinearScaling(factor)
    if kind == "yarn" and factor is not None and original is not None:
        given: dict[str, Any] = {name: beta for name, beta in betas.items() if beta is not None}
        logarithm = keys.optional_number("rope.scaling.yarn_log_multiplier")
        if logarithm:  # DeepSeek's mscale_all_dim over ten, and its mscale is the same
            mscale = round(10 * logarithm, 6)  # the key is a float32
            given |= {"mscale": mscale, "mscale_all_dim": mscale}
        return Yarn(factor, original_max_position=original, attention_factor=attention, **given)
    rule = "none, linear, yarn (with a factor and the original context) or longrope"
    raise keys.refused("rope.scaling.type", rule, kind, UNKNOWN)


def qk_norm_of(model: Described, block: Block, heads: int) -> Literal["head", "width"] | None:
    """The norm of queries and keys, by the size of its weight.

    Raises:
        CheckpointError: if it is neither of a head nor of all of them.
    """
    dims = block.tensors.get("attn_q_norm.weight")
    if dims is None:
        return None
    if dims == (model.key_length,):
        return "head"
    if dims in ((heads * model.key_length,), (model.key_length, heads)):
        return "width"
    rule = "'attn_q_norm.weight' must have the size of a head, or of all query heads"
    raise refused(model.keys.file, rule, dims, UNKNOWN)


def check_projections(model: Described, index: int, *, gated: bool) -> None:
    """Raise unless the tensors of a block have the sizes that the keys say.

    Args:
        model: whose keys they are.
        index: of the block.
        gated: whether `attn_q` has a gate for each channel, too.
    """
    block, heads, kv_heads = model.block(index), model.heads[index], model.kv_heads[index]
    queries, keys, values = (
        heads * model.key_length,
        kv_heads * model.key_length,
        kv_heads * model.value_length,
    )
    expected = {
        "attn_q": queries * (2 if gated else 1),
        "attn_k": keys,
        "attn_v": values,
        "attn_qkv": queries + keys + values,
        "attn_output": model.hidden_size,
    }
    for name, outputs in expected.items():
        if block.outputs(name) not in (None, outputs):
            rule = f"'blk.{index}.{name}.weight' must have {outputs} outputs, as the keys say"
            raise refused(model.keys.file, rule, block.outputs(name), "get the file anew")
    if block.outputs("attn_qkv") is None and block.outputs("attn_q") is None:
        rule = f"block {index} must have attn_qkv or attn_q: other attention is not known"
        raise refused(model.keys.file, rule, sorted(block.tensors)[:8], UNKNOWN)
