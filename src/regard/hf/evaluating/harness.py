"""A model type for lm-evaluation-harness that scores through decoding, from any cache of regard.

    python -m regard.hf.evaluating.harness --model regard \\
        --model_args pretrained=path/to/model,cache=k8v4 --tasks my_task

The harness itself scores a continuation by one full forward, which reads no cache: with it, a cache
of 4 bits and one of 16 have the same score. Here the context is prefilled into a cache, and the
continuation is decoded from it, one token at a time.
"""

import logging
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

import regard.hf
from regard.hf.evaluating.scoring import score
from regard.hf.generating.watching import argument_of

Request = tuple[tuple[str, str], list[int], list[int]]  # texts, context tokens, continuation tokens


@register_model("regard")
class RegardLM(HFLM):  # type: ignore[misc]  # the harness has no types
    """A causal model with regard installed, whose keys and values are in a cache of one kind.

    Args:
        pretrained: a folder of transformers or of `regard convert`, or a GGUF file.
        cache: a kind of `regard.hf.cache`, such as `"growing"`, `"int8"` or `"k8v4"`.
        dtype: of the weights.
        device: of the model. The harness asks for "cuda" by itself; where there is none, the CPU
            is used, and the log says so.
        **options: of the harness's class `HFLM`, such as `max_length` and `add_bos_token`.
    """

    def __init__(
        self,
        pretrained: str,
        cache: str = "growing",
        dtype: str = "float32",
        device: str | None = None,
        **options: Any,
    ) -> None:
        where = _present(device)
        model, tokenizer = regard.hf.load(pretrained, dtype=getattr(torch, dtype), device=where)
        if tokenizer is None:
            raise ValueError(f"{pretrained} has no tokenizer, which the texts of a task need")
        regard.hf.install(model)
        super().__init__(pretrained=model, tokenizer=tokenizer, **options)
        self.cache_kind = cache

    def new_cache(self) -> Any:
        """An empty cache for one text or batch."""
        return regard.hf.cache(self.model, self.cache_kind)

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        scores = []
        for texts, context, continuation in tqdm(requests, disable=disable_tqdm):
            found = score(
                self.model, self.new_cache, context, continuation, max_length=self.max_length
            )
            scores.append((found.log_probability, found.is_greedy))
            self.cache_hook.add_partial("loglikelihood", texts, scores[-1])
        return scores

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any
    ) -> torch.Tensor:
        options |= argument_of(self.model, self.new_cache())
        return super()._model_generate(context, max_length, stop, **options)


def _present(device: str | None) -> str:
    """The device that is asked for, or the CPU where CUDA is asked for and absent."""
    if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
        logging.getLogger("regard").warning("device=%s is not here: the CPU is used", device)
        return "cpu"
    return device


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
