"""Adapters: attention of transformers and of regard as modules from x to output.

They take more than x: rotary tables, masks of another type, cache objects. Here each becomes a
module that takes x, a mask and a cache. This suite does not import regard: whoever has a layer of
regard has imported it, and its masks and caches are taken from there.
"""

import copy
import importlib
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard_verify.subject.configurations import TINY
from regard_verify.subject.guesses import HEADS
from regard_verify.subject.mask_forms import parameters_of
from regard_verify.subject.subject import SubjectError, called

LATENT = {
    "num_key_value_heads": HEADS, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
}  # fmt: skip


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


class TransformersAttention(Adapter):
    """An attention module of transformers as `forward(x, attention_mask, cache, past)`.

    While `rotating` is False its rotary tables are 1 and 0, so that nothing is rotated.
    """

    hidden = "min"

    def __init__(self, inner: Any) -> None:
        scaling = getattr(inner, "scaling", None)
        super().__init__(
            inner, mask="attention_mask", polarity="additive", mask_shape="B1LS",
            mask_dtype="float", scale=float(scaling) if isinstance(scaling, (int, float)) else None,
            softcap=getattr(inner, "attn_logit_softcapping", None) or 0.0,
        )  # fmt: skip
        self.config = inner.config
        self.rotating = True
        self.rotary = _rotary_of(inner)
        self.names = set(parameters_of(inner.forward))

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, cache: Any = None, past: int = 0
    ) -> Tensor:
        """The output alone."""
        given: dict[str, Any] = {"attention_mask": attention_mask}
        if "position_embeddings" in self.names:
            given["position_embeddings"] = self._tables(x, past)
        if cache is not None:
            given["past_key_values"] = cache
        out = self.inner(x, **given)
        return out[0] if isinstance(out, tuple) else out

    def _tables(self, x: Tensor, past: int) -> tuple[Tensor, Tensor]:
        if self.rotary is None:
            raise SubjectError("it needs position_embeddings, and its file has no RotaryEmbedding")
        positions = torch.arange(past, past + x.shape[1])[None].expand(x.shape[0], -1)
        names = parameters_of(self.rotary.forward)
        kinds = (
            {"layer_type": getattr(self.inner, "layer_type", None)} if "layer_type" in names else {}
        )
        cos, sin = self.rotary(x, positions, **kinds)
        if self.rotating:
            return cos, sin
        return torch.ones_like(cos), torch.zeros_like(sin)


def _rotary_of(inner: Any) -> Any:
    home = sys.modules[type(inner).__module__]
    for name in dir(home):
        if name.endswith("RotaryEmbedding"):
            return called(getattr(home, name), inner.config)
    return None


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


def is_of(library: str, found: Any) -> bool:
    """Whether it is a class or an object of a library."""
    module = (found if isinstance(found, type) else type(found)).__module__
    return module.split(".")[0] == library


def adapted(module: nn.Module, arguments: Mapping[str, Any]) -> nn.Module:
    """The module in its adapter, if it is of regard or transformers."""
    if is_of("regard", module):
        return RegardLayer(module)
    if is_of("transformers", module) and hasattr(module, "config"):
        return transformers_module(module, arguments)
    return module


def transformers_module(found: Any, arguments: Mapping[str, Any]) -> nn.Module:
    """A class, module or model of transformers as a module of this suite.

    Raises:
        SubjectError: if it cannot be built.
    """
    if isinstance(found, type):
        torch.manual_seed(0)
        found = _built(found, arguments)
    for name, parameter in found.named_parameters():
        if name.endswith("sinks"):  # left uninitialised by the constructor
            nn.init.normal_(parameter)
    model = hasattr(found, "base_model_prefix")
    return (TransformersModel(found) if model else TransformersAttention(found)).eval()


def _built(made_by: type, arguments: Mapping[str, Any]) -> Any:
    one = {"num_hidden_layers": 1} if hasattr(made_by, "base_model_prefix") else {}
    sizes = {**TINY, **one, **(LATENT if "Deepseek" in made_by.__name__ else {}), **arguments}
    config = called(_config_class(made_by), **sizes)
    config._attn_implementation = sizes.get("attn_implementation", "eager")
    names = parameters_of(made_by)
    layer = {"layer_idx": 0} if "layer_idx" in names else {}
    return called(made_by, config, **layer)


def _config_class(made_by: Any) -> Any:
    given = getattr(made_by, "config_class", None)
    if isinstance(given, type):
        return given
    home = importlib.import_module(made_by.__module__)
    names = [n for n in dir(home) if n.endswith("Config") and made_by.__name__.startswith(n[:-6])]
    if not names:
        raise SubjectError(f"{made_by.__module__} has no configuration for {made_by.__name__}")
    return getattr(home, max(names, key=len))


def model_folder(path: Path) -> nn.Module:
    """The model in a folder; nothing is downloaded, and no code or pickle in the folder is run.

    Raises:
        SubjectError: if transformers is missing, or cannot read the folder.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise SubjectError(
            "a folder is read by transformers, which is missing: python -m pip install "
            "'regard-verify[hf]'"
        ) from error
    local = {"local_files_only": True, "trust_remote_code": False}
    config = called(AutoConfig.from_pretrained, path, **local)
    named = [getattr(sys.modules["transformers"], n, None) for n in config.architectures or ()]
    made_by = next(filter(None, named), AutoModelForCausalLM)
    model = called(
        made_by.from_pretrained, path, **local, use_safetensors=True, dtype=torch.float32
    )
    return transformers_module(model, {})


def neutral(module: nn.Module) -> nn.Module:
    """The module without rotation, where that is possible, with the same weights."""
    if not hasattr(module, "rotating"):
        return module
    twin: Any = copy.copy(module)  # shares the children
    twin.rotating = False
    return cast(nn.Module, twin)
