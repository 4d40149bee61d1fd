"""What a student is told to do as its teacher does: layer by layer, or in its predictions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.hf.generating.predicting import AT_ONCE, hidden_states, logits_of


class Lesson(nn.Module):
    """A student beside its teacher; calling it gives the loss of one batch.

    One module, so that whatever wraps it for several devices sees every forward.

    Args:
        student: a transformers causal language model.
        teacher: the model that it was made of.
        pupils: the attention modules of the student, in order.
        masters: those of the teacher, as many.
        layer_weight: how much the layers' errors count beside the divergence of predictions.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        pupils: Sequence[nn.Module],
        masters: Sequence[nn.Module],
        *,
        layer_weight: float,
    ) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self._pupils, self._masters = tuple(pupils), tuple(masters)  # held by the models already
        self.layer_weight = layer_weight
        self._given: dict[torch.Size, list[dict[str, Any]]] = {}

    def forward(
        self, tokens: Int[Tensor, "B L"], chosen: Int[Tensor, " P"] | None
    ) -> Float[Tensor, ""]:
        """The loss: of each layer alone if nothing is `chosen`, else of the predictions at the
        `chosen` positions and of the layers in their places."""
        return self._align(tokens) if chosen is None else self._imitate(tokens, chosen)

    def _align(self, tokens: Tensor) -> Tensor:
        """Every pupil reads what its master read, and should put out what its master did."""
        with torch.no_grad(), watching(self._masters) as theirs:
            hidden_states(self.teacher, tokens)
        dtype = next(self.student.parameters()).dtype  # the teacher's may be narrower
        errors = [
            relative_error(_first(pupil(seen.read.to(dtype), **given)), seen.put_out)
            for pupil, given, seen in zip(
                self._pupils, self._arguments(tokens), theirs, strict=True
            )
        ]
        return torch.stack(errors).mean()

    def _imitate(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """The whole student reads, predicts, and is compared."""
        both = bool(self.layer_weight)
        with torch.no_grad(), watching(self._masters if both else ()) as theirs:
            wanted = hidden_states(self.teacher, tokens)
        with watching(self._pupils if both else ()) as ours:
            hidden = hidden_states(self.student, tokens)
        loss = divergence(self.student, hidden[:, chosen], self.teacher, wanted[:, chosen])
        if not both:
            return loss
        pairs = zip(ours, theirs, strict=True)
        errors = [relative_error(mine.put_out, its.put_out) for mine, its in pairs]
        return loss + self.layer_weight * torch.stack(errors).mean()

    @torch.no_grad()
    def _arguments(self, tokens: Tensor) -> list[dict[str, Any]]:
        """What the student hands to each attention module besides hidden states: positions and
        masks, which depend on the batch's shape alone."""
        if tokens.shape not in self._given:
            with watching(self._pupils) as seen:
                hidden_states(self.student, tokens)
            self._given[tokens.shape] = [each.given for each in seen]
        return self._given[tokens.shape]


class Seen(NamedTuple):
    """One call of an attention module: what it read, what else it was given, what it put out."""

    read: Tensor
    given: dict[str, Any]
    put_out: Tensor


@contextmanager
def watching(modules: Sequence[nn.Module]) -> Iterator[list[Seen]]:
    """Note the calls of these modules, in the order in which they end."""
    seen: list[Seen] = []

    def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:
        rest = {name: value for name, value in named.items() if name != "hidden_states"}
        seen.append(Seen(given[0] if given else named["hidden_states"], rest, _first(out)))

    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _first(out: Any) -> Tensor:
    """Modules of transformers return weights as well, layers of regard one tensor."""
    tensor: Tensor = out[0] if isinstance(out, tuple) else out
    return tensor


def relative_error(
    ours: Float[Tensor, "*shape"], theirs: Float[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """The energy of the difference, as a share of theirs.

    >>> relative_error(torch.tensor([3.0, 1.0]), torch.tensor([3.0, 0.0])).item()
    0.1111111119389534
    """
    theirs = theirs.float()
    return (ours.float() - theirs).square().sum() / theirs.square().sum()


def divergence(
    student: Any,
    hidden: Float[Tensor, "B P E"],
    teacher: Any,
    wanted: Float[Tensor, "B P E"],
) -> Float[Tensor, ""]:
    """`KL(teacher || student)` over the whole vocabulary, in nats a token.

    Logits are made for a few tokens at a time, and so is the gradient of each few: memory does
    not grow with the tokens. The head itself is not taught.
    """
    rows, targets = hidden.flatten(0, 1), wanted.flatten(0, 1)
    pieces = zip(rows.split(AT_ONCE), targets.split(AT_ONCE), strict=True)
    parts = [_piece(student, row, teacher, target) for row, target in pieces]
    value = torch.stack([part[0] for part in parts]).sum() / len(rows)
    slope = torch.cat([part[1] for part in parts]) / len(rows)
    linear = (rows.float() * slope).sum()  # has the same gradient as the value
    return value + linear - linear.detach()


def _piece(student: Any, rows: Tensor, teacher: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed divergence of some tokens, and its gradient with respect to their rows."""
    with torch.no_grad():
        wanted = F.log_softmax(logits_of(teacher, targets).float(), dim=-1)
    with torch.enable_grad():
        leaf = rows.detach().requires_grad_()
        predicted = F.log_softmax(logits_of(student, leaf).float(), dim=-1)
        value = F.kl_div(predicted, wanted, reduction="sum", log_target=True)
        if not rows.requires_grad:
            return value.detach(), torch.zeros_like(rows, dtype=torch.float32)
        (slope,) = torch.autograd.grad(value, leaf)
    return value.detach(), slope.float()
