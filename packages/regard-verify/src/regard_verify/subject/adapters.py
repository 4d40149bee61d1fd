"""Adapters: models of transformers and layers of regard as modules from x to output.

They take more than x: masks of another type, cache objects. Here each becomes a module that takes
x, a mask and a cache. This suite does not import regard: whoever has a layer of regard has imported
it, and its masks and caches are taken from there.
"""

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class Adapter(nn.Module):
    """A module of another library as a module from x to output.

    Attributes:
        inner: that module.
        known: its conventions.
        hidden: what its additive masks add where a key is hidden.
        new_cache: makes an empty cache for it.
    """

    hidden = "-inf"

    def __init__(self, inner: Any, **known: Any) -> None:
        super().__init__()
        self.inner = inner
        self.known = {"cache": "cache", "cache_style": "object", **known}
        sinks = getattr(inner, "sinks", None)
        self.sinks = sinks.detach() if isinstance(sinks, Tensor) else None

    def new_cache(self) -> Any:
        """A cache of transformers."""
        from transformers import DynamicCache

        return DynamicCache()


class TransformersModel(Adapter):
    """A model of transformers, from embeddings to its last hidden states."""

    hidden = "min"

    def __init__(self, inner: Any) -> None:
        super().__init__(
            inner, mask="attention_mask", polarity="keep", mask_shape="BS", mask_dtype="int"
        )
        self.config = inner.config

    def new_cache(self) -> Any:
        """A cache of transformers whose layers have the windows of the model's."""
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past: int = 0,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states; `attention_mask` [B, S] is 1 for real tokens.

        Documents that are packed are told by positions that start again, as a trainer gives them.
        """
        if attention_mask is not None and cache is not None:
            missing = past + x.shape[1] - attention_mask.shape[1]
            attention_mask = nn.functional.pad(attention_mask, (0, missing), value=1)
        base = getattr(self.inner, "base_model", self.inner)
        given = {} if cache is None else {"past_key_values": cache}
        if document_ids is not None:
            same = document_ids[:, :, None] == document_ids[:, None]
            given["position_ids"] = same.tril(-1).sum(-1)
        # transformers compiles flex_attention anew for each shape, which takes minutes
        compiled = torch.compiler.is_compiling()
        with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
            out = base(
                inputs_embeds=x, attention_mask=attention_mask, use_cache=cache is not None, **given
            )
        hidden: Tensor = out.last_hidden_state
        return hidden


class RegardLayer(Adapter):
    """A layer of regard whose mask is a tensor."""

    def __init__(self, inner: Any) -> None:
        super().__init__(
            inner, mask="mask", polarity="keep", mask_shape="BHLS", mask_dtype="bool",
            scale=getattr(inner, "scale", None), softcap=getattr(inner, "softcap", None) or 0.0,
        )  # fmt: skip

    def new_cache(self) -> Any:
        """A cache of regard."""
        return sys.modules["regard"].KVCache()

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: Any = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """`mask` [B, 1, L, S] is True where a query may attend."""
        regard = sys.modules["regard"]
        visible = regard.EVERYTHING if mask is None else regard.Dense(mask)
        if cache is not None:
            visible = visible & regard.Causal()  # the tensor has no columns for later tokens
        cache = regard.NO_CACHE if cache is None else cache
        out: Tensor = self.inner(x, mask=visible, cache=cache, context=context)
        return out


def inner_of(module: Any) -> Any:
    """The module itself, without its adapter."""
    return module.inner if isinstance(module, Adapter) else module


def is_of(library: str, found: Any) -> bool:
    """Whether it is a class or an object of a library."""
    module = (found if isinstance(found, type) else type(found)).__module__
    return module.split(".")[0] == library


def adapted(module: nn.Module) -> nn.Module:
    """The module in its adapter, if it is a layer of regard or a model of transformers."""
    if is_of("regard", module):
        return RegardLayer(module)
    if is_of("transformers", module):
        for name, parameter in module.named_parameters():
            if name.endswith("sinks"):  # left uninitialised by the constructor
                nn.init.normal_(parameter)
        return TransformersModel(module) if hasattr(module, "base_model_prefix") else module
    return module
