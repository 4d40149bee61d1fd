"""Modules of x, of x and another sequence, and of queries, keys and values, with weights."""

from strangers.draw import Drawing
from strangers.extras import Sizes
from strangers.pen import Pen, block


class Layer:
    """Writes one module.

    Args:
        drawing: what was chosen.
        pen: how it is written.
    """

    def __init__(self, drawing: Drawing, pen: Pen) -> None:
        self.d, self.pen, self.sizes = drawing, pen, Sizes(drawing)
        d, sizes = drawing, self.sizes
        default = "64" if d.defaults else ""
        if d.two_widths:
            self.width, self.wide = (
                sizes.add("d_in", default=default),
                sizes.add("d_out", default=default),
            )
        else:
            self.width = self.wide = sizes.add(d.width_name, default=default)
        self.grouped = d.kind in ("GQA", "MQA")
        self.single = d.kind == "single"
        self.heads, self.kv = "", ""
        if not self.single:
            self.heads = sizes.add(d.heads_name, default="4" if d.defaults else "")
        if d.kind == "GQA":
            self.kv = sizes.add(d.kv_name, default="2" if d.defaults else "")
        self.own = ""
        if d.own_width:
            self.own = sizes.add(d.dim_name, default=d.pick("own", "16", "32", "64"))
        self.context = ""
        if d.family == "cross" and d.pick("context", "own", "same") == "own":
            self.context = sizes.add(
                d.pick("context name", "context_dim", "cross_dim", "kv_dim"), default="None"
            )
        self.bias = d.bias and sizes.add(
            d.pick("bias", "bias", "qkv_bias", "use_bias"), "bool", d.pick("b", "True", "False")
        )
        self.rate = d.dropout and sizes.add(
            d.pick("rate", "dropout", "attn_dropout", "dropout_rate", "drop"),
            "float", d.pick("p", "0.0", "0.1"),
        )  # fmt: skip
        self.longest = d.causal == "buffer" and sizes.add(
            d.pick("longest", "context_length", "block_size", "max_seq_len", "max_len"),
            default="" if d.config != "plain" else d.pick("n", "", "256", "1024"),
        )
        if d.causal == "blocks":
            names = ("window_size", "window", "local_window", "attn_window", "chunk_size")
            self.window = sizes.add(d.pick("window", *names))
        if d.causal == "option":
            self.option = sizes.add(d.pick("option", "causal", "is_causal"), "bool", "False")
        # Attributes, as the methods read them.
        self.h = "1" if self.single else f"self.{d.pick('h', d.heads_name, 'num_heads', 'h')}"
        self.g = self.h
        if d.kind == "GQA":
            self.g = f"self.{d.pick('g', d.kv_name, 'num_kv_heads')}"
        if d.kind == "MQA":
            self.g = "1"
        self.w = f"self.{d.pick('w', d.dim_name, 'head_dim', 'd_k')}"
        self.scale = d.pick("scale kept", "", "self.scale", "self.scaling")
        if d.core == "sdpa":
            self.scale = ""
        self.buffer = d.pick("buffer name", "tril", "causal_mask", "bias", "mask_buffer")
        if self.buffer in (d.mask_name, "bias"):
            self.buffer = "tril"

    # -- the constructor ---------------------------------------------------------------------

    def constructor(self) -> str:
        pen = self.pen
        lines = [pen("super().__init__()", super_missing="")]
        lines += self._attributes()
        lines += self._weights()
        lines += self._rest()
        return block([f"def __init__(self, {self.sizes.signature()}):", block(lines, 1)])

    def _attributes(self) -> list[str]:
        d, lines = self.d, []
        if not self.single:
            if not d.own_width:
                lines += [d.pick(
                    "assert",
                    f"assert {self.wide} % {self.heads} == 0",
                    f'assert {self.wide} % {self.heads} == 0, "width must be divisible by heads"',
                    "",
                )]  # fmt: skip
            lines += [f"{self.h} = {self.heads}"]
        if d.kind == "GQA":
            lines += [f"{self.g} = {self.kv}"]
        if d.own_width:
            own = self.own
        elif self.single:
            own = self.wide
        else:
            own = f"{self.wide} // {self.heads}"
        lines += [f"{self.w} = {own}"]
        if d.own_width and not self.single:
            lines += [f"inner = {self.h} * {self.w}"]
        if self.scale:
            lines += [f"{self.scale} = {self._scale()}"]
        return lines

    def _scale(self) -> str:
        w = self.w
        right = self.d.pick("scale", f"{w} ** -0.5", f"1.0 / math.sqrt({w})", f"1 / {w} ** 0.5")
        wrong = {"scale_inverse": f"{w} ** -1.0"}
        if not self.d.qk_norm:  # normalised queries and keys may do without a scale
            wrong["scale_missing"] = "1.0"
        if not self.single:
            wrong["scale_of_width"] = f"{self.inner} ** -0.5"
        return self.pen(right, **wrong)

    @property
    def inner(self) -> str:
        """The channels of all query heads."""
        if self.single:
            return self.w
        return "inner" if self.d.own_width else self.wide

    @property
    def kv_inner(self) -> str:
        """The channels of all key heads."""
        if not self.grouped:
            return self.inner
        return self.w if self.d.kind == "MQA" else f"{self.g} * {self.w}"

    def linear(self, name: str, given: str, made: str) -> str:
        bias = f", bias={self.bias}" if self.bias else ", bias=False"
        if not self.bias and self.d.pick("plain bias", "none", "default") == "default":
            bias = ""
        return f"self.{name} = nn.Linear({given}, {made}{bias})"

    def _weights(self) -> list[str]:
        d, width = self.d, self.width
        source = width
        lines = []
        if self.context:
            lines += [f"{self.context} = {width} if {self.context} is None else {self.context}"]
            source = self.context
        q, k, v = d.three
        if d.projections == "three":
            return [*lines, self.linear(q, width, self.inner),
                    self.linear(k, source, self.kv_inner),
                    self.linear(v, source, self.kv_inner)]  # fmt: skip
        if d.projections in ("fused", "fused by group"):
            made = f"3 * {self.inner}"
            if self.grouped and d.kind == "GQA":
                made = f"({self.h} + 2 * {self.g}) * {self.w}"
            if d.kind == "MQA":
                made = f"({self.h} + 2) * {self.w}"
            if d.conv:
                return [*lines, f"self.{d.fused} = Conv1D({made}, {width})"]
            return [*lines, self.linear(d.fused, width, made)]
        if d.projections == "pair":
            return [*lines, self.linear(d.pair[0], width, self.inner),
                    self.linear(d.pair[1], source, f"2 * {self.kv_inner}")]  # fmt: skip
        if d.projections == "low-rank":
            down, norm, up = d.low_rank
            rank = f"{width} // 2"
            return [*lines, f"self.{down} = nn.Linear({width}, {rank}, bias=False)",
                    f"self.{norm} = {d.norm_class}({rank})".replace("LayerN", "nn.LayerN"),
                    self.linear(up, rank, self.inner), self.linear(k, width, self.kv_inner),
                    self.linear(v, width, self.kv_inner)]  # fmt: skip
        return [*lines, *self._matrices()]

    def _matrices(self) -> list[str]:
        """Parameters without modules: [E, HD], or [E, H, D] for an einsum."""
        width, lines = self.width, []
        for at, name in enumerate(self.d.three):
            heads = self.h if at == 0 else self.g
            inner = self.inner if at == 0 else self.kv_inner
            shape = f"{width}, {inner}"
            if self.by_einsum:
                shape = f"{width}, {heads}, {self.w}"
            lines += [f"self.{name} = nn.Parameter(torch.randn({shape}) * {width} ** -0.5)"]
        return lines

    @property
    def by_einsum(self) -> bool:
        return not self.single and self.d.pick("matrices", "einsum", "product") == "einsum"

    def _rest(self) -> list[str]:
        d, pen, lines = self.d, self.pen, []
        self.sequential = bool(self.rate) and d.pick("sequential", "no", "no", "yes") == "yes"
        if d.output:
            if self.sequential:
                made = (
                    f"nn.Sequential(nn.Linear({self.inner}, {self.wide}), nn.Dropout({self.rate}))"
                )
                lines += [f"self.{d.out_name} = {made}"]
            else:
                lines += [self.linear(d.out_name, self.inner, self.wide)]
        if d.norm != "none":
            width = self.width if d.output or d.norm == "pre" else self.inner
            lines += [f"self.{d.norm_name} = {self._norm(width)}"]
        if d.qk_norm:
            lines += [f"self.q_norm = {self._norm(self.w)}", f"self.k_norm = {self._norm(self.w)}"]
        if d.table != "none":
            lines += [f"self.rotary = RotaryEmbedding({self.w})"]
        if d.gate:
            lines += [f"self.gate = nn.Linear({self.width}, {self.inner})"]
        if self.rate:
            if d.core == "sdpa":
                lines += [f"self.p = {self.rate}"]
            else:
                lines += [f"self.dropout = nn.Dropout({self.rate})"]
        if d.causal == "buffer":
            n = self.longest
            ones = f"torch.ones({n}, {n})"
            made = pen(
                f"torch.tril({ones})",
                causal_future=f"torch.tril({ones}, diagonal=1)",
                causal_own_hidden=f"torch.tril({ones}, diagonal=-1)",
            )
            lines += [f'self.register_buffer("{self.buffer}", {made})']
        if d.causal == "option":
            lines += [f"self.causal = {self.option}"]
        if d.causal == "blocks":
            lines += [f"self.window = {self.window}"]
        return lines

    def _norm(self, width: str) -> str:
        return ("nn." if self.d.norm_class == "LayerNorm" else "") + f"{self.d.norm_class}({width})"
