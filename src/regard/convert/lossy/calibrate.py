"""Calibration: a model run block by block over text, and layers fitted to their inputs there.

A converted layer reads the outputs of the converted layers before it, which differ from the
model's own. So the hidden states of the model and of its conversion are both computed, block by
block: every layer is calibrated on the inputs it will have, and its output projection is fitted, in
closed form, so that the residual stream returns to the model's own. Two blocks in memory at a time
are enough, so a model larger than memory can be converted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.convert.linear import linear_of, weight_and_bias
from regard.convert.recording import Recorded, first, input_of, observing, recording
from regard.convert.texts import check_tokens
from regard.hf.families.finding import attention_modules
from regard.hf.running.binding import bound, calling, is_bound

CHANGED = 1e-2  # of what a block adds: rounding in half precision is less, a doubled output more
AT_ONCE = 4  # windows run at once, to bound the memory of an MLP's intermediate tensors
RIDGE = 0.1  # of the mean energy of a channel: penalty on changes of the output projection


@dataclass
class Moments:
    """The mean of `x x^T` and of `x` over the tokens added so far, as `watch` gathers them.

    Attributes:
        total: the sum of `x x^T`, in float64.
        sum: the sum of `x`.
        tokens: their number.

    Examples:
        >>> import torch
        >>> from regard.convert import Moments
        >>> moments = Moments()
        >>> moments.add(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        >>> moments.tokens, moments.covariance.tolist()
        (2, [[1.0, 1.0], [1.0, 2.0]])
    """

    total: Float[Tensor, "E E"] | None = None
    sum: Float[Tensor, " E"] | None = None
    tokens: int = 0

    def add(self, x: Float[Tensor, "... E"]) -> None:
        """Add these tokens; sums are in float64."""
        rows = x.detach().flatten(0, -2)
        product = (rows.mT @ rows).double()
        column = rows.double().sum(0)
        self.total = product if self.total is None else self.total + product
        self.sum = column if self.sum is None else self.sum + column
        self.tokens += rows.shape[0]

    @property
    def covariance(self) -> Float[Tensor, "E E"]:
        """`E[x x^T]`, float64, not centred.

        Raises:
            ValueError: if no token was added.
        """
        if self.total is None:
            raise ValueError("no token was added; run the model over some text inside watch()")
        return self.total / self.tokens

    @property
    def augmented(self) -> Float[Tensor, "E1 E1"]:
        """The same of inputs with a 1 appended, for projections with biases.

        Raises:
            ValueError: if no token was added.
        """
        inner = self.covariance
        assert self.sum is not None
        mean = self.sum / self.tokens
        one = torch.ones(1, 1).to(inner)
        return torch.cat(
            [torch.cat([inner, mean[:, None]], dim=1), torch.cat([mean[None], one], dim=1)]
        )


def moments_of(x: Float[Tensor, "N L E"]) -> Moments:
    """The moments of all tokens of some windows."""
    moments = Moments()
    for window in x:
        moments.add(window)
    return moments


@contextmanager
def watch(modules: Sequence[nn.Module]) -> Iterator[list[Moments]]:
    """Gather the moments of each module's inputs (its first argument, or `hidden_states`).

    Args:
        modules: any number; moments are gathered while they run inside the `with` block.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from regard.convert import watch
        >>> layer = nn.Linear(2, 2)
        >>> with watch([layer]) as moments:
        ...     _ = layer(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        >>> moments[0].covariance
        tensor([[1., 1.],
                [1., 2.]], dtype=torch.float64)
    """
    moments = [Moments() for _ in modules]

    def adding(own: Moments) -> Callable[[Recorded], None]:
        return lambda call: own.add(call.x)

    with observing(modules, [adding(each) for each in moments]):
        yield moments


def input_moments(model: Any, windows: Int[Tensor, "N L"]) -> list[Moments]:
    """The moments of the inputs of each attention module of a model over some text."""
    check_tokens(windows, model)
    with watch(list(attention_modules(model).values())) as moments:
        for window in windows:
            model.base_model(input_ids=window[None], use_cache=False)
    return moments


@dataclass(frozen=True)
class Step:
    """One layer to convert, as `walk` passes it to each function that converts.

    Attributes:
        index: of the layer.
        module: the model's attention module.
        x: the inputs that it will have behind the converted layers, `[N, L, hidden_size]`.
        target: the best outputs: with them the residual stream is the model's own again.
        own: the inputs that the module has in the model itself.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from regard.convert import Step
        >>> x = torch.ones(1, 4, 2)
        >>> step = Step(0, nn.Identity(), x, target=x, own=x)
        >>> step.moments.tokens
        4
    """

    index: int
    module: nn.Module
    x: Float[Tensor, "N L E"]
    target: Float[Tensor, "N L E"]
    own: Float[Tensor, "N L E"]

    @property
    def moments(self) -> Moments:
        """The moments of the layer's inputs."""
        return moments_of(self.x)


class Made(NamedTuple):
    """A layer, and its outputs over the inputs of its step, so that it need not run again."""

    layer: nn.Module
    out: Float[Tensor, "N L E"]


Make = Callable[[Step], nn.Module | Made]  # the layer that replaces an attention module


@torch.no_grad()
def walk(
    model: Any,
    windows: Int[Tensor, "N L"],
    makes: Sequence[Make],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[nn.Module]]:
    """For each of `makes`, a layer for every attention module of the model, which is not changed.

    A layer's inputs are those it has behind the layers that the same `make` returned before. The
    model's own forward pass is shared.

    Args:
        model: a causal language model of transformers whose blocks follow one another.
        windows: tokens of calibration text, all windows of one length.
        makes: each returns the layer for one `Step`, alone or with its outputs as `Made`; called
            block by block, in order.
        progress: called with the blocks done and their number.

    Raises:
        ValueError: if regard does not support the model's attention, or is installed in it.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from regard.convert import as_latent, walk
        >>> from regard.hf import attention_of
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, vocab_size=20,
        ...     num_hidden_layers=2, intermediate_size=16)
        >>> def make(step):
        ...     return as_latent(attention_of(step.module))
        >>> windows = torch.randint(20, (2, 8))
        >>> (latents,) = walk(LlamaForCausalLM(config).eval(), windows, [make])
        >>> [layer.kind for layer in latents]
        ['LatentKV', 'LatentKV']
    """
    blocks = attention_blocks(model)
    hidden, arguments = _beginning(model, blocks, windows)
    converted = [hidden for _ in makes]
    layers: list[list[nn.Module]] = [[] for _ in makes]
    for index, (block, module) in enumerate(blocks):
        progress(index, len(blocks))
        run = _Block(block, module, arguments[index])
        after, own, out = run.original(hidden)
        added = run.adds(hidden[:1], out[:1], after[:1])
        for which, make in enumerate(makes):
            mine = converted[which]
            target = out + (hidden - mine) if added else out
            made = make(Step(index, module, run.inputs(mine), target, own))
            if isinstance(made, Made):
                converted[which] = run.with_output(made.out, mine)
            else:
                converted[which] = run.with_layer(made, mine)
            layers[which].append(made.layer if isinstance(made, Made) else made)
        hidden = after
    progress(len(blocks), len(blocks))
    return layers


class _Block:
    """One block of a model and its attention, run over windows a few at a time."""

    def __init__(self, block: nn.Module, module: nn.Module, given: dict[str, Any]) -> None:
        self.block, self.module, self.given = block, module, given

    def original(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs of the block, and the inputs and outputs of its attention."""
        with recording([self.module]) as (calls,):
            after = self._run(hidden)
        return after, torch.cat([each.x for each in calls]), torch.cat([each.out for each in calls])

    def adds(self, hidden: Tensor, out: Tensor, after: Tensor) -> bool:
        """Whether the block adds the output of its attention, unchanged, to the residual stream.

        Gemma 2 and 3 and OLMo 2 norm it first. Then twice the output has the same effect, and the
        output cannot correct errors that the residual stream already has.
        """
        change = (self.with_output(2 * out, hidden) - after).double().norm()
        whole = (after - hidden).double().norm()
        return bool(change > CHANGED * whole)

    def with_output(self, out: Tensor, hidden: Tensor) -> Tensor:
        """The outputs of the block if its attention returns `out`."""
        parts = iter(out.split(AT_ONCE))
        with bound(self.module, lambda module, *args, **given: (next(parts), None)):
            return self._run(hidden)

    def inputs(self, hidden: Tensor) -> Tensor:
        """The inputs of the attention; nothing after it is run."""
        return torch.cat(
            [
                input_of(self.module, partial(self.block, part, **self.given))
                for part in hidden.split(AT_ONCE)
            ]
        )

    def with_layer(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """The outputs of the block with another attention."""
        with bound(self.module, calling(layer)):
            return self._run(hidden)

    def _run(self, hidden: Tensor) -> Tensor:
        outs = (self.block(part, **self.given) for part in hidden.split(AT_ONCE))
        return torch.cat([first(out) for out in outs])


def attention_blocks(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Every block and its attention, in order."""
    modules = attention_modules(model)
    if any(is_bound(module) for module in modules.values()):
        raise ValueError("regard is installed in this model; call regard.hf.uninstall first")
    return [
        (model.get_submodule(name.rpartition(".")[0]), module) for name, module in modules.items()
    ]


def _beginning(
    model: Any, blocks: Sequence[tuple[nn.Module, nn.Module]], windows: Tensor
) -> tuple[Tensor, list[dict[str, Any]]]:
    """The inputs of the first block, and the other arguments of each block for this length."""
    run = partial(model.base_model, use_cache=False)
    with recording([block for block, _ in blocks]) as calls:
        run(input_ids=windows[:1])
    hidden = [input_of(blocks[0][0], partial(run, input_ids=each[None])) for each in windows]
    return torch.cat(hidden), [call.given for (call,) in calls]


@torch.no_grad()
def refit_output(
    layer: nn.Module,
    x: Float[Tensor, "N L E"],
    target: Float[Tensor, "N L E"],
    *,
    ridge: float = RIDGE,
) -> tuple[float, float]:
    """Replace `layer.o_proj` by the projection whose outputs over `x` are nearest to `target`.

    Ridge regression towards its present weight, so that directions with little energy in the text
    change little.

    Args:
        layer: changed in place.
        x: its inputs over some text, `[N, L, hidden_size]`.
        target: the outputs that it should have.
        ridge: the penalty, as a share of the mean energy of a channel.

    Returns:
        The errors before and after, as shares of the target's energy.

    Examples:
        >>> import torch
        >>> from regard import Attention
        >>> from regard.convert import refit_output
        >>> layer, x = Attention(8, 2), torch.randn(2, 16, 8)
        >>> before, after = refit_output(layer, x, target=2 * layer(x))
        >>> round(before, 3), after < before
        (0.25, True)
    """
    before, after, _ = refitted(layer, x, target, ridge=ridge)
    return before, after


def refitted(
    layer: nn.Module,
    x: Float[Tensor, "N L E"],
    target: Float[Tensor, "N L E"],
    *,
    ridge: float = RIDGE,
) -> tuple[float, float, Float[Tensor, "N L M"]]:
    """As `refit_output`, and the inputs of `layer.o_proj` over `x`."""
    old, offset = weight_and_bias(layer, "o_proj")
    weight = old.double()
    gram = weight.new_zeros(weight.shape[1], weight.shape[1])
    cross, missed, whole = torch.zeros_like(weight), 0.0, 0.0
    inputs = []
    for window, wanted in zip(x, target, strict=True):
        with recording([layer.get_submodule("o_proj")]) as (calls,):
            error = wanted - layer(window[None])[0]
        merged = calls[0].x[0]
        inputs.append(merged)
        gram += (merged.mT @ merged).double()
        cross += (error.mT @ merged).double()
        missed += float(error.double().square().sum())
        whole += float(wanted.double().square().sum())
    gram.diagonal().add_(penalty := ridge * gram.diagonal().mean())
    change = torch.linalg.solve(gram, cross, left=False)
    layer.o_proj = linear_of((weight + change).to(old.dtype), offset)
    # The squared error falls by 2 <change, cross> - <change gram, change>, without the penalty.
    gained = (change * cross).sum() + penalty * change.square().sum()
    return missed / whole, (missed - float(gained)) / whole, torch.stack(inputs)
