"""How a family rotates queries and keys: by the angles that the model itself has computed."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

T = TypeVar("T")
Rotate = Callable[[Any, Tensor, Any], Tensor]  # module, queries or keys, the model's angles


def not_rotated(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Positions, if there are any, are part of the hidden states."""
    return x


def halves(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Channel i is rotated with channel i + n/2 of the first n, where n is the angles' width."""
    cos, sin = memoised("_angles_of_regard", module, lambda: _signed(*angles), *angles)
    width = cos.shape[-1]
    first = x if width == x.shape[-1] else x[..., :width]
    rotated = torch.addcmul(first * cos, first.roll(width // 2, -1), sin).to(x.dtype)
    return rotated if first is x else torch.cat([rotated, x[..., width:]], dim=-1)


def _signed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[B, 1, L, n]`, the first half of the sines negative: the factor of the
    channels rolled by n/2. Under autocast `torch.cat` refuses dtypes that are not its own."""
    second = torch.arange(sin.shape[-1], device=sin.device) >= sin.shape[-1] // 2
    return cos.unsqueeze(1), torch.where(second, sin, -sin).unsqueeze(1)


def memoised(name: str, module: Any, make: Callable[[], T], *of: Tensor) -> T:
    """The result of `make`, held as an attribute of the first tensor that it is computed from, for
    the layers of one pass: a model passes the same mask and the same angles to every layer.

    Writes through `.data` or NumPy, and those to tensors of inference mode, leave no trace in a
    tensor. So a layer computes the result anew unless it comes after the one that computed it: the
    layers of the next pass begin with the first. Other writes are noticed within a pass, too.
    Modules without a number are not known to be of one pass: they rely on the trace alone.
    """
    if torch.compiler.is_compiling() or any(each.requires_grad for each in of):
        return make()
    layer = getattr(module, "layer_idx", None)
    versions = [None if each.is_inference() else each._version for each in of]
    held: Any = getattr(of[0], name, None)
    if held is None or held[0] != versions or not _is_after(layer, held[1], versions):
        held = versions, layer, make()
        setattr(of[0], name, held)
    return held[2]


def _is_after(layer: int | None, other: int | None, versions: list[int | None]) -> bool:
    """Whether a layer comes after another one in the same pass, as far as can be known."""
    return None not in versions if layer is None or other is None else layer > other


def half_angles(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """The same, where `angles` has one column for each pair of channels (gpt-oss)."""
    cos, sin = (each.unsqueeze(1) for each in angles)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def halves_where_used(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Some layers rotate, some do not (SmolLM3)."""
    return halves(module, x, angles) if module.use_rope else x


def halves_without_alibi(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Models with ALiBi do not rotate (Falcon)."""
    return x if module.config.alibi else halves(module, x, angles)


def pairs_or_halves(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Neighbouring channels are rotated together and returned as halves (DeepSeek-V3): queries and
    keys are permuted alike, so their products do not change."""
    return (pairs if module.config.rope_interleave else halves)(module, x, angles)


def pairs(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Neighbouring channels are rotated together and returned as halves."""
    cos, sin = (each[..., : each.shape[-1] // 2] for each in angles)
    return half_angles(module, torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1), (cos, sin))


def complex_pairs_where_used(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Some layers rotate neighbouring channels and then norm them, some do neither (Llama 4)."""
    if not module.use_rope:
        return x
    rotated = complex_pairs(module, x, angles)
    return module.qk_norm(rotated) if hasattr(module, "qk_norm") else rotated


def complex_pairs(module: Any, x: Float[Tensor, "B H L D"], angles: Any) -> Tensor:
    """Neighbouring channels are a complex number, and so are the angles (DeepSeek-V2)."""
    numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * angles.unsqueeze(1).to(x.device)).flatten(-2).to(x.dtype)
