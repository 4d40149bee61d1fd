"""Text from a prompt, with its time and memory: what `regard generate` shows."""

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from regard.cache.streams import check_whole
from regard.hf.generating.cache_of_model import cache as cache_for
from regard.hf.generating.cache_of_model import paired
from regard.hf.generating.watching import argument_of
from regard.hf.packages import require
from regard.hf.running.binding import is_changed
from regard.hf.running.installing import install, uninstall
from regard.hf.running.registering import NAME, register
from regard.names import CACHES
from regard.ops.observed import backends_run, names
from regard.turns import Ratio
from regard.words import counted, one_of

ATTENTIONS = ("regard", "interface", "transformers")
OTHERS = "transformers"
WARM_UP = 64  # tokens of the prompt at most that are read before anything is timed


@dataclass(frozen=True)
class Written:
    """A generated text, its time and memory, and the backends that ran; `str` of it is for reading.

    Attributes:
        attention: `"regard"`, `"interface"` or `"transformers"`.
        cache: the kind of cache.
        text: the text that was generated.
        tokens: its tokens.
        prompt_tokens: the number of tokens of the prompt.
        prefill_tokens_per_second: speed of reading the prompt, without the tokens that were found.
        decode_tokens_per_second: the median speed of the tokens after the second: the step before
            it is the first, which may compile and allocate.
        cache_bytes: bytes that the cache holds at the end.
        peak_memory: of the whole process so far, in bytes.
        prefill_backend: the backends of the prefill: regard's, or transformers' own.
        decode_backend: the backends of the decoding steps; empty if there were none.
        prefix_tokens: the number of tokens of the prompt that were found in a pool of pages.
        seconds_to_first_token: from the call of `generate` to the first token.
        prefill_speed: the ratio to another run's, measured in turns; None if there is no other.
        decode_speed: the same of the tokens after the first.

    Examples:
        >>> from regard.hf import Written
        >>> written = Written("regard", "growing", "Paris.", (3, 4), 5, 900.0, 80.0, 2048, 1 << 30,
        ...     "sdpa", "fused")
        >>> print(str(written).partition(", cache 2")[0])
        regard, growing cache: prefill 5 tokens at 900/s on sdpa, decode 2 at 80.0/s on fused
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
    prefix_tokens: int = 0
    seconds_to_first_token: float = 0.0
    prefill_speed: Ratio | None = None
    decode_speed: Ratio | None = None

    def __str__(self) -> str:
        found = f", {self.prefix_tokens:,} of them found," if self.prefix_tokens else ""
        first, speed = self.seconds_to_first_token, self.decode_tokens_per_second
        after = f"first token after {first:.2f} s, " if first else ""
        per_second = f" at {speed:,.1f}/s" if speed else ""
        backend = f" on {self.decode_backend}" if self.decode_backend else ""  # no token after one
        peak = f", peak memory {_size(self.peak_memory)}" if self.peak_memory else ""
        return (
            f"{self.attention}, {self.cache} cache: prefill {counted(self.prompt_tokens, 'token')}"
            f"{found} at {self.prefill_tokens_per_second:,.0f}/s on {self.prefill_backend}, {after}"
            f"decode {len(self.tokens):,}{per_second}{backend}, cache {_size(self.cache_bytes)}"
            f"{peak}"
        )


def write(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    attention: Literal["regard", "interface", "transformers"] = "regard",
    cache: str = "auto",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    chat: bool = False,
    format: str = "plain",
    pool: Any = None,
    warm_up: bool = True,
    shown: Callable[[str], object] = lambda text: None,
) -> Written:
    """Continue a prompt with a model, which is restored afterwards.

    Args:
        model: a transformers model that generates.
        tokenizer: its tokenizer, as `regard.hf.load` returns it.
        prompt: what to continue, or to answer if `chat`.
        attention: `"regard"` installs, unless the model has regard already, `"interface"`
            registers, `"transformers"` does neither.
        cache: a name of `regard.hf.cache`, as `"auto"`, `"growing"`, `"int8"` or `"paged"`;
            or `"transformers"`.
        max_new_tokens: when to stop, unless the model ends earlier.
        temperature: 0 for the most likely token at each step.
        chat: whether to put the prompt into the tokenizer's chat template.
        format: of the pages of a `"paged"` cache without `pool`, such as `"K8V4"`.
        pool: a `PagePool` for a `"paged"` cache, which finds in it what earlier prompts had in
            common with this one.
        warm_up: whether a short text is generated first, which is neither shown nor timed: first
            calls in a process compile.
        shown: called with every piece of text when it is generated.

    Raises:
        ValueError: if the model does not generate, there is no tokenizer, the prompt is empty, or
            a name is not one of those above; if regard is in the model and `attention` is another.

    Examples:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        >>> from regard.hf import write
        >>> words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "rose": 2, "is": 3}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=4,
        ...     num_hidden_layers=1, intermediate_size=16, eos_token_id=None, pad_token_id=0)
        >>> model = LlamaForCausalLM(config)
        >>> written = write(model, tokenizer, "a rose is", cache="int8", max_new_tokens=4)
        >>> written.prompt_tokens, len(written.tokens)
        (3, 4)
    """
    require("transformers")
    _check(model, tokenizer, attention)
    _check_values(prompt, cache, max_new_tokens, temperature)
    cache = cache_name(cache)
    _check_pages(cache, format, pool)
    inputs = _encoded(tokenizer, prompt, chat).to(model.device)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise ValueError("the prompt is empty; give at least one token")
    if warm_up:  # what compiles has compiled after three tokens
        few = {name: each[:, -WARM_UP:] for name, each in inputs.items()}
        form = format if pool is None else pool.format.name
        with with_attention(model, attention):
            _generated(model, few, _cache(model, cache, WARM_UP + 3, form, None), 3)
    store = _cache(model, cache, length + max_new_tokens, format, pool)
    with with_attention(model, attention), backends_run() as ran:
        clock = _clock(tokenizer, shown, ran)
        started = time.perf_counter()
        out = _generated(model, inputs, store, max_new_tokens, temperature, streamer=clock)
    tokens = out[0] if model.config.is_encoder_decoder else out[0, length:]
    first = clock.times[0]
    found: int = getattr(getattr(store, "self_attention_cache", store), "found", 0)
    steps = [after - before for before, after in pairwise(clock.times)]
    steps = steps[1:] or steps  # without the first, which may compile and allocate
    own = model.config._attn_implementation if attention == OTHERS else ""
    return Written(
        attention,
        cache,
        tokenizer.decode(tokens, skip_special_tokens=True),
        tuple(tokens.tolist()),
        length,
        (length - found) / (first - started),
        1 / statistics.median(steps) if steps else 0.0,
        _bytes(store),
        _peak(model.device),
        names(clock.prefill) or own,
        names(ran - clock.prefill) or (own if steps else ""),
        found,
        first - started,
    )


def _generated(
    model: Any, inputs: Any, store: Any, count: int, temperature: float = 0.0, **options: Any
) -> Tensor:
    """The tokens that the model generates after the inputs, with a cache."""
    options |= {"do_sample": temperature > 0, "max_new_tokens": count, "disable_compile": True}
    if temperature > 0:
        options["temperature"] = temperature
    out: Tensor = model.generate(**inputs, **argument_of(model, store), **options)
    return out


def cache_name(name: str) -> str:
    """The name of a cache for `write`, as lists have it. Raises a ValueError if it is none."""
    require("transformers")
    return one_of("cache", name, (*CACHES, OTHERS))


@contextmanager
def with_attention(model: Any, attention: str) -> Iterator[None]:
    """The model with the attention of that name, inside of the `with` block."""
    before = model.config._attn_implementation
    if installs := attention == "regard" and not is_changed(model):
        install(model)
    elif attention == "interface":
        model.set_attn_implementation(register())
    try:
        yield
    finally:
        if installs:
            uninstall(model)
        elif attention == "interface":
            model.set_attn_implementation(before)


def _check(model: Any, tokenizer: Any, attention: str) -> None:
    if not getattr(model, "can_generate", lambda: False)():
        raise ValueError(f"{type(model).__name__} does not generate text; give a model that does")
    if tokenizer is None:
        raise ValueError(f"{type(model).__name__} has no tokenizer, which a prompt needs")
    if attention not in ATTENTIONS:
        raise ValueError(f"attention={attention!r} is not one of {', '.join(ATTENTIONS)}")
    named = attention == OTHERS and model.config._attn_implementation == NAME
    if attention != "regard" and (named or is_changed(model)):
        raise ValueError(
            f"attention={attention!r} does not run while regard is in the model; call regard.hf."
            'uninstall(model) and set_attn_implementation("sdpa"), or give attention="regard"'
        )


def _check_values(prompt: Any, cache: Any, max_new_tokens: Any, temperature: Any) -> None:
    for name, value in (("prompt", prompt), ("cache", cache)):
        if not isinstance(value, str):
            raise TypeError(f"{name} is text, got {value!r:.80}")
    check_whole("max_new_tokens", max_new_tokens, least=1)
    number = isinstance(temperature, int | float)  # logits divided by less than 1e-6 overflow
    if not number or not (temperature == 0 or 1e-6 <= temperature < math.inf):
        raise ValueError(f"temperature is 0, or a number from 1e-6 on, got {temperature!r}")


def _check_pages(cache: str, format: str, pool: Any) -> None:
    if cache != "paged" and (format != "plain" or pool is not None):
        given = f"format={format!r}" if pool is None else f"pool={pool!r}"
        raise ValueError(f"{given} is of pages, got cache={cache!r}; give cache='paged'")
    if pool is not None:
        from regard.hf.generating.pool_of_model import check_pool

        check_pool(pool, None if format == "plain" else format)


def _encoded(tokenizer: Any, prompt: str, chat: bool) -> Any:
    if not chat:
        return tokenizer(prompt, return_tensors="pt")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("this tokenizer has no chat template; leave out chat")
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def _cache(model: Any, name: str, length: int, format: str, pool: Any) -> Any:
    if name == OTHERS:
        from transformers import DynamicCache

        return paired(model, DynamicCache(config=model.config.get_text_config(decoder=True)))
    options: dict[str, Any] = {}
    if name == "static":
        options = {"max_length": length}
    if name == "paged":
        options = {"format": format} if pool is None else {"pool": pool}
    return cache_for(model, name, **options)


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
    try:
        import resource
    except ModuleNotFoundError:  # on Windows: 0 is unknown
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _size(count: int | float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
