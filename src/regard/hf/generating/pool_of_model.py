"""A cache in pages for a model: its pool, what its keys and values depend on, prefixes in files."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import nn

from regard.cache.paging.contexts import Context, context_of
from regard.cache.paging.formats import PageFormat, format_of
from regard.cache.paging.paged import PagedCache
from regard.cache.paging.pool import PagePool
from regard.cache.streams import check_whole
from regard.hf.families.recognising import family_of
from regard.hf.generating.layer_kinds import LayerKind, layer_kinds, layers_of
from regard.hf.generating.paged import PagedGenerationCache
from regard.hf.generating.watching import called_module, is_own
from regard.hf.running.binding import bound_forward, is_bound
from regard.whole_file import check_can_write, errors_that_name

ROWS = 32  # texts of the model's greatest length that fit a pool, unless `tokens=` says otherwise
LENGTH = 4096  # tokens of a text, for models that have no greatest length
FILE = "prefixes.safetensors"  # of prefixes in a folder
TOKENS = 16_384  # tokens in that file at most: of SmolLM2, 720 MiB in float32, 110 MiB as K8V4
PAGE_SIZE = 64  # tokens: the page size of a pool that is made here
_PROCESS = secrets.token_hex(8)  # numbers of hooks and functions mean nothing to another process
_NUMBERS = count()
_FUNCTIONS: dict[int, tuple["ref[Any]", int]] = {}  # by id: functions that replaced a forward


def paged(
    model: Any,
    kinds: list[LayerKind],
    /,
    *,
    pool: PagePool | None = None,
    format: str | PageFormat | None = None,
    tokens: int | None = None,
    page_size: int | None = None,
    prefixes: bool = True,
    name: str = "",
) -> PagedGenerationCache:
    """A cache in pages for a model; the arguments are those of `regard.hf.cache`."""
    module: Any = called_module(model)
    if prefixes and any(each.states for each in kinds):
        raise ValueError(
            f"{type(model).__name__} has layers with recurrent or convolutional states, which "
            "pages do not store, so no prefix can be shared; give prefixes=False"
        )
    if pool is not None:
        check_pool(pool, format, tokens, page_size)
    else:
        size = PAGE_SIZE if page_size is None else page_size
        if tokens is None:
            config = module.config.get_text_config(decoder=True)
            tokens = ROWS * (getattr(config, "max_position_embeddings", None) or LENGTH)
        check_whole("tokens", tokens, least=1)
        check_whole("page_size", size, least=1)
        # each layer stores all tokens
        pages = sum(each.has_keys for each in kinds) * -(-tokens // size)
        pool = PagePool(pages, size, format="plain" if format is None else format)
    described = None
    if prefixes and not model.config.is_encoder_decoder:
        module_of = ref(module)

        def described() -> Context:
            return _context(module_of(), name)

    layers = layers_of(kinds, [lambda window: PagedCache(pool, window=window)] * len(kinds))
    return PagedGenerationCache(layers, module, pool, described)


def check_pool(pool: Any, format: Any, tokens: Any = None, page_size: Any = None) -> None:
    """Raise a ValueError unless it is a pool with what else was given."""
    if not isinstance(pool, PagePool):
        raise ValueError(f"pool is a PagePool, got {type(pool).__name__}; make PagePool(num_pages)")
    for name, given, own in (
        ("format", None if format is None else format_of(format), pool.format),
        ("page_size", page_size, pool.page_size),
        ("tokens", tokens, None),
    ):
        if given is not None and given != own:
            raise ValueError(
                f"{name}={getattr(given, 'name', given)!r} is not that of pool={pool!r}; leave "
                f"{name} out, or make another PagePool"
            )


def _context(model: Any, name: str) -> Context:
    """What keys and values of a model depend on besides tokens, as it is now."""
    kind = model.device.type
    context = context_of(model, name=name)
    key = f"{context.key}{_changes(model)}"
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        key += f" {torch.get_autocast_dtype(kind)}"
    bound = filter(is_bound, model.modules())
    if any(family.latent for each in bound if (family := family_of(each))):
        key += " joined latents"
    return replace(context, key=key)


def _changes(model: nn.Module) -> str:
    """The hooks of modules, and the functions that take the place of their forward, by numbers of
    this process: what they compute is not known. "" where there are none."""
    found = []
    for name, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.items(), *module._forward_hooks.items()]
        found += [f"{name} hook {number}" for number, hook in hooks if not is_own(hook)]
        own = vars(module).get("forward")
        if own is not None and own is not bound_forward(module):
            found.append(f"{name} forward {_number(own)}")
    return f" {_PROCESS} {', '.join(found)}" if found else ""


def _number(function: Any) -> int:
    """A number that no other function of this process has, as an id that is free again may."""
    known = _FUNCTIONS.get(id(function))
    if known is None or known[0]() is not function:
        known = _FUNCTIONS[id(function)] = ref(function), next(_NUMBERS)
    return known[1]


@contextmanager
def prefixes_in(folder: str | Path, model: Any, *, format: str = "plain") -> Iterator[PagePool]:
    """A pool with the prefixes that a folder holds, for caches inside of the `with` block.

    After it, prefixes are stored in the folder again: the `TOKENS` used last.

    Args:
        folder: it is made if it is not there. Only its owner can read the file in it.
        model: the model that computes them.
        format: of the pages.

    Raises:
        OSError: if the folder cannot be read or written.
        ValueError: if its prefixes are of other weights or another format; they stay as they are.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} has an encoder: what its decoder caches depends on more than "
            "the decoder's tokens, and no prefix is stored; leave the folder for prefixes out"
        )
    folder = Path(folder)
    if os.path.lexists(folder) and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file or a broken link; give a folder for prefixes")
    with errors_that_name(folder):
        folder.mkdir(parents=True, exist_ok=True)
    check_can_write(folder / FILE)  # an error now, before anything is computed
    path, empty = folder / FILE, paged(model, layer_kinds(model), format=format)
    pool = empty.pool
    if path.exists():
        device = next(model.parameters()).device
        try:
            pool.load(path, weights=called_module(model), device=device)
        except ValueError as error:
            raise ValueError(f"{error}; or give another folder for prefixes") from error
    yield pool
    pool.evict(keep=len(empty.layers) * (TOKENS // pool.page_size))
    pool.save(path)
