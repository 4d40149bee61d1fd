"""Mean and covariance of the queries of a model's layers over text, from those of their inputs."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.convert.linear import weight_and_bias
from regard.convert.lossy.calibrate import input_moments
from regard.hf import attention_modules, attention_of
from regard.layers.attention import Attention
from regard.sparse import QueryMoments


@torch.no_grad()
def query_moments(model: Any, windows: Int[Tensor, "N L"]) -> list[QueryMoments]:
    """The moments of the queries of each attention layer, before rotation.

    Queries are a linear map of the layer's inputs, so that the mean and covariance of the inputs,
    which calibration gathers, are enough.

    Args:
        model: a causal language model of transformers.
        windows: tokens of calibration text, as `regard.convert.windows_of` makes them.

    Raises:
        ValueError: if regard does not support the model's attention, the model has no embedding of
            a token, or the queries of a layer are not such a map: they are normed, or of a latent.

    Examples:
        >>> import regard.hf, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.convert import query_moments
        >>> from regard.sparse import ExpectedAttention
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=2, intermediate_size=16)
        >>> model = LlamaForCausalLM(config).eval()
        >>> moments = query_moments(model, torch.randint(20, (2, 8)))
        >>> scores = [ExpectedAttention(each) for each in moments]  # one for each layer
        >>> cache = regard.hf.cache(model, "evicting", budget=64, score=scores)
        >>> moments[0].mean.shape
        torch.Size([2, 8])
    """
    layers = [attention_of(module) for module in attention_modules(model).values()]
    for layer in layers:
        if type(layer) is not Attention or layer.q_norm is not None:
            raise ValueError(
                "the queries of a layer are a linear map of its inputs, got normed or latent ones "
                f"of {layer.kind}; use ExpectedAttention() without moments, which reads the "
                "queries of the text itself"
            )
    found = []
    for layer, moments in zip(layers, input_moments(model, windows), strict=True):
        weight, bias = weight_and_bias(layer, "q_proj")
        heads = weight.double().unflatten(0, (layer.num_heads, layer.head_dim))
        assert moments.sum is not None
        mean = moments.sum / moments.tokens
        centred = moments.covariance - torch.outer(mean, mean)
        own = heads @ mean
        if bias is not None:
            own = own + bias.double().unflatten(0, (layer.num_heads, -1))
        covariance = heads @ centred @ heads.mT
        found.append(QueryMoments(own.float(), covariance.float(), layer.rope))
    return found
