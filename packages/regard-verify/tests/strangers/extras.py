"""What stands beside the attention in a stranger's file: a norm, a rotation, a cache, a config."""

import textwrap

from strangers.draw import Drawing
from strangers.pen import Pen

RMS_NORM = """
class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (x * scale.to(x.dtype)) * self.weight
"""

CONV = """
class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=nx ** -0.5)

    def forward(self, x):
        out = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return out.view(x.size()[:-1] + (self.nf,))
"""

TABLE = """
class RotaryEmbedding(nn.Module):
    def __init__(self, dim, max_position=2048, base=10000.0):
        super().__init__()
        freqs = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.arange(max_position, dtype=torch.float64)[:, None] * freqs
{held}

    def forward(self, x, offset=0):
        length = x.shape[-2]
{turned}
"""

HELD = {
    "buffer": """
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
""",
    "attribute": """
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
""",
    "complex buffer": """
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        self.register_buffer("freqs_cis", turns, persistent=False)
""",
    "complex attribute": """
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
""",
}

COSINES = """
        cos = self.cos[offset : offset + length].to(x.dtype)
        sin = self.sin[offset : offset + length].to(x.dtype)
"""

TURNS = """
        turns = self.freqs_cis[offset : offset + length]
        pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)
"""

BLOCKS = """
def block_mask(length, window, device=None):
    at = torch.arange(length, device=device)
    block = {block}
    near = block[:, None] - block[None, :] <= 1
    return near & ({causal})
"""

REARRANGE = '''
def _groups(side):
    """"b n (h d)" -> [["b"], ["n"], ["h", "d"]]"""
    groups, inside = [], None
    for word in side.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            inside = []
        elif word == ")":
            groups.append(inside)
            inside = None
        elif inside is not None:
            inside.append(word)
        else:
            groups.append([word])
    return groups


def rearrange(x, pattern, **sizes):
    left, right = (_groups(side) for side in pattern.split("->"))
    shape, names = [], []
    for group, size in zip(left, x.shape):
        known = 1
        for name in group:
            known *= sizes.get(name, 1)
        for name in group:
            names.append(name)
            shape.append(sizes.get(name, size // known))
    order = [names.index(name) for group in right for name in group]
    x = x.reshape(shape).permute(order)
    shape, at = [], 0
    for group in right:
        size = 1
        for _ in group:
            size *= x.shape[at]
            at += 1
        shape.append(size)
    return x.reshape(shape)
'''

ROTATE_HALF = """
def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)
"""

COMPLEX = """
def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
    freqs = torch.outer(torch.arange(end, dtype=torch.float32), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(xq, xk, freqs_cis):
    # xq: (batch, heads, tokens, dim), freqs_cis: (tokens, dim / 2)
    xq_ = torch.view_as_complex(xq.float().contiguous().unflatten(-1, (-1, 2)))
    xk_ = torch.view_as_complex(xk.float().contiguous().unflatten(-1, (-1, 2)))
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(-2)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(-2)
    return xq_out.type_as(xq), xk_out.type_as(xk)
"""

APPLY_GIVEN = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return {q}, {k}
"""

REPEAT_KV = """
def repeat_kv(x, n_rep):
    batch, kv_heads, length, dim = x.shape
    if n_rep == 1:
        return x
    return {repeated}
"""

CACHE = """
class {name}:
    def __init__(self):
        self.{k} = {{}}
        self.{v} = {{}}

    def {length}(self, layer):
        return self.{k}[layer].shape[-2] if layer in self.{k} else 0

    def update(self, k, v, layer):
        if layer in self.{k}:
            k = {joined_k}
            v = {joined_v}
        self.{k}[layer], self.{v}[layer] = k, v
        return k, v
"""

LAYERED_CACHE = """
class DynamicCache:
    def __init__(self):
        self.key_cache = {{}}
        self.value_cache = {{}}

    def get_seq_length(self, layer_idx=0):
        return self.key_cache[layer_idx].shape[-2] if layer_idx in self.key_cache else 0

    def update(self, key_states, value_states, layer_idx, cache_kwargs=None):
        if layer_idx in self.key_cache:
            key_states = {joined_k}
            value_states = {joined_v}
        self.key_cache[layer_idx] = key_states
        self.value_cache[layer_idx] = value_states
        return key_states, value_states
"""


def joined(pen: Pen, k: str, v: str, past_k: str, past_v: str, axis: int = -2) -> tuple[str, str]:
    """Expressions of all keys and all values: the past, then the new."""
    found = []
    for past, new in ((past_k, k), (past_v, v)):
        right = f"torch.cat([{past}, {new}], dim={axis})"
        found += [
            pen(right, cache_reversed=f"torch.cat([{new}, {past}], dim={axis})", cache_dropped=new)
        ]
    return found[0], found[1]


TURNED = {
    "halves": """    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
""",
    "pairs": """    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1).flatten(-2)
