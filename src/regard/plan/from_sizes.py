"""A model of equal layers from the numbers that a person knows of it."""

from regard.plan.shapes import DTYPE_BYTES, LayerShape, ModelShape

MOST = 10**6  # of any size: heads, channels, layers; larger numbers are taken for errors
MOST_TOKENS = 10**12  # of a window


def model_from_sizes(
    *,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    num_layers: int = 1,
    kv_lora_rank: int | None = None,
    q_lora_rank: int | None = None,
    qk_rope_head_dim: int | None = None,
    window: int | None = None,
    dtype: str = "float32",
) -> ModelShape:
    """A model whose layers all have these sizes.

    Args:
        hidden_size: channels of the hidden states.
        num_heads: query heads.
        num_kv_heads: key heads; as many as query heads if None.
        head_dim: channels of a query or key; `hidden_size / num_heads` if None.
        v_head_dim: channels of a value; if None those of a key, of MLA those of its part without
            RoPE.
        num_layers: of the model.
        kv_lora_rank: of MLA, channels of its latent; None for heads.
        q_lora_rank: of MLA, channels of the latent of queries.
        qk_rope_head_dim: channels with RoPE; of MLA to be given, else all of a head if None.
        window: keys that a query can see at most; None without.
        dtype: of plain caches.

    Raises:
        ValueError: if a size is out of its range, does not divide another, or contradicts one.

    Examples:
        >>> from regard.plan.from_sizes import model_from_sizes
        >>> model_from_sizes(hidden_size=576, num_heads=9, num_kv_heads=3).layers[0].head_dim
        64
    """
    given = {name: value for name, value in locals().items() if isinstance(value, int)}
    for name, value in given.items():
        most = MOST_TOKENS if name == "window" else MOST
        least = 0 if name == "qk_rope_head_dim" else 1
        if not least <= value <= most:
            raise ValueError(f"{name} is from {least} to {most:,}, got {value}")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    width = _head_dim(hidden_size, num_heads, head_dim)
    _check(num_heads, kv_heads, kv_lora_rank, q_lora_rank, qk_rope_head_dim, width)
    rotary = width if qk_rope_head_dim is None else qk_rope_head_dim
    values = width if kv_lora_rank is None else width - rotary
    layer = LayerShape(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        v_head_dim=values if v_head_dim is None else v_head_dim,
        kv_lora_rank=kv_lora_rank,
        q_lora_rank=q_lora_rank,
        qk_rope_head_dim=rotary,
        window=window,
    )
    return ModelShape(
        name="a model of these sizes",
        architecture="",
        layers=(layer,) * num_layers,
        hidden_size=hidden_size,
        dtype=dtype,
    )


def _head_dim(hidden_size: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is not None:
        return head_dim
    if hidden_size % num_heads:
        raise ValueError(
            f"num_heads={num_heads} does not divide hidden_size={hidden_size}; give head_dim"
        )
    return hidden_size // num_heads


def _check(
    num_heads: int,
    kv_heads: int,
    kv_lora_rank: int | None,
    q_lora_rank: int | None,
    rotary: int | None,
    head_dim: int,
) -> None:
    if num_heads % kv_heads:
        raise ValueError(f"num_kv_heads={kv_heads} does not divide num_heads={num_heads}")
    if rotary is not None and rotary > head_dim:
        raise ValueError(f"qk_rope_head_dim={rotary} is more than head_dim={head_dim}")
    if kv_lora_rank is None:
        if q_lora_rank is not None:
            raise ValueError("q_lora_rank is of MLA; give kv_lora_rank, too")
        return
    if rotary is None:
        raise ValueError("MLA needs qk_rope_head_dim, the channels of its rotary key")
    if kv_heads != num_heads:
        raise ValueError("MLA has a key for every query head; leave num_kv_heads out")
