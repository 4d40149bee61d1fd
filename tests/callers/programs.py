"""What is called: `attend` or a layer as one module, beside its plain definition.

A program is made anew for every cell. Its numbers are those of bfloat16 whatever its dtype, so that
autocast rounds what is computed from them and not what it is given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

import regard
from callers import definition
from callers.definition import Leaves
from regard import EVERYTHING, NO_CACHE, Mask, Span

Keep = Tensor  # True where a query may attend to a key; broadcasts to [B, H, L, S]


@dataclass(frozen=True)
class Sizes:
    """q `[B, H, L, D]` at the last L of S slots; k `[B, G, S, D]`, v `[B, G, S, Dv]`."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int = 16

    def span(self) -> Span:
        return Span(self.keys - self.queries, self.keys, 0, self.keys)

    def slots(self) -> tuple[Tensor, Tensor]:
        """Query and key slots, as a column and a row."""
        keys = torch.arange(self.keys, device="cpu")
        return keys[self.keys - self.queries :, None], keys


@dataclass(frozen=True)
class Rule:
    """A mask of the library beside the same as a tensor that is made without it, and its data."""

    make: Callable[[Tensor], Mask]
    keep: Callable[[Sizes, Tensor], Keep]
    data: Callable[[Sizes], Tensor] | None = None  # None for a rule that holds none

    def data_for(self, sizes: Sizes) -> Tensor:
        """The data, or a tensor that is not read."""
        return torch.empty(0, device="cpu") if self.data is None else self.data(sizes)


class Program(nn.Module):
    """A call of `forward(*inputs)`; `define` is the same of any leaves, without the library.

    Leaves are inputs and parameters by name. `settled` is the length that the cache must have if
    the call under way fails; None without a cache.
    """

    exact = True  # False where codes of a few bits are held
    cache: object = NO_CACHE
    settled: int | None = None
    rule: Rule  # of the call's mask
    sizes: Sizes

    def __init__(self, dtype: torch.dtype, inputs: Leaves) -> None:
        super().__init__()
        self.dtype = dtype
        self.named_inputs = inputs

    def mask_by(self, data: Tensor) -> None:
        """Make the call's mask of this data."""
        self.data, self.mask = data, self.rule.make(data)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(self.named_inputs.values())

    def leaves(self) -> Leaves:
        return {**self.named_inputs, **dict(self.named_parameters())}

    def keep_of(self, data: Tensor) -> Keep:
        """What a mask of this data shows, by the definition."""
        return self.rule.keep(self.sizes, data)

    def functional(self, leaves: Leaves) -> Tensor:
        """The same call, of these leaves."""
        named = dict(leaves)
        inputs = [named.pop(name) for name in self.named_inputs]
        return torch.func.functional_call(self, named, tuple(inputs))

    def define(self, leaves: Leaves) -> Tensor:
        """What the call gives, by the definition, in the dtype of the leaves."""
        raise NotImplementedError

    def bound(self, leaves: Leaves, dtype: torch.dtype) -> float | None:
        """What the numeric contract allows the output in `dtype`; None where it names a rival."""
        return None


