"""What every call of attention in a transformers model has in common, however keys are made."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache import Part
from regard.cache.stored import Stored
from regard.hf.families.recognising import known_family
from regard.hf.families.table import Family
from regard.hf.packages import cache_in
from regard.hf.running.masks import Visible, in_documents, visible
from regard.layers.attending import Attending, Keys
from regard.layers.query_scale import UNSCALED
from regard.ops.attend import prepare
from regard.ops.explain import weights_of
from regard.ops.partial import Partial, merge
from regard.ops.parts import Make, concatenated
from regard.ops.prepared import Prepared
from regard.tracing import is_autocast

# read from the module, or not read (MVP's prompts): as arguments they would be ignored
FROM_THE_MODULE = ("softcap", "s_aux", "attn_prompt", "indices")


def arrive(
    module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[Family, dict[str, Any]]:
    """The family of a module, and by their names the arguments that follow the hidden states.
    Raises a ValueError if an argument would change the result and is not supported."""
    family = known_family(module)
    if args:
        names = list(inspect.signature(type(module).forward).parameters)[2:]
        given = {**dict(zip(names, args, strict=False)), **given}
    refuse(given, also=FROM_THE_MODULE)
    if family.cache not in given:
        given = {**given, family.cache: cache_in(given)}
    return family, given


def refuse(given: Mapping[str, Any], also: tuple[str, ...] = ()) -> None:
    """Raise for arguments that would change the result and are not supported."""
    for name in ("block_table", *also):
        if given.get(name) is not None:
            raise ValueError(
                f"{name}= would change the result and is not supported by regard.hf; "
                "uninstall(model), or set another attn_implementation"
            )


def visible_in(
    family: Family,
    module: nn.Module,
    given: Mapping[str, Any],
    queries: int,
    keys: int,
    *,
    across: bool = False,
) -> Visible:
    """`visible` with the mask among the arguments of a call; `across` for cross-attention."""
    mask = given.get(family.context_mask if across else family.mask)
    window, causal = family.window_of(module), False if across else given.get("is_causal")
    at = visible(module, mask, queries, keys, window=window, is_causal=causal)
    return at if across else in_documents(module, at, given)


def positions_of_queries(
    x: Float[Tensor, "B L E"], given: Int[Tensor, "*B L"] | None, cache: Any, layer: int | None
) -> Int[Tensor, "*B L"]:
    """The positions of new tokens: those of the model, or else counted on from the cache."""
    if given is not None:
        return given
    past = 0 if cache is None else cache.get_seq_length(layer)
    return (torch.arange(x.shape[1], device=x.device) + past).unsqueeze(0)


def scaler_of(
    family: Family, module: Any, x: Float[Tensor, "B L E"], given: Mapping[str, Any]
) -> Callable[[Tensor], Tensor]:
    """The scaling of queries by their positions; made before the cache holds the new tokens."""
    scale = family.query_scale(module)
    if scale is UNSCALED:
        return lambda q: q
    positions = None if family.counts_positions else given.get("position_ids")
    cache, layer = given.get(family.cache), getattr(module, "layer_idx", None)
    return partial(scale, positions=positions_of_queries(x, positions, cache, layer))


def options_of(family: Family, module: nn.Module) -> dict[str, Any]:
    """The options of `prepare` that a module holds."""
    return {
        "scale": family.scale(module),
        "softcap": family.softcap(module),
        "sinks": family.sinks(module),
        "dropout": family.dropout(module) if module.training else 0.0,
        "precision": precision_of(module),
    }


def precision_of(module: nn.Module) -> str:
    """The attribute `precision`: `install` sets it, and layers of regard have it."""
    return str(getattr(module, "precision", "strict"))


class CachedKeys(Sequence[Tensor]):
    """Keys and values of all tokens of a call, in the `parts` that a cache returned: pages, codes,
    tensors.

    As a sequence it is a pair of tensors, as transformers passes keys and values between layers, or
    one joined stream: indexing copies them out of pages or codes. Layers that regard runs read the
    parts. `attending` is the cache if it attends by itself, as each rank stores a share of its
    tokens; `make` computes keys and values from parts that hold something else.
    """

    def __init__(
        self, parts: tuple[Part, ...], attending: Any = None, make: Make | None = None
    ) -> None:
        self.parts, self.attending, self.make = parts, attending, make

    @classmethod
    def of(cls, *streams: Tensor) -> "CachedKeys":
        """Tensors of all tokens, as one part."""
        return cls((Part(0, streams[0].shape[2], streams),))

    def __len__(self) -> int:
        return len(self.parts[0].streams) if self.make is None else 2

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        whole = concatenated(self.parts)
        if self.make is not None:
            tensors = tuple(each[:, :] for each in whole.streams)
            (whole,) = self.make((whole._replace(streams=tensors),))
        return whole.streams[index]

    @property
    def num_keys(self) -> int:
        """The number of keys of the call, on all ranks."""
        return self.parts[-1].kv_stop if self.attending is None else self.attending.length

    def rebuilt(self, at: Visible, make: Make) -> Keys:
        """Keys and values that `make` computes from parts: of pages, one piece after another, and
        of visible keys alone."""
        if self.attending is not None:
            return Keys.of(make(self.parts))
        return Keys.made(self.parts, make, at.mask, at.span)


def appended(cache: Any, module: Any, *streams: Tensor, pieces: tuple[int, ...] = ()) -> CachedKeys:
    """The streams of a module in a cache, with these of new tokens appended.

    The cache is one of transformers or of `regard.hf.cache`, or None. Slots count from the first
    key that is still held: so do the masks of transformers number a window's keys. `pieces` are the
    widths of the parts of one stream that quantised caches store with scales of their own. A
    ValueError is raised if tensor parallelism has split the module's heads over the ranks of the
    cache.
    """
    if cache is None:
        return CachedKeys.of(*streams)
    if not hasattr(cache, "append"):
        return CachedKeys.of(*cache.update(*streams, module.layer_idx))
    own = cache.layers[module.layer_idx].cache
    attending = own if isinstance(own, Attending) else None
    if attending is not None:
        attending.check_layer(module)
    if pieces and isinstance(own, Stored):
        own.pieces = pieces
    parts: tuple[Part, ...] = cache.append(module.layer_idx, *streams)
    first = parts[0].kv_start
    if first:
        parts = tuple(Part(start - first, stop - first, each) for start, stop, each in parts)
    return CachedKeys(parts, attending)


def attended(
    q: Tensor,
    keys: Keys,
    at: Visible,
    given: Mapping[str, Any],
    *,
    attending: Any = None,
    bias: Tensor | None = None,
    sinks: Float[Tensor, " H"] | Float[Tensor, "B H L 1"] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Prepared]:
    """Attention of queries to keys, described and then run by the backend chosen for it: the heads'
    outputs `[B, H, L, Dv]`, the weights if the caller wants them, and the call.

    `at` says which keys are visible; `bias` is added to the scores besides; `sinks` are logits of
    each head, or of each head and query. A cache that attends by itself, `attending`, does not have
    all keys here: a ValueError is raised if weights are wanted of it. `options` are further ones of
    `prepare`.
    """
    k, v = keys.outlines
    if at.bias is not None:
        bias = at.bias if bias is None else at.bias + bias
    of_queries = None if sinks is None or sinks.ndim == 1 else sinks
    separate = of_queries is not None or attending is not None
    options |= {"sinks": None, "partial": True} if separate else {"sinks": sinks}
    call = prepare(q, k, v, mask=at.mask, span=at.span, score_bias=bias, **options)
    wanted = weights_wanted(given)
    if attending is not None:
        if wanted:
            raise ValueError(
                f"attention weights are not returned with {type(attending).__name__}, which does "
                "not have all keys here; leave output_attentions out"
            )
        return attending.attend(call, q, keys.parts, sinks), None, call
    parts = tuple(keys.parts) if wanted else keys.parts
    weights = weights_of(call, q, parts) if wanted else None
    if of_queries is None:
        return call.run(q, parts), weights, call
    own = call.partial(q, parts)
    # the sink of a query is one more key, whose value is 0
    sink = Partial(torch.zeros_like(own.out), of_queries.squeeze(-1).to(own.lse.dtype))
    share = torch.sigmoid(own.lse - sink.lse).unsqueeze(-1)  # of the softmax, that the keys keep
    out = merge(own, sink).out.to(q.dtype)
    return out, None if weights is None else weights * share, call


def weights_wanted(given: Mapping[str, Any]) -> bool:
    """Whether the caller of the model asked for attention weights: models pass that on, or collect
    what their modules return."""
    from transformers.utils.output_capturing import _active_collector

    if given.get("output_attentions"):
        return True
    collected = _active_collector.get()
    return collected is not None and ("attentions" in collected or "cross_attentions" in collected)


def outputs_collected(config: Any) -> bool:
    """Whether a call of a model collects the outputs of its modules, or returns a tuple."""
    from transformers.utils.output_capturing import _active_collector

    if config.output_hidden_states or config.output_attentions or not config.return_dict:
        return True
    return bool(_active_collector.get())


def of_one_dtype(*heads: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values, rounded to the narrowest of their dtypes under autocast: norms with
    float32 weights widen queries and keys there, and torch's own attention rounds all three."""
    kind = heads[0].device.type
    if not is_autocast(kind):
        return heads
    narrow = min((each.dtype for each in heads), key=lambda dtype: dtype.itemsize)
    return tuple(each.to(narrow) for each in heads)
