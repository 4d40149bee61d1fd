"""Building a class: its arguments are guessed from the names that tutorials and libraries use."""

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from regard.verify.subject.conventions import Conventions
from regard.verify.subject.mask_forms import parameters_of
from regard.verify.subject.subject import SubjectError, called

WIDTH, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 32, 4, 2, 8, 64
GUESSES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "embed_dim", "d_model", "n_embd", "dim", "d_in", "d_out", "emb_dim",
         "embed_size", "embedding_dim", "model_dim", "hidden_dim", "width", "d_emb", "emb_size",
         "input_dim", "output_dim", "in_dim", "out_dim", "in_features", "out_features",
         "embedding_size", "d_embed", "channels", "features"), WIDTH),
    **dict.fromkeys(
        ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "h",
         "num_q_heads", "num_query_heads", "attention_heads", "nheads", "head_num", "head",
         "n_q_heads"), HEADS),
    **dict.fromkeys(
        ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head", "kv_heads",
         "num_kv_groups", "num_groups", "n_groups", "groups", "n_kv_groups", "num_query_groups"),
        KV_HEADS),
    **dict.fromkeys(
        ("head_dim", "d_k", "d_v", "d_head", "head_size", "dim_head", "dk", "dv", "d_q", "key_dim",
         "value_dim"), HEAD_DIM),
    **dict.fromkeys(
        ("context_length", "max_seq_len", "block_size", "max_len", "max_length", "seq_len",
         "max_seq_length", "max_position_embeddings", "max_position", "ctx_len", "n_ctx",
         "sequence_length", "seq_length", "max_context"), CONTEXT),
    **dict.fromkeys(
        ("dropout", "attn_dropout", "dropout_p", "attention_dropout", "attn_pdrop", "resid_pdrop",
         "p", "drop", "dropout_rate", "drop_rate", "resid_dropout", "attn_drop", "p_drop"), 0.0),
    **dict.fromkeys(("layer_idx", "layer_id", "layer", "layer_num"), 0),
    **dict.fromkeys(("bias", "qkv_bias", "use_bias", "mask", "masked"), False),
    **dict.fromkeys(("theta", "rope_theta", "base"), 10_000.0),
    **dict.fromkeys(("window", "window_size", "sliding_window"), 3),
    **dict.fromkeys(("max_batch_size", "batch_size"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "kv_rank", "latent_dim", "d_latent", "d_c",
                     "kv_latent_dim", "q_latent_dim", "d_c_prime", "kv_compression_dim"), 12),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "nope_dim", "qk_nope_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rope_dim", "d_rope", "qk_rope_dim", "rope_head_dim"), 4),
}  # fmt: skip
_CONFIGS = ("config", "cfg", "args", "conf", "model_args", "params", "hparams")


class GuessedConfig(SimpleNamespace):
    """A configuration with every size of a usual name: `config.n_embd`, and `config["n_embd"]`."""

    def __getattr__(self, name: str) -> Any:
        if name in GUESSES:
            return GUESSES[name]
        raise AttributeError(f"the guessed configuration has no {name!r}; declare arguments")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value, as from a dictionary."""
        return getattr(self, name, GUESSES.get(name, default))


def build(made_by: Any, own: Conventions) -> tuple[Any, dict[str, Any], list[str]]:
    """An instance, the arguments that it was built with, and remarks.

    Raises:
        SubjectError: if an argument cannot be guessed, or building fails.
    """
    arguments = {**_guessed(made_by, own.arguments), **own.arguments}
    try:
        return called(made_by, **arguments), _plain(arguments), []
    except SubjectError as error:
        if not _forgot_super(made_by, error):
            raise
    built = made_by.__new__(made_by)
    nn.Module.__init__(built)
    called(built.__init__, **arguments)
    remark = f"{made_by.__name__}.__init__ does not call super().__init__(); it was called for it."
    return built, _plain(arguments), [remark]


def _guessed(made_by: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in parameters_of(made_by).items():
        if name in given or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        if name in _CONFIGS and each.default is inspect.Parameter.empty:
            found[name] = GuessedConfig()
        elif each.default is inspect.Parameter.empty:
            if name.lower() not in GUESSES:
                raise SubjectError(
                    f"the value of {name!r} of {_name(made_by)} cannot be guessed; give "
                    f"arguments={{{name!r}: ...}}, or name a function that builds the object"
                )
            found[name] = GUESSES[name.lower()]
    return found


def _forgot_super(made_by: Any, error: SubjectError) -> bool:
    return (
        isinstance(made_by, type)
        and issubclass(made_by, nn.Module)
        and ("before Module.__init__() call" in str(error) or "_modules" in str(error))
    )


def _name(made_by: Any) -> str:
    return getattr(made_by, "__name__", repr(made_by))


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, (int, float, str, bool, type(None))) else "(guessed)"
        for name, value in arguments.items()
    }