""",
}


def rotation(drawing: Drawing) -> str:
    """The function `rotary(x, offset)` for x [..., L, D], or a module that does it."""
    turned = TURNED[drawing.rope]
    if drawing.table != "none":
        real = COSINES.strip("\n") + "\n" + textwrap.indent(turned, "    ").rstrip()
        inner = TURNS.strip("\n") if drawing.table.startswith("complex") else real
        return TABLE.format(held=HELD[drawing.table].strip("\n"), turned=inner)
    base = drawing.pick("base", "10000.0", "10000")
    head = f"""
def rotary(x, offset=0, base={base}):
    dim = x.shape[-1]
    freqs = base ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=x.device) / dim)
    positions = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device) + offset
    angles = positions[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
"""
    return head + turned


def blocks(pen: Pen) -> str:
    """The function that says which keys a token sees, of its own block and of the one before."""
    later = "at[:, None] >= at[None, :]"
    causal = pen(
        later,
        causal_future="at[:, None] + 1 >= at[None, :]",
        causal_own_hidden="at[:, None] > at[None, :]",
    )
    return BLOCKS.format(
        block=pen("at // window", blocks_shifted="(at + 1) // window"), causal=causal
    )


def given_rotation(pen: Pen) -> str:
    """The functions of a module to which cos and sin are given."""
    q = "(q * cos) + (rotate_half(q) * sin)"
    k = pen("(k * cos) + (rotate_half(k) * sin)", rope_on_queries_only="k")
    return ROTATE_HALF + APPLY_GIVEN.format(q=q, k=k)


def repeat_kv(drawing: Drawing, pen: Pen) -> str:
    """The function `repeat_kv` of [B, G, S, D]."""
    expanded = (
        "x[:, :, None].expand(batch, kv_heads, n_rep, length, dim)"
        ".reshape(batch, kv_heads * n_rep, length, dim)"
    )
    right = drawing.pick("repeat", expanded, "x.repeat_interleave(n_rep, dim=1)")
    return REPEAT_KV.format(repeated=pen(right, groups_tiled="x.repeat(1, n_rep, 1, 1)"))


def cache_class(drawing: Drawing, pen: Pen) -> str:
    """A class with `update`, and the number of its tokens."""
    if drawing.rope == "given":
        k, v = joined(
            pen, "key_states", "value_states",
            "self.key_cache[layer_idx]", "self.value_cache[layer_idx]",
        )  # fmt: skip
        return LAYERED_CACHE.format(joined_k=k, joined_v=v)
    k, v = drawing.pick("kv", "k v", "keys values", "k_cache v_cache").split()
    joined_k, joined_v = joined(pen, "k", "v", f"self.{k}[layer]", f"self.{v}[layer]")
    return CACHE.format(
        name=cache_name(drawing),
        k=k,
        v=v,
        joined_k=joined_k,
        joined_v=joined_v,
        length=cache_length(drawing),
    )


def cache_length(drawing: Drawing) -> str:
    """The name of the method that counts the tokens of a layer."""
    if drawing.rope == "given":
        return "get_seq_length"
    return drawing.pick("length", "get_seq_length", "length", "size")


def cache_name(drawing: Drawing) -> str:
    """The name of that class."""
    if drawing.rope == "given":
        return "DynamicCache"
    return drawing.pick("cache class", "KVCache", "Cache", "KeyValueCache")


class Sizes:
    """The arguments of a constructor, however they are passed.

    Args:
        drawing: the choices: of these, `config`.
    """

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.fields: list[tuple[str, str, str]] = []

    def add(self, name: str, kind: str = "int", default: str = "") -> str:
        """Declare one; the expression by which the constructor reads it."""
        self.fields.append((name, kind, default))
        style = self.drawing.config
        if style == "plain":
            return name
        return f'{self.name}["{name}"]' if style == "dict" else f"{self.name}.{name}"

    @property
    def name(self) -> str:
        return self.drawing.pick("config", "config", "cfg", "args")

    @property
    def class_name(self) -> str:
        return self.drawing.pick("config class", "ModelConfig", "ModelArgs", "Config", "GPTConfig")

    def signature(self) -> str:
        """The arguments after self."""
        style = self.drawing.config
        if style == "dataclass":
            return f"{self.name}: {self.class_name}"
        if style != "plain":
            return self.name
        ordered = [each for each in self.fields if not each[2]]
        ordered += [each for each in self.fields if each[2]]
        typed = self.drawing.pick("typed", "yes", "no") == "yes"
        parts = []
        for name, kind, default in ordered:
            if typed:
                parts += [f"{name}: {kind}" + (f" = {default}" if default else "")]
            else:
                parts += [name + (f"={default}" if default else "")]
        return ", ".join(parts)

    def config_class(self) -> str:
        """The dataclass, if it is one."""
        if self.drawing.config != "dataclass":
            return ""
        lines = ["@dataclass", f"class {self.class_name}:"]
        for name, kind, default in sorted(self.fields, key=lambda each: bool(each[2])):
            lines += [f"    {name}: {kind}" + (f" = {default}" if default else "")]
        return "\n".join(lines) + "\n"
