"""What a stranger chose: the options from which the source of an attention is written."""

import itertools
from dataclasses import dataclass, fields
from random import Random

WIDTH = (
    "d_model", "embed_dim", "emb_dim", "dim", "n_embd", "hidden_size", "embed_size", "width",
    "model_dim", "hid_dim", "hidden_dim", "embedding_dim", "channels", "emb", "num_hiddens",
)  # fmt: skip
HEADS = (
    "num_heads", "n_heads", "n_head", "nhead", "heads", "h", "head_num", "num_attention_heads",
    "attention_heads", "nb_heads", "num_head", "nheads", "attn_heads", "num_attn_heads",
)  # fmt: skip
KV_HEADS = (
    "num_kv_heads", "n_kv_heads", "n_kv_head", "num_key_value_heads", "num_key_value_head",
    "kv_heads", "group_num", "num_query_groups", "num_kv_groups", "n_kv",
    "kv_head", "n_groups", "multi_query_group_num", "key_value_heads",
)  # fmt: skip
HEAD_DIM = ("head_dim", "dim_head", "d_k", "d_head", "head_size", "dh", "dim_per_head",
            "d_kv")  # fmt: skip
THREE = (
    ("W_q", "W_k", "W_v"), ("Wq", "Wk", "Wv"), ("wq", "wk", "wv"), ("w_q", "w_k", "w_v"),
    ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("to_q", "to_k", "to_v"),
    ("q_proj", "k_proj", "v_proj"), ("linear_q", "linear_k", "linear_v"), ("fc_q", "fc_k", "fc_v"),
    ("W_query", "W_key", "W_value"), ("queries", "keys", "values"), ("q_map", "k_map", "v_map"),
    ("toqueries", "tokeys", "tovalues"), ("Q", "K", "V"), ("lin_q", "lin_k", "lin_v"),
    ("query_proj", "key_proj", "value_proj"), ("proj_q", "proj_k", "proj_v"),
)  # fmt: skip
FUSED = (
    "c_attn", "qkv", "to_qkv", "in_proj", "qkv_proj", "Wqkv", "query_key_value", "attn_in",
    "linear_qkv",
)  # fmt: skip
KV = (("to_q", "to_kv"), ("q", "kv"), ("q_proj", "kv_proj"), ("wq", "wkv"), ("query", "key_value"))
LOW_RANK = (("q_down", "q_norm", "q_up"), ("q_a_proj", "q_a_layernorm", "q_b_proj"),
            ("w_dq", "norm_q", "w_uq"), ("q_reduce", "q_ln", "q_expand"))  # fmt: skip
OUT = (
    "W_o", "wo", "out_proj", "o_proj", "to_out", "c_proj", "fc_out", "proj", "dense", "out_lin",
    "unifyheads", "fc", "W_O", "linear_out", "output", "proj_out",
)  # fmt: skip
NORM = ("norm", "ln", "layer_norm", "pre_norm", "attn_norm")
X = ("x", "hidden_states", "inputs", "h", "tokens", "hidden")
MASK = ("mask", "attn_mask", "attention_mask", "src_mask")
ROWS = ("padding_mask", "pad_mask", "mask", "attention_mask")
CLASSES = (
    "MultiHeadAttention", "SelfAttention", "Attention", "MHA", "CausalSelfAttention", "AttnBlock",
    "MultiHeadedAttention", "AttentionLayer",
)  # fmt: skip
ORDERS = tuple(itertools.permutations(("qkv", "heads", "dim")))


