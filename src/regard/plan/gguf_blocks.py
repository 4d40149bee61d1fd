"""Blocks of a GGUF that are not plain attention: MLA, and gated delta nets."""

from regard.hf.loading.untrusted import refused
from regard.plan.gguf_keys import Described, rope_of_layer
from regard.plan.reading import UNKNOWN
from regard.plan.shapes import LayerShape


def latent_block(model: Described) -> LayerShape:
    """The MLA of every block of DeepSeek-V2 and V3.

    Newer files say how keys are cached (one head, as wide as the latent and the rotated key) and
    have the sizes of a head under `key_length_mla` and `value_length_mla`; older ones say how keys
    are expanded.

    Args:
        model: what the keys say.

    Raises:
        CheckpointError: if sizes contradict each other, or the tensors.
    """
    keys, heads = model.keys, model.heads[0]
    rank, rotated = keys.size("attention.kv_lora_rank"), keys.size("rope.dimension_count")
    head_dim = keys.optional_size("attention.key_length_mla")
    value_dim = keys.optional_size("attention.value_length_mla")
    kv_heads = heads if head_dim is None else 1
    if head_dim is None or value_dim is None:
        head_dim, value_dim = model.key_length, model.value_length
    elif (model.key_length, model.value_length) != (rank + rotated, rank):
        rule = f"{rank + rotated}, the latent and the rotated key, beside 'key_length_mla'"
        raise keys.refused("attention.key_length", rule, model.key_length)
    if set(model.heads) != {heads} or set(model.kv_heads) != {kv_heads}:
        came = sorted(set(model.kv_heads))
        raise keys.refused("attention.head_count_kv", f"{kv_heads} in every layer", came)
    if head_dim <= rotated:
        rule = f"above the {rotated} channels that are rotated"
        raise keys.refused("attention.key_length_mla", rule, head_dim)
    for index in range(model.layers):
        _check_latent(model, index, rank + rotated)
    rope = rope_of_layer(model, "pairs", sliding=False, local=None, dim=rotated)
    return LayerShape(
        hidden_size=model.hidden_size,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        v_head_dim=value_dim,
        kv_lora_rank=rank,
        q_lora_rank=keys.optional_size("attention.q_lora_rank"),
        qk_rope_head_dim=rotated,
        rope=repr(rope),
    )


def _check_latent(model: Described, index: int, width: int) -> None:
    found = model.block(index).outputs("attn_kv_a_mqa")
    if found != width:
        rule = f"'blk.{index}.attn_kv_a_mqa.weight' must have {width} outputs, as the keys say"
        raise refused(model.keys.file, rule, found, "get the file anew")


def delta_block(model: Described) -> LayerShape:
    """A gated delta net of Qwen3-Next.

    Args:
        model: what the keys say.

    Raises:
        CheckpointError: if sizes do not divide.
    """
    keys = model.keys
    key_dim, valued = keys.size("ssm.state_size"), keys.heads("ssm.time_step_rank")
    keyed, inner = keys.heads("ssm.group_count"), keys.size("ssm.inner_size")
    if inner % valued or valued % keyed:
        rule = f"divided by {valued} value heads, and those by {keyed} key heads"
        raise keys.refused("ssm.inner_size", rule, inner, UNKNOWN)
    convolved = 2 * keyed * key_dim + inner
    return LayerShape(
        hidden_size=model.hidden_size,
        num_heads=valued,
        num_kv_heads=keyed,
        head_dim=key_dim,
        v_head_dim=inner // valued,
        state_elements=key_dim * inner + convolved * keys.size("ssm.conv_kernel"),
        unsupported="regard has no linear attention (gated delta net)",
    )
