"""A model of equal layers from the numbers that a person knows of it."""

from regard.plan.shapes import DTYPE_BYTES, LayerShape, ModelShape, check_whole


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
    """A model of `num_layers` layers of these sizes, which are those of `LayerShape`.

    Args:
        num_kv_heads: as many as query heads if None.
        head_dim: `hidden_size / num_heads` if None.
        v_head_dim: if None `head_dim`, of MLA its part without RoPE.
        kv_lora_rank: of MLA; None for key heads.
        qk_rope_head_dim: required of MLA, else all channels of a head if None.
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
        most = 10**12 if name == "window" else 10**6  # larger numbers are taken for errors
        check_whole(name, value, int(name != "qk_rope_head_dim"), most)
    width, kv_heads = head_dim or hidden_size // num_heads, num_kv_heads or num_heads
    rotary = width if qk_rope_head_dim is None else qk_rope_head_dim
    latent, whole = kv_lora_rank is not None, f"does not divide hidden_size={hidden_size}"
    for wrong, why in (
        (dtype not in DTYPE_BYTES, f"dtype={dtype!r} is not one of {', '.join(DTYPE_BYTES)}"),
        (not head_dim and hidden_size % num_heads, f"num_heads={num_heads} {whole}; give head_dim"),
        (num_heads % kv_heads, f"num_kv_heads={kv_heads} does not divide num_heads={num_heads}"),
        (rotary > width, f"qk_rope_head_dim={rotary} is more than head_dim={width}"),
        (not latent and q_lora_rank, "q_lora_rank is of MLA; give kv_lora_rank, too"),
        (latent and qk_rope_head_dim is None, "MLA needs qk_rope_head_dim, the rotary channels"),
        (latent and kv_heads != num_heads, "MLA has a key for each head; leave num_kv_heads out"),
    ):
        if wrong:
            raise ValueError(why)
    values = width - rotary if latent else width
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
