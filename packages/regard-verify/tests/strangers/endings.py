"""What a module with weights does between its projections and its return."""

from strangers import extras
from strangers.cores import Core, write_core
from strangers.draw import Drawing
from strangers.forwards import Forward
from strangers.inner import hidden, under, visible
from strangers.layers import Layer
from strangers.pen import Pen


class Whole(Forward):
    """Writes the whole method."""

    def _position(self) -> list[str]:
        d, pen = self.d, self.pen
        lines = []
        if d.qk_norm:
            lines += ["q = self.q_norm(q)", "k = self.k_norm(k)"]
        if d.rope == "given":
            lines += ["cos, sin = position_embeddings"]
            lines += [
                pen(
                    "q, k = apply_rotary_pos_emb(q, k, cos, sin)",
                    rope_on_values="q, v = apply_rotary_pos_emb(q, v, cos, sin)",
                )
            ]
        elif d.rope == "complex":
            lines += [
                pen(
                    "q, k = apply_rotary_emb(q, k, freqs_cis)",
                    rope_on_values="q, v = apply_rotary_emb(q, v, freqs_cis)",
                    rope_on_queries_only="q, _ = apply_rotary_emb(q, k, freqs_cis)",
                )
            ]
        elif d.rope != "none":
            lines += self._rotated()
        return lines

    def _rotated(self) -> list[str]:
        d, pen = self.d, self.pen
        offset = {
            "none": "",
            "tuple": f"{self.past}[0].shape[-2] if {self.past} is not None else 0",
            "object": f"{self.cache}.{extras.cache_length(d)}(self.layer_idx) "
            f"if {self.cache} is not None else 0",
        }[d.cache]
        after, lines = "", []
        if offset:
            wrong = {"rope_restarts": "0", "rope_off_by_one": f"max(0, ({offset}) - 1)"}
            lines += [f"offset = {pen(offset, **wrong)}"]
            after = ", offset"

        def turned(name: str) -> str:
            if d.table != "none":
                inner = f"{name}.transpose(1, 2)" if d.core == "tokens first" else name
                back = ".transpose(1, 2)" if d.core == "tokens first" else ""
                return f"{name} = self.rotary({inner}{after}){back}"
            if d.core == "tokens first":
                return f"{name} = rotary({name}.transpose(1, 2){after}).transpose(1, 2)"
            return f"{name} = rotary({name}{after})"

        lines += [turned("q"), pen(turned("k"), rope_on_queries_only="")]
        return [*lines, pen("", rope_on_values=turned("v"))]

    def _past(self) -> list[str]:
        d, pen = self.d, self.pen
        if d.cache == "object":
            call = f"{self.cache}.update(k, v, self.layer_idx)"
            line = pen(f"k, v = {call}", cache_not_read=call)
            return [f"if {self.cache} is not None:", f"    {line}"]
        if d.cache != "tuple":
            return []
        past_k, past_v = f"{self.past}[0]", f"{self.past}[1]"
        k, v = extras.joined(pen, "k", "v", past_k, past_v)
        present = "(k, v) if use_cache else None" if self.use_cache else "(k, v)"
        return [
            f"if {self.past} is not None:",
            f"    k = {k}",
            f"    v = {v}",
            f"present = {present}",
        ]

    def _share(self) -> list[str]:
        """One key head for several query heads."""
        d, pen, layer = self.d, self.pen, self.layer
        axis = "2" if d.core == "tokens first" else "1"
        flip = f"k = k.flip({axis})"
        if d.core == "flat":
            flip = "k = k.unflatten(0, (B, -1)).flip(1).flatten(0, 1)"
        lines = [] if d.kind in ("single", "MQA") else [pen("", key_heads_swapped=flip)]
        if d.kind == "MQA":
            sizes = f"-1, -1, {layer.h}, -1" if axis == "2" else f"-1, {layer.h}, -1, -1"
            wide = f"k, v = k.expand({sizes}), v.expand({sizes})"
            return [*lines, wide if d.core == "sdpa" else d.pick("mqa", "", wide)]
        if d.kind != "GQA":
            return lines
        times = f"{layer.h} // {layer.g}"
        if d.core == "grouped":
            right = f"q.unflatten(1, ({layer.g}, {times}))"
            tiled = f"q.unflatten(1, ({times}, {layer.g})).transpose(1, 2)"
            return [*lines, f"q = {pen(right, groups_tiled=tiled)}"]
        if self.repeats:
            return [*lines, f"k = repeat_kv(k, {times})", f"v = repeat_kv(v, {times})"]
        for name in "kv":
            right = f"{name}.repeat_interleave({times}, dim={axis})"
            sizes = f"1, 1, {times}, 1" if axis == "2" else f"1, {times}, 1, 1"
            tiled = f"{name}.repeat({sizes})"
            wrong = {"groups_tiled": tiled} | ({"values_tiled": tiled} if name == "v" else {})
            lines += [f"{name} = {pen(right, **wrong)}"]
        return lines

    @property
    def repeats(self) -> bool:
        """Whether the file has a function that repeats key heads."""
        d = self.d
        return (
            d.kind == "GQA"
            and d.core not in ("tokens first", "grouped")
            and d.pick("shared", "yes", "no") == "yes"
        )

    def _attend(self) -> list[str]:
        d, layer = self.d, self.layer
        unequal = d.cache != "none" or d.family in ("qkv", "cross")
        causal = {
            "never": "never",
            "buffer": "always",
            "built": "always",
            "blocks": "always",
            "option": "self.causal",
            "argument": self.flag,
        }[d.causal]
        if d.core == "sdpa" and causal == "always" and not (unequal or d.masked or self.second):
            causal = (
                d.pick("plain causal", "plain", "plain", "always")
                if d.causal == "built"
                else causal
            )
        core = Core(
            d,
            self.pen,
            layer.h,
            layer.w,
            "" if d.kind == "single" else f"{layer.h} * {layer.w}",
            layer.scale,
            dropout=("self.p" if d.core == "sdpa" else "self.dropout.p") if layer.rate else "",
            module="dropout" if layer.rate and d.core != "sdpa" else "",
            causal=causal,
            buffer=layer.buffer if d.causal == "buffer" else "",
            second=self.second,
            unequal=unequal,
        )
        return write_core(core)

    def _merge(self) -> list[str]:
        """Heads side by side again."""
        d, layer, pen = self.d, self.layer, self.pen
        if d.kind == "single":
            return []
        inner = f"{layer.h} * {layer.w}"
        lead = ", ".join(self.lead)
        lines = [f"out = out.view(B, {layer.h}, -1, {layer.w})"] if d.core == "flat" else []
        if d.core == "tokens first":
            end = d.pick("merge", "out.flatten(2)", f"out.reshape(B, L, {inner})")
            if self.lead[0] == "L":
                end = f"out.transpose(0, 1).reshape(L, B, {inner})"
            return [f"out = {end}"]
        if self.lead[0] == "L":
            return [*lines, f"out = out.permute(2, 0, 1, 3).reshape({lead}, {inner})"]
        right = d.pick(
            "merge",
            f"out.transpose(1, 2).contiguous().view(B, L, {inner})",
            f"out.transpose(1, 2).reshape(B, L, {inner})",
            "out.transpose(1, 2).flatten(2)",
            'rearrange(out, "b h n d -> b n (h d)")',
        )
        wrong = f"out.reshape(B, L, {inner})"
        return [*lines, f"out = {pen(right, merged_by_view=wrong)}"]

    def _end(self) -> list[str]:
        d, layer, pen, lines = self.d, self.layer, self.pen, []
        if d.kind == "single" and self.lead[0] == "L":
            lines += ["out = out.transpose(0, 1)"]
        if d.gate:
            lines += [f"out = out * torch.sigmoid(self.gate({self.x}))"]
        if d.output:
            lines += [f"out = self.{d.out_name}(out)"]
        if self.early:
            lines += ["out = out.transpose(0, 1)"]
        if d.residual:
            right = "out = residual + out"
            lines += [pen(right, input_in_place="out = residual.add_(out)")]
        if d.norm == "post":
            lines += [f"out = self.{d.norm_name}(out)"]
        if d.zeroed:
            lines += self._zeroed()
        results = ["out"]
        if d.returns == "asked":
            mean = (
                d.pick("mean", "weights.mean(dim=1)", "weights") if d.core != "flat" else "weights"
            )
            return [*lines, f"return out, ({mean} if need_weights else None)"]
        if d.returns == "weights":
            if d.core == "flat":
                lines += [f"weights = weights.view(B, {layer.h}, *weights.shape[1:])"]
            results += ["weights"]
        if d.returns == "optional":
            results += ["None" if d.core == "sdpa" else d.pick("given weights", "weights", "None")]
        if d.cache == "tuple":
            results += ["present"]
        return [*lines, f"return {', '.join(results)}"]

    def _zeroed(self) -> list[str]:
        """The outputs of hidden tokens become 0."""
        cells = hidden(self.d.mask, f"{self.d.mask_name}", self.d)
        real = visible(self.d.mask, f"{self.d.mask_name}", self.d)
        right = f"out = out.masked_fill(({cells})[..., None], 0.0)"
        line = self.pen(right, real_zeroed=f"out = out.masked_fill(({real})[..., None], 0.0)")
        given = "always" if self.d.required_mask else f"{self.d.mask_name} is not None"
        return under(given, [line])