def drawn(*shape: int, seed: int, dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    """Normal numbers that bfloat16 holds."""
    generator = torch.Generator("cpu").manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return (numbers * spread).to(torch.bfloat16).to(dtype)


@dataclass(frozen=True)
class Attend:
    """One row of the table of calls of `attend`."""

    sizes: Sizes
    rule: Rule
    backend: str = "auto"
    dtype: torch.dtype = torch.float32
    precision: str = "strict"
    given: dict = field(default_factory=dict)  # scale, softcap
    bias: tuple[int, int, int, int] | None = None  # the shape of a tensor
    bias_dtype: torch.dtype | None = None
    bias_rule: str | None = None
    sinks: bool = False
    parts: bool = False  # attend_partial over halves of the keys, merged

    @property
    def numbers(self) -> int:
        """Of all queries or all keys, whichever are more."""
        s = self.sizes
        return s.batch * s.dim * max(s.heads * s.queries, s.kv_heads * s.keys)

    def build(self, seed: int = 0) -> "AttendProgram":
        return AttendProgram(self, seed)


class AttendProgram(Program):
    def __init__(self, row: Attend, seed: int) -> None:
        s, dtype = row.sizes, row.dtype
        inputs = {
            "q": drawn(s.batch, s.heads, s.queries, s.dim, seed=4 * seed, dtype=dtype, spread=4.0),
            "k": drawn(s.batch, s.kv_heads, s.keys, s.dim, seed=4 * seed + 1, dtype=dtype),
            "v": drawn(s.batch, s.kv_heads, s.keys, s.dim, seed=4 * seed + 2, dtype=dtype),
        }
        if row.bias is not None:
            inputs["bias"] = drawn(*row.bias, seed=4 * seed + 3, dtype=row.bias_dtype or dtype)
        if row.sinks:
            inputs["sinks"] = drawn(s.heads, seed=5 + seed, dtype=dtype)
        super().__init__(dtype, inputs)
        self.row, self.rule, self.sizes = row, row.rule, s
        self.mask_by(row.rule.data_for(s))
        self.keep = self.keep_of(self.data)
        self.slopes = [2.0**-i for i in range(1, s.heads + 1)]
        self.bias_rule = None
        if row.bias_rule == "alibi":
            self.bias_rule = regard.Alibi(self.slopes)
        if row.bias_rule == "relative":
            self.bias_rule = relative_bias(s.heads, seed, dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        given = dict(zip(list(self.named_inputs)[3:], extra, strict=True))
        bias = given.get("bias", self.bias_rule)
        options = {"score_bias": bias, "backend": self.row.backend, **self.row.given}
        if self.row.parts:
            return self.merged(q, k, v, **options)
        return regard.attend(
            q,
            k,
            v,
            mask=self.mask,
            span=self.row.sizes.span(),
            sinks=given.get("sinks"),
            precision=self.row.precision,
            **options,
        )

    def merged(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        """Attention over each half of the keys, and their merge."""
        s, half = self.row.sizes, self.row.sizes.keys // 2
        parts = []
        for start, stop in ((0, half), (half, s.keys)):
            span = Span(s.keys - s.queries, s.keys, start, stop)
            keys, values = k[:, :, start:stop], v[:, :, start:stop]
            part = regard.attend_partial(q, keys, values, mask=self.mask, span=span, **options)
            parts.append(part)
        return regard.merge(*parts).out.to(q.dtype)

    def define(self, leaves: Leaves) -> Tensor:
        q, k, v = (leaves[name] for name in "qkv")
        if self.row.parts:
            return definition.attention_in_halves(q, k, v, keep=self.keep)
        options = {"bias": self.bias(leaves), **self.row.given}
        return definition.attention(q, k, v, keep=self.keep, sinks=leaves.get("sinks"), **options)

    def bound(self, leaves: Leaves, dtype: torch.dtype) -> float:
        """1.5 u vmax in half precision, 2 u vmax (1 + S) otherwise and for precision="fast"."""
        unit = torch.finfo(dtype).eps / 2
        top = leaves["v"].abs().max().item() if leaves["v"].numel() else 0.0
        if dtype.itemsize < 4 and self.row.precision == "strict":
            return 1.5 * unit * top
        q, k, scale = leaves["q"], leaves["k"], self.row.given.get("scale")
        if not (q.numel() and k.numel()):
            return 0.0
        bias = self.bias(leaves)
        largest = definition.largest_score(q, k, keep=self.keep, scale=scale, bias=bias)
        return 2 * unit * top * (1 + largest)

    def bias(self, leaves: Leaves) -> Tensor | None:
        """What is added to the scores, by the definition."""
        slots, keys = self.row.sizes.slots()[0].flatten(), self.row.sizes.keys
        if self.row.bias_rule == "alibi":
            slopes = torch.tensor(self.slopes, dtype=leaves["q"].dtype)
            return definition.alibi(slopes, slots, keys)
        if self.row.bias_rule == "relative":
            weight = leaves["bias_rule.relative_attention_bias.weight"]
            return definition.relative(weight, slots, keys)
        return leaves.get("bias")


def relative_bias(heads: int, seed: int, dtype: torch.dtype) -> nn.Module:
    """T5's rule, with more near buckets than any call has distances."""
    rule = regard.RelativeBias(heads, num_buckets=96, max_distance=200, bidirectional=False)
    weight = drawn(96, heads, seed=6 + seed, dtype=dtype)
    rule.relative_attention_bias.weight = nn.Parameter(weight)
    return rule


@dataclass(frozen=True)
class Layer:
    """One row of the table of calls of layers."""

    make: Callable[[], nn.Module]
    defined: Callable[..., Tensor]  # definition.layer and its like
    options: dict  # of `defined`
    pattern: Rule  # the layer's own mask
    rule: Rule = Rule(lambda data: EVERYTHING, lambda sizes, data: torch.tensor(True, device="cpu"))
    cache: Callable[[], object] | None = None
    dtype: torch.dtype = torch.float32
    context: int = 0  # tokens of another sequence
    memory: bool = False
    method: str = "forward"
    exact: bool = True
    width: int = 32
    batch: int = 2
    tokens: int = 7
    chunks: Sequence[int] = (3, 4, 5, 7)  # where the chunks end, with a cache

    @property
    def numbers(self) -> int:
        """Of the input."""
        return self.batch * self.tokens * self.width

    def build(self, seed: int = 0) -> "LayerProgram":
        return LayerProgram(self, seed)


class LayerProgram(Program):
    def __init__(self, row: Layer, seed: int) -> None:
        inputs = {"x": drawn(row.batch, row.tokens, row.width, seed=9 + seed, dtype=row.dtype)}
        if row.context:
            shape = (row.batch, row.context, row.width)
            inputs["context"] = drawn(*shape, seed=8 + seed, dtype=row.dtype)
        super().__init__(row.dtype, inputs)
        self.row, self.exact = row, row.exact
        self.layer = row.make().to(row.dtype).eval()
        numbers = {}
        for index, (name, parameter) in enumerate(self.layer.named_parameters()):
            weight = drawn(*parameter.shape, seed=100 * seed + index, dtype=row.dtype, spread=0.3)
            numbers[name] = weight + (1.0 if "norm" in name else 0.0)
        self.layer.load_state_dict(numbers, assign=True)
        self.call_by(self.layer)
        self.between = lambda cache: cache  # what becomes of the cache after each chunk
        self.rule = row.rule
        self.sizes = Sizes(row.batch, 4, 2, row.tokens, row.context or row.tokens)
        self.mask_by(row.rule.data_for(self.sizes))
        self.keep = self.keep_of(self.data)

    def keep_of(self, data: Tensor) -> Keep:
        """What the layer's own mask and that of the call show together."""
        pattern = self.row.pattern
        own = pattern.keep(self.sizes, pattern.data_for(self.sizes))
        return own & super().keep_of(data)

    def call_by(self, step: Callable[..., Tensor]) -> None:
        """What is called for each chunk: the layer, or what a caller makes of it."""
        object.__setattr__(self, "step", step)  # no child, although it may be a module

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self.row.cache is not None:
            return self.in_chunks(x)
        options = {"mask": self.mask}
        if context is not None:
            options["context"] = self.layer.remember(context) if self.row.memory else context
        if self.row.method == "forward":
            return self.step(x, **options)
        return getattr(self.layer, self.row.method)(x, **options)

    def in_chunks(self, x: Tensor) -> Tensor:
        """Through a fresh cache; what it must hold if a chunk fails is noted before each."""
        self.cache, outs = self.row.cache(), []
        for start, stop in pairwise((0, *self.row.chunks)):
            self.settled = start
            outs.append(self.step(x[:, start:stop], mask=self.mask, cache=self.cache))
            self.cache = self.between(self.cache)
        self.settled = self.row.chunks[-1]
        return torch.cat(outs, 1)

    def define(self, leaves: Leaves) -> Tensor:
        weights = {name.removeprefix("layer."): leaf for name, leaf in leaves.items()}
        inputs = [weights.pop(name) for name in self.named_inputs]
        return self.row.defined(weights, *inputs, keep=self.keep, **self.row.options)
