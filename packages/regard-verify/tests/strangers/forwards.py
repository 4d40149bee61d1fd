"""What a module with weights does when it is called."""

from strangers.layers import Layer
from strangers.pen import block

LETTER = {"qkv": "k", "heads": "h", "dim": "d"}
SECOND = {"keep": ("padding_mask", "key_mask"), "hide": ("key_padding_mask", "padding_mask")}


class Forward:
    """Writes the method `forward` of a layer."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.d, self.pen = layer, layer.d, layer.pen
        d = self.d
        self.x = "hidden_states" if d.rope == "given" else d.x_name
        self.sources = (self.x, self.x, self.x)
        if d.family == "cross":
            self.other = d.pick("other", "context", "encoder_hidden_states", "memory", "y")
            self.sources = (self.x, self.other, self.other)
        if d.family == "qkv":
            self.sources = ("query", "key", "value")
            if d.pick("short", "no", "no", "yes") == "yes":
                self.sources = ("q", "k", "v")
        self.second = ""
        if d.second != "none":
            self.second = d.pick("second", *SECOND[d.second])
        self.flag = d.pick("flag", "is_causal", "causal") if d.causal == "argument" else ""
        self.past = d.pick("past", "past_kv", "layer_past", "past_key_value", "kv_cache")
        self.cache = d.pick("cache", "cache", "kv_cache", "past_key_value")
        if d.rope == "given":
            self.cache = "past_key_values"
        self.use_cache = d.cache == "tuple" and d.pick("use", "no", "yes") == "yes"
        # A stranger's sequence first: turned at once, or by the permutation of the heads.
        self.early = not d.batch_first and d.pick("early", "yes", "no") == "yes"
        self.lead = ("B", "L") if d.batch_first or self.early else ("L", "B")
        self.normed = d.norm == "pre"

    def source(self) -> str:
        """The whole method."""
        lines = [f"def forward(self, {self.signature()}):", block(self.body(), 1)]
        return block(lines)

    def signature(self) -> str:
        d = self.d
        if d.family == "qkv":
            q, k, v = self.sources
            order = d.pick("arguments", "qkv", "qkv", "qkv", "vkq")
            given = [q, k, v] if order == "qkv" else [v, k, q]
        else:
            given = list(dict.fromkeys(self.sources))
        if d.optional_context:
            given[1] += "=None"
        if d.rope == "given":
            given += ["position_embeddings"]
        if d.rope == "complex":
            given += ["freqs_cis"]
        if d.masked:
            given += [d.mask_name if d.required_mask else f"{d.mask_name}=None"]
        if self.second:
            given += [f"{self.second}=None"]
        if d.cache == "object":
            given += [f"{self.cache}=None"]
        if d.cache == "tuple":
            given += [f"{self.past}=None"]
            if self.use_cache:
                given += ["use_cache=True"]
        if self.flag:
            given += [f"{self.flag}=False"]
        if d.returns == "asked":
            given += ["need_weights=True"]
        if d.rope == "given":
            given += ["**kwargs"]
        return ", ".join(given)

    def body(self) -> list[str]:
        return [
            *self._start(),
            *self._project(),
            *self._position(),
            *self._past(),
            *self._share(),
            *self._attend(),
            *self._merge(),
            *self._end(),
        ]

    # -- before the projections --------------------------------------------------------------

    def _start(self) -> list[str]:
        d, lines = self.d, []
        q = self.sources[0]
        if d.residual:
            lines += [f"residual = {q}"]
        if self.early:
            names = list(dict.fromkeys(self.sources))
            turned = ", ".join(f"{name}.transpose(0, 1)" for name in names)
            lines += [f"{', '.join(names)} = {turned}"]
        if d.optional_context and self.normed:
            lines += [f"if {self.other} is None:", f"    {self.other} = self.{d.norm_name}({q})"]
        elif d.optional_context:
            one = f"{self.other} = {q} if {self.other} is None else {self.other}"
            two = f"if {self.other} is None:\n    {self.other} = {q}"
            lines += [d.pick("context default", one, two)]
        if self.normed:
            lines += [f"{q} = self.{d.norm_name}({q})"]
        lines += [f"{', '.join(self.lead)}, _ = {q}.shape"]
        if d.multiples:
            lines += ['assert L % self.window == 0, "the length must be a multiple of the window"']
        return lines

    # -- projections ---------------------------------------------------------------------------

    def _project(self) -> list[str]:
        d = self.d
        if d.projections == "matrices" and self.layer.by_einsum:
            return self._einsums()
        if d.projections == "fused":
            return self._fused()
        if d.projections == "fused by group":
            return self._fused_by_group()
        q, k, v = self.sources
        names = [f"self.{name}({x})" for name, x in zip(d.three, (q, k, v), strict=True)]
        if d.projections == "matrices":
            names = [f"{x} @ self.{n}" for n, x in zip(d.three, (q, k, v), strict=True)]
        if d.projections == "low-rank":
            down, norm, up = d.low_rank
            names[0] = f"self.{up}(self.{norm}(self.{down}({q})))"
        if d.projections == "pair":
            names[0] = f"self.{d.pair[0]}({q})"
        lines = [self._split("q", names[0], self.layer.h)]
        if d.projections == "pair":
            return [*lines, *self._pair(k)]
        return [
            *lines,
            *(self._split(n, e, self.layer.g) for n, e in zip("kv", names[1:], strict=True)),
        ]

    def _lengths(self, name: str) -> str:
        """The axes of tokens and rows of queries, or of keys that may differ in number."""
        if name == "q" or self.d.family not in ("cross", "qkv"):
            return ", ".join(self.lead)
        return ", ".join("B" if each == "B" else "-1" for each in self.lead)

    def _split(self, name: str, given: str, heads: str) -> str:
        """One projection, as heads."""
        d, w = self.d, self.layer.w
        lead = self._lengths(name)
        if d.kind == "single":
            turned = ".transpose(0, 1)" if self.lead[0] == "L" else ""
            return f"{name} = {self._maybe(given)}{turned}"
        turned = d.order.index("dim") < d.order.index("heads") and d.projections == "three"
        first, last = (w, heads) if turned else (heads, w)
        if d.pick("split", "view", "view", "rearrange") == "rearrange":
            letters = "d h" if turned else "h d"
            start = "b n" if self.lead[0] == "B" else "n b"
            end = "b n h d" if d.core == "tokens first" else "b h n d"
            call = f'rearrange({given}, "{start} ({letters}) -> {end}", h={heads}, d={w})'
            return f"{name} = {self._flat(call)}"
        places = {letter: at for at, letter in enumerate(lead_letters(self.lead))}
        places |= {"D": 2, "H": 3} if turned else {"H": 2, "D": 3}
        to = "BLHD" if d.core == "tokens first" else "BHLD"
        viewed = f"{self._maybe(given)}.view({lead}, {first}, {last})"
        right = viewed + moved([places[each] for each in to])
        wrong = {}
        rows = "-1" if "-1" in lead else "L"
        if to == "BHLD" and heads != "1":
            wrong["heads_by_view"] = f"{self._maybe(given)}.reshape(B, {heads}, {rows}, {w})"
        if self.lead[0] == "L":
            plain = ".transpose(1, 2)" if to == "BHLD" else ""
            wrong["rows_for_tokens"] = (
                f"{self._maybe(given)}.reshape(B, {rows}, {heads}, {w}){plain}"
            )
        text = self.pen(right, **wrong)
        return f"{name} = {self._flat(text)}"

    def _maybe(self, given: str) -> str:
        return f"({given})" if " @ " in given else given

    def _flat(self, text: str) -> str:
        """[B, H, L, D] as [BH, L, D], where the inner part is written for that."""
        return f"{text}.flatten(0, 1)" if self.d.core == "flat" else text

    def _fused(self) -> list[str]:
        d, layer = self.d, self.layer
        given, h, g, w = f"self.{d.fused}({self.x})", layer.h, layer.g, layer.w
        if d.kind in ("GQA", "MQA") or (d.cut == "chunk" and d.order[0] == "qkv"):
            if d.kind in ("GQA", "MQA"):
                cut = f".split([{h} * {w}, {g} * {w}, {g} * {w}], dim=-1)"
            else:
                cut = d.pick("cut", ".chunk(3, dim=-1)", f".split({h} * {w}, dim=-1)")
            back = d.order.index("dim") < d.order.index("heads")
            lines = [f"q, k, v = {given}{cut}"]
            if d.kind == "single":
                return [*lines, *self._single_turned()]
            return [
                *lines,
                *(self._cut_heads(n, e, back) for n, e in (("q", h), ("k", g), ("v", g))),
            ]
        if d.kind == "single":
            return self._fused_single(given)
        if d.cut == "chunk of heads":
            lead = ", ".join(self.lead)
            to = "BLHD" if d.core == "tokens first" else "BHLD"
            places = {self.lead[0]: 0, self.lead[1]: 1, "H": 2, "D": 3}
            order = moved([places[each] for each in to])
            lines = [f"qkv = {given}.view({lead}, {h}, 3 * {w}){order}"]
            lines += ["q, k, v = qkv.chunk(3, dim=-1)"]
            return [*lines, *self._flattened()]
        return [*self._fused_view(given), *self._flattened()]

    def _single_turned(self) -> list[str]:
        if self.lead[0] == "B":
            return []
        return ["q, k, v = (each.transpose(0, 1) for each in (q, k, v))"]

    def _flattened(self) -> list[str]:
        if self.d.core != "flat":
            return []
        return ["q, k, v = (each.flatten(0, 1) for each in (q, k, v))"]

    def _cut_heads(self, name: str, heads: str, back: bool) -> str:
        d, w = self.d, self.layer.w
        lead, to = ", ".join(self.lead), "BLHD" if d.core == "tokens first" else "BHLD"
        places = {self.lead[0]: 0, self.lead[1]: 1}
        places |= {"D": 2, "H": 3} if back else {"H": 2, "D": 3}
        sizes = f"{w}, {heads}" if back else f"{heads}, {w}"
        right = f"{name}.reshape({lead}, {sizes})" + moved([places[each] for each in to])
        wrong = {}
        if to == "BHLD" and heads != "1":
            wrong["heads_by_view"] = f"{name}.reshape(B, {heads}, L, {w})"
        if self.lead[0] == "L":
            plain = ".transpose(1, 2)" if to == "BHLD" else ""
            wrong["rows_for_tokens"] = f"{name}.reshape(B, L, {heads}, {w}){plain}"
        return f"{name} = {self._flat(self.pen(right, **wrong))}"

    def _fused_single(self, given: str) -> list[str]:
        """One head: the axes are qkv and dim."""
        lead, w = ", ".join(self.lead), self.layer.w
        sizes = {"qkv": "3", "dim": w}
        order = [each for each in self.d.order if each != "heads"]
        at = order.index("qkv") + 2
        line = f"qkv = {given}.view({lead}, {', '.join(sizes[each] for each in order)})"
        return [line, f"q, k, v = qkv.unbind({at})", *self._single_turned()]

    def _fused_view(self, given: str) -> list[str]:
        d, layer = self.d, self.layer
        sizes = {"qkv": "3", "heads": layer.h, "dim": layer.w}
        to = "BLHD" if d.core == "tokens first" else "BHLD"
        if d.cut == "rearrange":
            start = "b n" if self.lead[0] == "B" else "n b"
            letters = " ".join(LETTER[each] for each in d.order)
            end = "b n h d" if to == "BLHD" else "b h n d"
            pattern = f"{start} ({letters}) -> k {end}"
            return [
                f'qkv = rearrange({given}, "{pattern}", k=3, h={layer.h}, d={layer.w})',
                "q, k, v = qkv[0], qkv[1], qkv[2]",
            ]
        lead = ", ".join(self.lead)
        line = f"qkv = {given}.{d.pick('view', 'view', 'reshape')}({lead}, "
        line += ", ".join(sizes[each] for each in d.order) + ")"
        places = {self.lead[0]: 0, self.lead[1]: 1}
        places |= {
            n: d.order.index(axis) + 2
            for n, axis in zip("THD", ("qkv", "heads", "dim"), strict=True)
        }
        if d.cut == "view":
            order = ", ".join(str(places[each]) for each in "T" + to)
            ends = d.pick("ends", "q, k, v = qkv[0], qkv[1], qkv[2]", "q, k, v = qkv.unbind(0)",
                          "q, k, v = qkv")  # fmt: skip
            return [f"{line}.permute({order})", ends]
        after = [each for each in sorted(places, key=lambda each: places[each]) if each != "T"]
        turned = moved([after.index(each) for each in to])
        lines = [line, f"q, k, v = qkv.unbind({places['T']})"]
        if turned:
            lines += [f"q, k, v = q{turned}, k{turned}, v{turned}"]
        return lines

    def _fused_by_group(self) -> list[str]:
        d, layer, lead = self.d, self.layer, ", ".join(self.lead)
        h, g, w = layer.h, layer.g, layer.w
        line = f"qkv = self.{d.fused}({self.x}).view({lead}, {g}, {h} // {g} + 2, {w})"
        places = {self.lead[0]: 0, self.lead[1]: 1, "H": 2, "D": 3}
        to = "BLHD" if d.core == "tokens first" else "BHLD"
        turned = moved([places[each] for each in to])
        return [
            line,
            f"q = qkv[..., :-2, :].reshape({lead}, {h}, {w}){turned}",
            f"k = qkv[..., -2, :]{turned}",
            f"v = qkv[..., -1, :]{turned}",
        ]

    def _pair(self, source: str) -> list[str]:
        """Keys and values from one projection."""
        d, layer = self.d, self.layer
        given, lead = f"self.{d.pair[1]}({source})", self._lengths("k")
        if d.kind == "single":
            return [f"k, v = {given}.chunk(2, dim=-1)", *self._pair_turned()]
        if d.order == ("qkv", "heads", "dim") and d.pick("pair", "chunk", "view") == "chunk":
            lines = [f"k, v = {given}.chunk(2, dim=-1)"]
            return [*lines, self._split_pair("k"), self._split_pair("v")]
        sizes = {"qkv": "2", "heads": layer.g, "dim": layer.w}
        line = f"kv = {given}.view({lead}, {', '.join(sizes[each] for each in d.order)})"
        places = {self.lead[0]: 0, self.lead[1]: 1}
        places |= {
            n: d.order.index(axis) + 2
            for n, axis in zip("THD", ("qkv", "heads", "dim"), strict=True)
        }
        to = "BLHD" if d.core == "tokens first" else "BHLD"
        order = ", ".join(str(places[each]) for each in "T" + to)
        lines = [f"{line}.permute({order})", "k, v = kv[0], kv[1]"]
        return lines + ["k, v = k.flatten(0, 1), v.flatten(0, 1)"] * (d.core == "flat")

    def _split_pair(self, name: str) -> str:
        d, layer = self.d, self.layer
        places = {self.lead[0]: 0, self.lead[1]: 1, "H": 2, "D": 3}
        to = "BLHD" if d.core == "tokens first" else "BHLD"
        turned = moved([places[each] for each in to])
        return f"{name} = " + self._flat(
            f"{name}.reshape({self._lengths('k')}, {layer.g}, {layer.w}){turned}"
        )

    def _pair_turned(self) -> list[str]:
        return ["k, v = k.transpose(0, 1), v.transpose(0, 1)"] * (self.lead[0] == "L")

    def _einsums(self) -> list[str]:
        """Matrices [E, H, D] by einsum."""
        d = self.d
        end = "blhd" if d.core == "tokens first" else "bhld"
        start = "ble" if self.lead[0] == "B" else "lbe"
        lines = []
        for name, own, source in zip("qkv", d.three, self.sources, strict=True):
            call = f'torch.einsum("{start},ehd->{end}", {source}, self.{own})'
            lines += [f"{name} = {self._flat(call)}"]
        return lines


def lead_letters(lead: tuple[str, str]) -> str:
    return "".join(lead)


def moved(order: list[int]) -> str:
    """A call that brings axes into this order: nothing, a transposition, or a permutation."""
    if order == sorted(order):
        return ""
    swapped = [at for at, axis in enumerate(order) if at != axis]
    if len(swapped) == 2:
        return f".transpose({swapped[0]}, {swapped[1]})"
    return f".permute({', '.join(map(str, order))})"
