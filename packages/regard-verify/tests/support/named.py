"""Subjects whose arguments have names as strangers choose them: all are right attentions."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


class Base(nn.Module):
    """Multi-head attention of `width` by three projections; key heads may be fewer."""

    def __init__(self, width, heads, key_heads=None, head_width=None, drop=0.0):
        super().__init__()
        key_heads = key_heads or heads
        assert heads % key_heads == 0
        self.heads, self.key_heads = heads, key_heads
        self.head_width = head_width or width // heads
        assert head_width or width % heads == 0
        self.q_proj = nn.Linear(width, heads * self.head_width, bias=False)
        self.k_proj = nn.Linear(width, key_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(width, key_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(heads * self.head_width, width, bias=False)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (y.repeat_interleave(self.heads // self.key_heads, 1) for y in (k, v))
        weights = self.drop((q @ k.mT * self.head_width**-0.5).softmax(-1))
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class HeadNum(Base):
    def __init__(self, dim_model, head_num, group_num, drop_prob):
        super().__init__(dim_model, head_num, group_num, drop=drop_prob)


class KeyValueHead(Base):
    def __init__(self, inputSize, num_head, num_key_value_head, use_flash: bool, max_len):
        assert use_flash is False
        super().__init__(inputSize, num_head, num_key_value_head)
        self.register_buffer("tril", torch.ones(max_len, max_len).tril())


class DimHead(Base):
    def __init__(self, dim, heads=8, dim_head=64, dropout=0.1):
        super().__init__(dim, heads, None, dim_head, dropout)


class TwelveHeads(Base):
    """The default of the heads does not divide the width that is guessed."""

    def __init__(self, features, n_head=12):
        super().__init__(features, n_head)


class Huge(Base):
    def __init__(self, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8):
        super().__init__(hidden_size, num_attention_heads, num_key_value_heads)


class Short(Base):
    """A default of 10 tokens is a limit, and no law."""

    def __init__(self, dim, heads, max_len=10):
        super().__init__(dim, heads)
        self.register_buffer("tril", torch.ones(max_len, max_len).tril())


class HandsOn(DimHead):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


@dataclass
class Rates:
    attn_drop: float = 0.1


@dataclass
class ModelArgs:
    n_embd: int
    n_heads: int = 32
    n_kv_heads: int | None = None
    vocab: int = -1
    block: int = 2048
    rates: Rates = field(default_factory=Rates)
    kind: str = "plain"


class Annotated(Base):
    def __init__(self, settings: ModelArgs, layer_number: int = 0):
        assert settings.kind == "plain"
        n_kv = settings.n_kv_heads or settings.n_heads
        super().__init__(settings.n_embd, settings.n_heads, n_kv, drop=settings.rates.attn_drop)


class Settings:
    n_embd = 4096
    n_head = 32
    dropout = 0.2


class ClassAttributes(Base):
    def __init__(self, config: "Settings"):
        super().__init__(config.n_embd, config.n_head, drop=config.dropout)


class FromDictionary(Base):
    def __init__(self, cfg):
        rate = cfg["drop_rate"] if "drop_rate" in cfg else 0.0  # noqa: SIM401
        super().__init__(cfg["emb_dim"], cfg["n_heads"], cfg.get("n_kv_groups"), drop=rate)
        self.fast = cfg.get("fast", True)
        self.cfg = cfg


class WithDefaults(Base):
    def __init__(self, hparams):
        super().__init__(hparams.model_dim, getattr(hparams, "nb_heads", 1))
        assert not hasattr(hparams, "flavour")
        assert getattr(hparams, "flavour", "none") == "none"


class Unguessable(Base):
    def __init__(self, dim, heads, alpha):
        super().__init__(dim, heads)
        self.alpha = alpha


class UnguessableConfig(Base):
    def __init__(self, config):
        super().__init__(config.n_embd, config.n_head)
        self.flavour = config.flavour


class Refuses(Base):
    def __init__(self, dim, heads):
        assert dim == 7
        super().__init__(dim, heads)


class Switch(Base):
    def __init__(self, dim, heads, causal=False, p=0.1):
        super().__init__(dim, heads, drop=p)
        self.causal = causal


class Functional(Base):
    def forward(self, x):
        return F.dropout(super().forward(x), self.drop.p, self.training)


class AnyName(Base):
    def __init__(self, **kwargs):
        super().__init__(kwargs["d_model"], kwargs.pop("n_heads"), drop=kwargs.get("drop", 0.0))


class Transposed(nn.Module):
    """Its weights are [in, out], so the width of its input is not in their last axis."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.w_qkv = nn.Parameter(torch.randn(width, 3 * width) * 0.1)
        self.w_o = nn.Parameter(torch.randn(width, width) * 0.1)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for y in (x @ self.w_qkv).chunk(3, -1)
        )
        out = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        return out.transpose(1, 2).flatten(2) @ self.w_o


class Nothing(Base):
    """None is allowed where a name says nothing."""

    def __init__(self, dim: int, heads: int, flavour: str | None, layer_idx: int | None = None):
        assert flavour is None
        assert layer_idx == 0
        super().__init__(dim, heads)