@dataclass(frozen=True)
class Drawing:
    """The choices of one stranger.

    Attributes:
        family: layer (a module of x), cross (of x and another sequence), qkv (a module of
            queries, keys and values), list (a module for each head), latent (MLA), function,
            kernel (a module of q, k and v without parameters).
        projections: three, fused, fused by group, pair (q, and k with v), low-rank, matrices
            (`nn.Parameter`, without bias).
        order: of the axes in the output channels of a fused projection.
        cut: how that is cut: chunk, view, unbind or rearrange.
        kind: of heads: MHA, GQA, MQA or single.
        norm: none, pre or post; norm_class: LayerNorm or RMSNorm.
        mask: none, zeros hide, ones hide, keep, hide, additive, or two (of these, `mask` names
            the first kind: the second is of rows and of the kind `second`).
        mask_shape: LS, BLS, B1LS or BS.
        causal: never, buffer, built, option, argument, or blocks (earlier keys of the own block
            and of the one before).
        config: plain, dict, dataclass or namespace.
        core: softmax, sdpa, einsum, tokens first (an einsum of [B, L, H, D]), flat (`torch.bmm`)
            or grouped (key heads are not repeated: queries have an axis for those that share).
        rope: none, halves, pairs, given (cos and sin are arguments) or complex (exp(i angle) is).
        table: none, buffer, attribute (cos and sin), complex buffer or complex attribute.
        cache: none, tuple or object.
        returns: tensor, weights (out, weights), optional (out, None), or asked (if the caller
            wants them).
    """

    seed: int
    index: int
    family: str = "layer"
    projections: str = "three"
    order: tuple[str, ...] = ("qkv", "heads", "dim")
    cut: str = "chunk"
    kind: str = "MHA"
    norm: str = "none"
    norm_class: str = "LayerNorm"
    mask: str = "none"
    mask_shape: str = "B1LS"
    second: str = "none"
    causal: str = "never"
    config: str = "plain"
    core: str = "softmax"
    rope: str = "none"
    cache: str = "none"
    returns: str = "tensor"
    batch_first: bool = True
    qk_norm: bool = False
    gate: bool = False
    dropout: bool = False
    bias: bool = False
    output: bool = True
    own_width: bool = False  # the heads' width is an argument, not width / heads
    defaults: bool = False
    required_mask: bool = False
    query_rank: bool = True  # MLA: queries are of low rank
    layout: str = "BHLD"  # of functions
    scale_first: bool = False
    conv: bool = False  # a fused projection is a product with a weight [E, 3 E]
    two_widths: bool = False  # of the input and of the output
    optional_context: bool = False  # without it, x attends to itself
    table: str = "none"  # what holds the rotation of a module, if it is computed once
    zeroed: bool = False  # outputs of tokens that a mask of tokens hides are set to 0
    multiples: bool = False  # lengths must be multiples of the block
    residual: bool = False  # x is added inside, before a post-norm
    width_name: str = "d_model"
    heads_name: str = "num_heads"
    kv_name: str = "num_kv_heads"
    dim_name: str = "head_dim"
    three: tuple[str, ...] = THREE[0]
    fused: str = "qkv"
    pair: tuple[str, ...] = KV[0]
    low_rank: tuple[str, ...] = LOW_RANK[0]
    out_name: str = "out_proj"
    norm_name: str = "norm"
    x_name: str = "x"
    mask_name: str = "mask"
    class_name: str = "Attention"

    def pick(self, what: str, *choices: str) -> str:
        """One of several ways to write the same."""
        return Random(f"{self.seed}:{self.index}:{what}").choice(choices)

    @property
    def masked(self) -> bool:
        """Whether it takes a mask."""
        return self.mask != "none"

    def __str__(self) -> str:
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return ", ".join(f"{k}={v}" for k, v in own.items() if not k.endswith("name"))


def draw(seed: int, index: int) -> Drawing:
    """The stranger of this number."""
    rng = Random(f"{seed}:{index}")
    families = ["layer", "cross", "qkv", "list", "latent", "function", "kernel"]
    family = rng.choices(families, [50, 8, 14, 4, 9, 8, 7])[0]
    common = {
        "seed": seed,
        "index": index,
        "family": family,
        "width_name": rng.choice(WIDTH),
        "heads_name": rng.choice(HEADS),
        "kv_name": rng.choice(KV_HEADS),
        "dim_name": rng.choice(HEAD_DIM),
        "three": rng.choice(THREE),
        "fused": rng.choice(FUSED),
        "pair": rng.choice(KV),
        "low_rank": rng.choice(LOW_RANK),
        "out_name": rng.choice(OUT),
        "norm_name": rng.choice(NORM),
        "x_name": rng.choice(X),
        "mask_name": rng.choice(MASK),
        "class_name": rng.choice(CLASSES),
        "dropout": rng.random() < 0.4,
        "bias": rng.random() < 0.5,
        "scale_first": rng.random() < 0.25,
        "defaults": rng.random() < 0.3,
    }
    if common["heads_name"] == "h" and common["x_name"] == "h":
        common["x_name"] = "x"
    choose = {
        "layer": _layer, "cross": _cross, "qkv": _qkv, "list": _list, "latent": _latent,
    }.get(family, _plain)  # fmt: skip
    chosen = _settled({**common, **choose(rng)})
    return Drawing(**{**chosen, **_later(chosen, Random(f"{seed}:{index}:later"))})


