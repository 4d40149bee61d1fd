"""A family of models is a row of data: what its attention is called, and what it does."""

from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class Family:
    """How one of transformers' attention classes projects, norms and looks.

    All of these have `q_proj k_proj v_proj o_proj` and rotate halves by the model's own cosines.

    Args:
        attention: the class's name; its module says which model it belongs to.
        qk_norm: whether `q_norm` and `k_norm` norm each head before rotation.
        window: where the sliding window is written: on the attention module, in the config, or
            nowhere.
    """

    attention: str
    qk_norm: bool = False
    window: Literal["module", "config"] | None = None

    def window_of(self, module: nn.Module) -> int | None:
        """The sliding window of one attention module, or None."""
        if self.window is None:
            return None
        source = module if self.window == "module" else module.config
        size: int | None = getattr(source, "sliding_window", None)
        return size


FAMILIES = {
    family.attention: family
    for family in (
        Family("LlamaAttention"),
        Family("MistralAttention", window="config"),
        Family("Qwen2Attention", window="module"),
        Family("Qwen3Attention", qk_norm=True, window="module"),
    )
}


def family_of(module: nn.Module) -> Family | None:
    """The row for an attention module, by its type's own name: a subclass may do something else."""
    known = type(module).__module__.startswith("transformers.")
    return FAMILIES.get(type(module).__name__) if known else None
