"""How a family turns queries and keys: always by the angles that the model itself has computed."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.hf.families.memoised import remembered

Rotate = Callable[[Any, Tensor, Any], Tensor]  # module, queries or keys, the model's angles


def unturned(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Positions, if there are any, came in with the hidden states."""
    return x


def halves(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Channel i turns with channel i + n/2 of the first n, n being as wide as the angles."""
    cos, sin = remembered("_angles_of_regard", angles[1], lambda: _signed(*angles))
    width = cos.shape[-1]
    turning = x if width == x.shape[-1] else x[..., :width]
    turned = torch.addcmul(turning * cos, turning.roll(width // 2, -1), sin).to(x.dtype)
    return turned if turning is x else torch.cat([turned, x[..., width:]], dim=-1)


def _signed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[B, 1, L, n]`, the first half of the sines negative: what a half rolled
    over the other has to be multiplied by."""
    first, second = sin.chunk(2, dim=-1)
    return cos.unsqueeze(1), torch.cat([-first, second], dim=-1).unsqueeze(1)


def by_itself(module: Any, x: Float[Tensor, "B H L D"], positions: Any) -> Tensor:
    """The module has a rope of its own, and is handed positions where others are handed angles."""
    turned: Tensor = module.rope.rotate(x, positions)
    return turned


def half_angles(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """The same, each angle given once (gpt-oss)."""
    cos, sin = (each.unsqueeze(1) for each in angles)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def halves_where_used(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Some layers turn, some do not (SmolLM3)."""
    return halves(module, x, angles) if module.use_rope else x


def halves_if_given(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Models with ALiBi do not turn (Falcon)."""
    return x if module.config.alibi else halves(module, x, angles)


def pairs_or_halves(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Neighbouring channels turn together and come out as halves (DeepSeek-V3): queries and keys
    are shuffled alike, so their products do not change."""
    if not module.config.rope_interleave:
        return halves(module, x, angles)
    cos, sin = (each[..., : each.shape[-1] // 2] for each in angles)
    return half_angles(module, torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1), (cos, sin))


def complex_pairs(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Neighbouring channels are a complex number, and so are the angles (DeepSeek-V2)."""
    numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * angles.unsqueeze(1).to(x.device)).flatten(-2).to(x.dtype)