def _later(chosen: dict, rng: Random) -> dict:
    """Blocks, and padded outputs that are 0, in layers where they have a meaning."""
    plain = chosen["family"] == "layer" and chosen["batch_first"]
    if not plain or chosen.get("cache", "none") != "none":
        return {}
    if chosen["mask"] != "none":
        alone = chosen["mask_shape"] == "BS" and chosen.get("second", "none") == "none"
        return {"zeroed": alone and rng.random() < 0.8}
    given = chosen["rope"] in ("given", "complex")
    if chosen["causal"] not in ("never", "built") or given or rng.random() < 0.4:
        return {}
    return {"causal": "blocks", "multiples": rng.random() < 0.5}


def _settled(chosen: dict) -> dict:
    """Without what does not go together: one head has no axis of heads."""
    if chosen.get("mask_shape") != "BS" and chosen["mask_name"] in ("key_padding_mask", *ROWS[:2]):
        chosen["mask_name"] = "mask"
    if chosen.get("two_widths"):
        chosen |= {"own_width": False, "output": True}
    if chosen.get("mask") == "none":
        chosen["required_mask"] = False
    if chosen.get("core") == "grouped" and chosen.get("mask_shape") == "LS":
        # A mask of other axes would be read wrongly, without an error.
        two = chosen.get("second", "none") != "none"
        chosen |= {"core": "softmax"} if two else {"mask_shape": "B1LS"}
    if chosen.get("projections") != "fused":
        chosen["conv"] = False
    if chosen.get("rope", "none") not in ("halves", "pairs"):
        chosen["table"] = "none"
    if chosen.get("rope") == "halves":
        chosen["table"] = chosen.get("table", "none").removeprefix("complex ")
    if chosen.get("projections") == "low-rank":
        chosen["qk_norm"] = False  # its names are those of the norm between the products
    if chosen.get("residual") and chosen.get("own_width"):
        chosen["output"] = True
    if chosen.get("kind") == "single" and chosen["family"] != "latent":
        if chosen["core"] in ("tokens first", "flat"):
            chosen["core"] = "softmax"
        if chosen.get("mask_shape") == "B1LS":
            chosen["mask_shape"] = "BLS"
        if chosen.get("order", ORDERS[0])[-1] == "heads":
            chosen |= {"order": ORDERS[0], "cut": "chunk"}
        if chosen.get("projections") == "pair":
            chosen["order"] = ORDERS[0]
    return chosen


def _masks(rng: Random, shapes: list[str], none: float) -> dict:
    if rng.random() < none:
        return {"mask": "none"}
    mask = rng.choice(["zeros hide", "ones hide", "keep", "hide", "additive"])
    shape = rng.choice(shapes)
    if mask == "additive" and shape == "BS":
        shape = "B1LS"
    chosen = {"mask": mask, "mask_shape": shape}
    if shape == "BS":
        names = ("key_padding_mask", *ROWS) if mask in ("hide", "ones hide") else ROWS
        chosen["mask_name"] = rng.choice(names)
    return chosen


def _second(rng: Random) -> dict:
    """A mask of queries and keys, and one of rows beside it."""
    name = rng.choice(["attn_mask", "mask", "causal_mask"])
    return {"mask_shape": "LS", "second": rng.choice(["keep", "hide"]), "mask_name": name}


