"""Text from a prompt, with its time and memory: what `regard generate` shows."""

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from regard.hf.generating.cache_of_model import cache as cache_for
from regard.hf.packages import require
from regard.hf.running.installing import install, uninstall
from regard.hf.running.registering import register
from regard.ops.observed import backends_run, names
from regard.words import counted

ATTENTIONS = ("regard", "interface", "transformers")
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "growing": ("growing", {}),
    "static": ("static", {}),
    "sliding": ("sliding", {}),
    "int8": ("quantized", {"bits": 8}),
    "int4": ("quantized", {"bits": 4, "group": 32}),
}
OTHERS = "transformers"


@dataclass(frozen=True)
class Written:
    """A text, its time and memory, and the backends that ran: regard's, or transformers' own.

    `peak_memory` is that of the whole process so far, in bytes.
    """

    attention: str
    cache: str
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    cache_bytes: int
    peak_memory: int
    prefill_backend: str
    decode_backend: str

    def __str__(self) -> str:
        decode = f"{len(self.tokens):,} at {self.decode_tokens_per_second:,.1f}/s"
        if self.decode_backend:  # empty if no token was decoded after the prompt
            decode = f"{decode} on {self.decode_backend}"
        return (
            f"{self.attention}, {self.cache} cache: prefill {counted(self.prompt_tokens, 'token')} "
            f"at {self.prefill_tokens_per_second:,.0f}/s on {self.prefill_backend}, decode {decode}"
            f", cache {_size(self.cache_bytes)}, peak memory {_size(self.peak_memory)}"
        )


def write(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    attention: Literal["regard", "interface", "transformers"] = "regard",
    cache: str = "growing",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    chat: bool = False,
    shown: Callable[[str], object] = lambda text: None,
) -> Written:
    """Continue a prompt with a model, which is restored afterwards.

    Args:
        model: a transformers model that generates, and its tokenizer.
        tokenizer: as `regard.hf.load` returns it.
        prompt: what to continue, or to answer if `chat`.
        attention: `"regard"` installs, `"interface"` registers, `"transformers"` does neither.
        cache: `"growing"`, `"static"`, `"sliding"`, `"int8"`, `"int4"` or `"transformers"`.
        max_new_tokens: when to stop, unless the model ends earlier.
        temperature: 0 for the most likely token at each step.
        chat: whether to put the prompt into the tokenizer's chat template.
        shown: called with every piece of text when it is generated.

    Raises:
        ValueError: if the model does not generate, there is no tokenizer, the prompt is empty, or
            a name is not one of those above.
    """
    require("transformers")
    _check(model, tokenizer, attention, cache)
    inputs = _encoded(tokenizer, prompt, chat).to(model.device)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise ValueError("the prompt is empty; give at least one token")
    store = _cache(model, cache, length + max_new_tokens)
    options: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": max_new_tokens}
    if temperature > 0:
        options["temperature"] = temperature
    with _attention_of(model, attention), backends_run() as ran:
        clock = _clock(tokenizer, shown, ran)
        started = time.perf_counter()
        out = model.generate(
            **inputs, past_key_values=store, streamer=clock, disable_compile=True, **options
        )
    tokens = out[0] if model.config.is_encoder_decoder else out[0, length:]
    first, last = clock.times[0], clock.times[-1]
    steps = len(clock.times) - 1
    own = model.config._attn_implementation if attention == OTHERS else ""
    return Written(
        attention,
        cache,
        tokenizer.decode(tokens, skip_special_tokens=True),
        tuple(tokens.tolist()),
        length,
        length / (first - started),
        steps / (last - first) if steps else 0.0,
        _bytes(store),
        _peak(model.device),
        names(clock.prefill) or own,
        names(ran - clock.prefill) or (own if steps else ""),
    )


@contextmanager
def _attention_of(model: Any, attention: str) -> Iterator[None]:
    """The model with the chosen attention, inside of the `with` block."""
    before = model.config._attn_implementation
    if attention == "regard":
        install(model)
    elif attention == "interface":
        model.set_attn_implementation(register())
    try:
        yield
    finally:
        if attention == "regard":
            uninstall(model)
        elif attention == "interface":
            model.set_attn_implementation(before)


def _check(model: Any, tokenizer: Any, attention: str, cache: str) -> None:
    if not getattr(model, "can_generate", lambda: False)():
        raise ValueError(f"{type(model).__name__} does not generate text; give a model that does")
    if tokenizer is None:
        raise ValueError(f"{type(model).__name__} has no tokenizer, which a prompt needs")
    if attention not in ATTENTIONS:
        raise ValueError(f"attention={attention!r} is not one of {', '.join(ATTENTIONS)}")
    if cache not in (*CACHES, OTHERS):
        raise ValueError(f"cache={cache!r} is not one of {', '.join((*CACHES, OTHERS))}")


def _encoded(tokenizer: Any, prompt: str, chat: bool) -> Any:
    if not chat:
        return tokenizer(prompt, return_tensors="pt")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("this tokenizer has no chat template; leave out chat")
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def _cache(model: Any, name: str, length: int) -> Any:
    if name == OTHERS:
        from transformers import DynamicCache, EncoderDecoderCache

        own = DynamicCache(config=model.config.get_text_config(decoder=True))
        pair = model.config.is_encoder_decoder
        return EncoderDecoderCache(own, DynamicCache()) if pair else own
    kind, options = CACHES[name]
    if kind == "static":
        options = {"max_length": length}
    return cache_for(model, kind, **options)


def _clock(tokenizer: Any, shown: Callable[[str], object], ran: Counter[str]) -> Any:
    """A streamer that shows text, and records each token's time and the backends of prefill."""
    from transformers import TextStreamer

    class Clock(TextStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times: list[float] = []
            self.prefill: Counter[str] = Counter()

        def put(self, value: Tensor) -> None:
            if not self.next_tokens_are_prompt:
                self.prefill = self.prefill or ran.copy()
                self.times.append(time.perf_counter())
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            shown(text)

    return Clock()


def _bytes(store: Any) -> int:
    """Bytes that a cache of regard or of transformers holds, with its cross-attention part."""
    if hasattr(store, "cross_attention_cache"):
        return _bytes(store.self_attention_cache) + _bytes(store.cross_attention_cache)
    if hasattr(store, "nbytes"):
        held: int = store.nbytes
        return held
    tensors = [t for layer in store.layers for t in (layer.keys, layer.values) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _size(count: int | float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
