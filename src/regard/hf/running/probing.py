"""The numeric probe: a module's own forward and regard's, on the same few random tokens.

Of each kind of module one is tried, once a process: a class of the table may have another source in
another release of transformers. The module's own weights are read; nothing of it is changed.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.hf.families import rotating
from regard.hf.families.recognising import exclude
from regard.hf.families.table import FAMILIES, Family
from regard.hf.packages import CACHES
from regard.tracing import is_concrete

TOKENS, ROWS = 5, 2
_AGREED: set[tuple[type, tuple[Any, ...]]] = set()  # kinds of modules that were tried
Forward = Callable[..., Any]


def disagreement(family: Family, module: nn.Module, ours: Forward) -> str | None:
    """In words: how regard's forward differs from the module's own; None if it does not, or its
    weights are not here to be tried."""
    weights = module.parameters()
    if not all(x.is_floating_point() and not x.is_meta and is_concrete(x) for x in weights):
        return None
    # what tells the modules of one class apart, but for their place in the model
    settings = {
        name: repr(value)
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and name not in ("layer_idx", "training")
    }
    kind = type(module), tuple(sorted(settings.items()))
    if kind in _AGREED:
        return None
    why = _difference(family, module, ours)
    if why is None:
        _AGREED.add(kind)
    else:
        exclude(type(module), why)
    return why


def _difference(family: Family, module: Any, ours: Forward) -> str | None:
    """The first case in which the two forwards differ. A class that the table names is trusted
    where its own forward cannot be tried, as with weights that are spread over ranks."""
    named = FAMILIES.get(type(module).__name__) is family
    is_inference = any(each.is_inference() for each in module.parameters())
    mode = torch.no_grad() if is_inference else torch.enable_grad()
    with undisturbed(module), mode, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, case in _cases(family, module):
            own = None
            try:
                own = case(type(module).forward)
                other = case(ours)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                if own is None and named:
                    return None
                return f"with {name}, it cannot be tried: {type(error).__name__}: {error}"
            own, other = own.detach(), other.detach()
            near = 1e-4 if own.dtype in (torch.float32, torch.float64) else 5e-2
            far = float((own - other).abs().max() / own.abs().max().clamp_min(1e-9))
            if not far <= near:
                return f"its outputs differ with {name}, by {far:.1e} of the largest"
    return None


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; the module is as before afterwards."""
    modes = {each: each.training for each in module.modules()}
    try:
        module.eval()
        with torch.no_grad():
            yield
    finally:
        for each, mode in modes.items():
            each.training = mode


def _cases(family: Family, module: Any) -> Iterator[tuple[str, Callable[[Forward], Tensor]]]:
    """Calls of a forward, by what they are called with."""
    from transformers import DynamicCache

    one = next(module.parameters())
    # A kernel for which a user waits seconds has no gradient, so none is compiled for a probe.
    x = torch.randn(ROWS, TOKENS, _hidden_size(family, module)).to(one).requires_grad_() * 1
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1).repeat(ROWS, 1, 1, 1)
    hidden[0, ..., :2] = True  # padding
    window = family.window_of(module) or TOKENS
    hidden |= torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(-window)
    hidden &= ~torch.eye(TOKENS, dtype=torch.bool)
    padded = one.new_zeros(hidden.shape)
    padded.masked_fill_(hidden.to(one.device), torch.finfo(one.dtype).min)
    angles = partial(_angles, family, module, like=one)
    places = torch.arange(TOKENS, device=one.device).unsqueeze(0)

    def alibi(keys: int) -> Tensor | None:
        """None rotates: a model with ALiBi passes a bias, here of 0."""
        has = getattr(getattr(module, "config", None), "alibi", False)
        return one.new_zeros(ROWS * family.sizes(module)[0], 1, keys) if has else None

    def of_tokens(forward: Forward, start: int, stop: int, mask: Any, **more: Any) -> Tensor:
        given = {family.mask: mask, "position_embeddings": angles(start, stop)}
        given |= {"alibi": alibi(stop), "position_ids": places[:, start:stop]}
        given = _accepted(module, given | {"shared_kv_states": {}} | more)
        return forward(module, x[:, start:stop].contiguous(), **given)[0]

    def one_by_one(forward: Forward) -> Tensor:
        cached, outs = dict.fromkeys((family.cache, *CACHES), DynamicCache()), []
        for start, stop in ((0, TOKENS - 2), (TOKENS - 2, TOKENS - 1), (TOKENS - 1, TOKENS)):
            mask = padded[:, :, start:stop, :stop]
            outs.append(of_tokens(forward, start, stop, mask, **cached))
        return torch.cat(outs, dim=1)

    if window >= TOKENS:  # the model passes the mask of a window, which its module does not know
        yield "no mask", partial(of_tokens, start=0, stop=TOKENS, mask=None)
    yield "padding", partial(of_tokens, start=0, stop=TOKENS, mask=padded)
    takes = inspect.signature(type(module).forward).parameters
    if {family.cache, *CACHES} & {*takes} and getattr(module, "layer_idx", 0) is not None:
        yield "a cache", one_by_one


def _hidden_size(family: Family, module: Any) -> int:
    """The width of hidden states: of the config, or of the projection of a module without one."""
    if family.project.children is None or hasattr(module, "config"):
        return int(module.config.hidden_size)
    return int(getattr(module, family.project.children.q).in_features)


def _accepted(module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the module's own forward takes; None for others that it must be given."""
    takes = [*inspect.signature(type(module).forward).parameters.values()][2:]
    must = {each.name: None for each in takes if each.default is each.empty and each.kind < 2}
    return must | {each.name: given[each.name] for each in takes if each.name in given}


def _angles(family: Family, module: Any, start: int, stop: int, *, like: Tensor) -> Any:
    """Random angles of some tokens in the form that a family's rotation reads."""
    rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    part = rope.get("partial_rotary_factor", 1.0) if isinstance(rope, dict) else 1.0
    width = module.qk_rope_head_dim if family.latent else family.sizes(module)[2] * part
    angles = torch.linspace(0, 3, ROWS * TOKENS * (int(width) // 2), device=like.device)
    angles = angles.view(ROWS, TOKENS, -1)[:, start:stop].sin() * 3
    if family.rotate is rotating.complex_pairs:
        return torch.polar(torch.ones_like(angles), angles)
    if family.rotate is not rotating.half_angles:
        angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(like), angles.sin().to(like)