def _layer(rng: Random) -> dict:
    style = rng.choices(["usual", "cached", "given", "complex", "second"], [48, 18, 12, 5, 17])[0]
    chosen = {
        "projections": rng.choices(
            ["three", "fused", "fused by group", "pair", "low-rank", "matrices"],
            [26, 34, 8, 14, 10, 8],
        )[0],
        "norm": rng.choices(["none", "pre", "post"], [70, 20, 10])[0],
        "norm_class": rng.choice(["LayerNorm", "RMSNorm"]),
        "causal": rng.choices(["never", "buffer", "built", "option", "argument"], [5, 2, 2, 2, 2])[
            0
        ],
        "config": rng.choices(["plain", "dict", "dataclass", "namespace"], [60, 13, 15, 12])[0],
        "core": rng.choices(["softmax", "sdpa", "einsum", "tokens first", "flat"], [4, 3, 1, 1, 1])[
            0
        ],
        "rope": rng.choices(["none", "halves", "pairs"], [78, 11, 11])[0],
        "batch_first": rng.random() < 0.85,
        "qk_norm": rng.random() < 0.12,
        "gate": rng.random() < 0.08,
        "output": rng.random() < 0.93,
        "own_width": rng.random() < 0.25,
        **_masks(rng, ["LS", "BLS", "B1LS", "BS"], 0.3),
    }
    chosen["kind"] = rng.choices(["MHA", "GQA", "MQA", "single"], [58, 24, 9, 9])[0]
    chosen |= _cut(rng, chosen["projections"], chosen["kind"])
    if style == "given":
        chosen |= {"rope": "given", "mask": "additive", "mask_shape": "B1LS", "returns": "optional",
                   "config": rng.choice(["namespace", "dataclass"]), "batch_first": True,
                   "norm": "none", "gate": False, "causal": "never", "own_width": False,
                   "cache": rng.choice(["none", "object"]), "output": True}  # fmt: skip
        if chosen["kind"] == "single":
            chosen["kind"] = "GQA" if chosen["projections"] in ("three", "pair") else "MHA"
        if chosen["core"] in ("tokens first", "flat"):
            chosen["core"] = "softmax"
    if style == "complex":
        chosen |= {"rope": "complex", "core": rng.choice(["softmax", "sdpa", "einsum"]),
                   "batch_first": True, "causal": rng.choice(["never", "built"]),
                   **_masks(rng, ["LS", "B1LS"], 0.3)}  # fmt: skip
        if chosen["kind"] == "single":
            chosen["kind"] = "GQA" if chosen["projections"] in ("three", "pair") else "MHA"
    if style == "cached":
        chosen |= {"cache": rng.choice(["tuple", "object"]), "batch_first": True,
                   "causal": rng.choice(["built", "built", "never"])}  # fmt: skip
        if chosen["core"] in ("tokens first", "flat"):
            chosen["core"] = "softmax"
        if chosen["mask"] != "none":
            chosen["mask_shape"] = "B1LS"
    if style == "second" and chosen["mask"] != "none":
        chosen |= _second(rng)
    if chosen["norm"] != "none":
        chosen["residual"] = rng.random() < 0.4
    if chosen["core"] == "flat" and chosen["projections"] == "fused by group":
        chosen["core"] = "softmax"
    if chosen["core"] == "flat":
        chosen |= {"rope": "none", "qk_norm": False}
        if chosen["kind"] in ("GQA", "MQA"):
            chosen["kind"] = "MHA"
    if chosen["core"] != "sdpa" and style == "usual":
        chosen["returns"] = rng.choices(["tensor", "weights"], [75, 25])[0]
    if chosen["kind"] == "GQA" and chosen["core"] == "softmax" and rng.random() < 0.25:
        chosen |= {"core": "grouped", "returns": "tensor"}
    if chosen["causal"] in ("buffer", "built") and rng.random() < 0.5:
        chosen |= {"mask": "none", "second": "none"}
    plain = chosen["projections"] in ("three", "fused") and chosen["norm"] == "none"
    chosen["two_widths"] = plain and not chosen["gate"] and rng.random() < 0.1
    chosen["conv"] = rng.random() < 0.12
    tables = ["buffer", "attribute", "complex buffer", "complex attribute"]
    at = rng.random()
    chosen["table"] = tables[int(at * 10)] if at < 0.4 else "none"
    chosen["required_mask"] = (
        style == "usual" and chosen["causal"] == "never" and rng.random() < 0.12
    )
    return chosen


def _list(rng: Random) -> dict:
    """A module for each head, and their outputs side by side."""
    return {
        "class_name": rng.choice(["MultiHeadAttention", "MultiHeadAttentionWrapper", "MultiHead"]),
        "kind": "single",
        "core": rng.choice(["softmax", "softmax", "sdpa", "einsum"]),
        "causal": rng.choice(["never", "buffer", "built"]),
        "config": rng.choices(["plain", "dict", "dataclass"], [7, 2, 1])[0],
        "own_width": False,
        "scale_first": False,
        **_masks(rng, ["LS", "BLS", "BS"], 0.5),
    }