def write_layer(drawing: Drawing, pen: Pen) -> str:
    """The source of a module with weights."""
    layer = Layer(drawing, pen)
    whole = Whole(layer)
    constructor = layer.constructor()
    if drawing.rope == "given" or drawing.cache == "object":
        first, *rest = constructor.splitlines()
        first = first.replace("):", ", layer_idx=0):")
        constructor = "\n".join([first, *rest, "        self.layer_idx = layer_idx"])
        constructor = constructor.replace("        self.layer_idx", "    self.layer_idx")
    body = f"{constructor}\n\n{whole.source()}"
    text = f"class {drawing.class_name}(nn.Module):\n{block_of(body)}\n"
    parts = []
    if config := layer.sizes.config_class():
        parts += [config]
    if "RMSNorm(" in text:
        parts += [extras.RMS_NORM]
    if drawing.conv:
        parts += [extras.CONV]
    if "rearrange(" in text:
        parts += [extras.REARRANGE]
    if drawing.rope == "given":
        parts += [extras.given_rotation(pen)]
    elif drawing.rope == "complex":
        parts += [extras.COMPLEX]
    elif drawing.rope != "none":
        parts += [extras.rotation(drawing)]
    if drawing.causal == "blocks":
        parts += [extras.blocks(pen)]
    if whole.repeats:
        parts += [extras.repeat_kv(drawing, pen)]
    if drawing.cache == "object":
        parts += [extras.cache_class(drawing, pen)]
    return "\n\n\n".join(each.strip("\n") for each in [*parts, text]) + "\n"


def block_of(text: str) -> str:
    return "\n".join("    " + line if line.strip() else "" for line in text.splitlines())
