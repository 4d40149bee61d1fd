"""The attention layers of a model, run on regard for as long as they are looked at."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from regard.hf.families.finding import find, unknown_attention
from regard.hf.running.binding import all_bound
from regard.hf.running.installing import forward_of, is_readable
from regard.hf.running.registering import NAME as REGISTERED
from regard.layers.attention import Attention
from regard.layers.latent import LatentKVAttention, MultiHeadLatentAttention

OWN = (Attention, MultiHeadLatentAttention, LatentKVAttention)


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers of a model by their names, in order: of transformers, or of regard.

    Raises:
        ValueError: if there is none, one is of an unknown family, or the model is compiled or has
            masks that regard does not read.
    """
    if any(_is_compiled(module) for module in model.modules()):
        raise ValueError("a compiled model does not show its calls; give it before torch.compile")
    own: dict[str, nn.Module] = {
        name: each for name, each in model.named_modules() if isinstance(each, OWN)
    }
    if own:
        return own
    found = find(model)
    if not found.known and not found.unknown:
        raise ValueError(unknown_attention(model, found))
    if found.unknown and not all(_is_registered(module) for module in found.unknown.values()):
        raise ValueError(
            f"{unknown_attention(model, found)}; if it goes through transformers' "
            "AttentionInterface, call regard.hf.register() and "
            f'model.set_attn_implementation("{REGISTERED}") first'
        )
    for module in found.known.values():
        if not is_readable(module):
            raise ValueError(
                f"{type(model).__name__} has masks that regard does not read; call "
                'model.set_attn_implementation("sdpa") first'
            )
    both = {**found.known, **found.unknown}
    return {name: module for name, module in model.named_modules() if name in both}


@contextmanager
def on_regard(layers: dict[str, nn.Module]) -> Iterator[None]:
    """A block in which regard runs a transformers model's attention; an installed one stays so."""
    with all_bound([(m, forward_of(m)) for m in layers.values() if _is_others(m)]):
        yield


def _is_others(module: nn.Module) -> bool:
    """Whether transformers' own attention might run in this module; a placed layer is regard's."""
    return not isinstance(module, OWN) and not _is_registered(module)


def _is_registered(module: nn.Module) -> bool:
    """Whether the module gets its attention function from `regard.hf.register`."""
    config = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", None) == REGISTERED


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