def _cut(rng: Random, projections: str, kind: str) -> dict:
    """How a fused projection is cut: by chunks only where q, k and v come first."""
    if projections == "fused by group":
        return {"kind": kind if kind in ("GQA", "MQA") else "GQA"}
    if projections == "matrices":
        return {"kind": "MHA" if kind == "MQA" else kind}
    if projections == "three":
        return {"order": rng.choices([ORDERS[0], ("qkv", "dim", "heads")], [15, 1])[0]}
    if projections == "pair":
        return {"order": rng.choices([ORDERS[0], ("heads", "qkv", "dim"), *ORDERS],
                                     [8, 4, 0, 1, 1, 1, 1, 1])[0]}  # fmt: skip
    if projections != "fused":
        return {}
    if kind in ("GQA", "MQA"):
        return {"cut": "chunk", "order": ("qkv", "heads", "dim")}
    order = rng.choice([ORDERS[0], *ORDERS])
    cuts = ["view", "rearrange", "unbind"]
    if order[0] == "qkv":
        cuts += ["chunk", "chunk"]
    if order == ("heads", "qkv", "dim"):
        cuts += ["chunk of heads"] * 3
    return {"order": order, "cut": rng.choice(cuts)}


def _cross(rng: Random) -> dict:
    core = rng.choices(["softmax", "sdpa", "einsum"], [4, 3, 2])[0]
    return {
        "projections": rng.choice(["three", "pair"]),
        "kind": rng.choices(["MHA", "GQA", "single"], [8, 1, 1])[0],
        "norm": rng.choices(["none", "pre"], [70, 30])[0],
        "norm_class": rng.choice(["LayerNorm", "RMSNorm"]),
        "core": core,
        "own_width": rng.random() < 0.5,
        "optional_context": rng.random() < 0.4,
        **_masks(rng, ["BLS", "B1LS", "BS"], 0.4),
    }


def _qkv(rng: Random) -> dict:
    core = rng.choices(["softmax", "sdpa", "einsum", "tokens first", "flat"], [4, 2, 1, 2, 2])[0]
    masks = _masks(rng, ["LS", "BLS", "B1LS"], 0.2)
    if masks["mask"] != "none" and rng.random() < 0.4:
        masks |= _second(rng)
    return {
        "projections": "three",
        "kind": rng.choices(["MHA", "GQA"], [8, 1 if core != "flat" else 0])[0],
        "core": core,
        "batch_first": rng.random() < 0.8,
        "returns": rng.choice(["tensor", "weights", "asked"]) if core != "sdpa" else "tensor",
        "norm": rng.choices(["none", "post"], [80, 20])[0],
        **masks,
    }


def _latent(rng: Random) -> dict:
    chosen = {
        "class_name": rng.choice(["MultiHeadLatentAttention", "MLA", "LatentAttention"]),
        "projections": "latent",
        "query_rank": rng.random() < 0.5,
        "rope": rng.choice(["none", "halves", "pairs"]),
        "core": rng.choice(["softmax", "sdpa", "einsum"]),
        "config": rng.choices(["plain", "dict", "dataclass", "namespace"], [60, 13, 15, 12])[0],
        "norm_class": "RMSNorm",
        "causal": rng.choices(["never", "built"], [6, 4])[0],
        "cache": rng.choices(["none", "tuple"], [6, 4])[0],
        **_masks(rng, ["LS", "BLS", "B1LS"], 0.4),
    }
    if chosen["cache"] != "none" and chosen["mask"] != "none":
        chosen["mask_shape"] = "B1LS"
    return chosen


def _plain(rng: Random) -> dict:
    layout = rng.choices(["BHLD", "BLHD", "BLD"], [5, 3, 2])[0]
    shapes = ["LS", "B1LS"] if layout != "BLD" else ["LS", "BLS"]
    core = {"BHLD": ["softmax", "einsum", "sdpa"], "BLHD": ["tokens first"], "BLD": ["softmax"]}
    return {
        "layout": layout,
        "core": rng.choice(core[layout]),
        "causal": rng.choices(["never", "argument", "built"], [5, 3, 1])[0],
        "kind": "single" if layout == "BLD" else rng.choices(["MHA", "GQA"], [3, 1])[0],
        "returns": rng.choices(["tensor", "weights"], [3, 1])[0],
        **_masks(rng, shapes, 0.35),
    }
