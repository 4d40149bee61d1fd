"""Multi-head latent attention: keys and values from one latent, maybe a rotated part beside."""

from strangers import extras
from strangers.cores import Core, write_core
from strangers.draw import Drawing
from strangers.extras import Sizes
from strangers.pen import Pen, block


class Latent:
    """Writes one module."""

    def __init__(self, drawing: Drawing, pen: Pen) -> None:
        self.d, self.pen, self.sizes = drawing, pen, Sizes(drawing)
        d, add = drawing, self.sizes.add
        names = d.pick("ranks", "deepseek", "short")
        self.width, self.heads = add(d.width_name), add(d.heads_name)
        kv, q = (
            ("kv_lora_rank", "q_lora_rank") if names == "deepseek" else ("d_latent", "d_q_latent")
        )
        self.kv_rank = add(kv)
        self.q_rank = add(q) if d.query_rank else ""
        self.rotated = d.rope != "none"
        nope = "qk_nope_head_dim" if self.rotated else d.dim_name
        self.nope = add(nope)
        self.rope = add("qk_rope_head_dim") if self.rotated else ""
        self.value = add("v_head_dim") if names == "deepseek" else self.nope
        self.past = d.pick("past", "past_kv", "past_key_value", "cache", "kv_cache")

    def constructor(self) -> str:
        d, pen = self.d, self.pen
        lines = [pen("super().__init__()", super_missing=""), f"self.n_heads = {self.heads}"]
        lines += [
            f"self.nope, self.v_dim = {self.nope}, {self.value}",
            f"self.kv_rank = {self.kv_rank}",
        ]
        key = self.nope
        if self.rotated:
            lines += [f"self.rope = {self.rope}"]
            key = f"({self.nope} + {self.rope})"
        lines += [f"self.key_dim = {key.strip('()')}"]
        down, norm, up = d.low_rank
        made = f"{self.heads} * {key}"
        if self.q_rank:
            lines += [f"self.{down} = nn.Linear({self.width}, {self.q_rank}, bias=False)",
                      f"self.{norm} = RMSNorm({self.q_rank})",
                      f"self.{up} = nn.Linear({self.q_rank}, {made}, bias=False)"]  # fmt: skip
        else:
            lines += [f"self.{d.three[0]} = nn.Linear({self.width}, {made}, bias=False)"]
        wide = f"{self.kv_rank} + {self.rope}" if self.rotated else self.kv_rank
        up = f"{self.heads} * ({self.nope} + {self.value})"
        lines += [f"self.kv_down = nn.Linear({self.width}, {wide}, bias=False)",
                  f"self.kv_norm = RMSNorm({self.kv_rank})",
                  f"self.kv_up = nn.Linear({self.kv_rank}, {up}, bias=False)"]  # fmt: skip
        inner = f"{self.heads} * {self.value}"
        lines += [f"self.{d.out_name} = nn.Linear({inner}, {self.width}, bias=False)"]
        return block([f"def __init__(self, {self.sizes.signature()}):", block(lines, 1)])

    def forward(self) -> str:
        d, x = self.d, self.d.x_name
        given = [x]
        if d.masked:
            given += [f"{d.mask_name}=None"]
        if d.cache == "tuple":
            given += [f"{self.past}=None"]
        lines = [f"B, L, _ = {x}.shape", *self._queries(), *self._keys()]
        core = Core(
            d, self.pen, "self.n_heads", "self.key_dim", "(self.n_heads * self.key_dim)", "",
            causal="always" if d.causal == "built" else "never", unequal=d.cache == "tuple",
        )  # fmt: skip
        lines += write_core(core)
        end = "out.transpose(1, 2).reshape(B, L, self.n_heads * self.v_dim)"
        wrong = "out.reshape(B, L, self.n_heads * self.v_dim)"
        lines += [f"out = self.{d.out_name}({self.pen(end, merged_by_view=wrong)})"]
        lines += ["return out, present" if d.cache == "tuple" else "return out"]
        return block([f"def forward(self, {', '.join(given)}):", block(lines, 1)])

    def _queries(self) -> list[str]:
        d, x = self.d, self.d.x_name
        down, norm, up = d.low_rank
        q = (
            f"self.{up}(self.{norm}(self.{down}({x})))"
            if self.q_rank
            else f"self.{d.three[0]}({x})"
        )
        right = f"{q}.view(B, L, self.n_heads, self.key_dim).transpose(1, 2)"
        wrong = f"{q}.view(B, self.n_heads, L, self.key_dim)"
        return [f"q = {self.pen(right, heads_by_view=wrong)}"]

    def _keys(self) -> list[str]:
        d, pen, x = self.d, self.pen, self.d.x_name
        if not self.rotated:
            lines = [f"latent = self.kv_norm(self.kv_down({x}))", *self._past("latent")]
            return [*lines, *self._up(), "k, v = kv.split([self.nope, self.v_dim], dim=-1)"]
        lines = [
            f"latent, k_rope = self.kv_down({x}).split([self.kv_rank, self.rope], dim=-1)",
            "latent = self.kv_norm(latent)",
        ]
        after = ""
        if d.cache == "tuple":
            offset = f"{self.past}[0].shape[1] if {self.past} is not None else 0"
            wrong = {"rope_restarts": "0", "rope_off_by_one": f"max(0, ({offset}) - 1)"}
            lines += [f"offset = {pen(offset, **wrong)}"]
            after = ", offset"
        lines += ["q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)"]
        rotated = f"rotary(k_rope{after})"
        lines += [f"k_rope = {pen(rotated, rope_on_queries_only='k_rope')}"]
        lines += [f"q = torch.cat([q_nope, rotary(q_rope{after})], dim=-1)"]
        lines += [*self._past("latent", "k_rope"), *self._up()]
        shared = "k_rope[:, None].expand(-1, self.n_heads, -1, -1)"
        return [
            *lines,
            "k_nope, v = kv.split([self.nope, self.v_dim], dim=-1)",
            f"k = torch.cat([k_nope, {shared}], dim=-1)",
        ]

    def _up(self) -> list[str]:
        return [
            "kv = self.kv_up(latent).view(B, -1, self.n_heads, self.nope + self.v_dim)",
            "kv = kv.transpose(1, 2)",
            self.pen("", key_heads_swapped="kv = torch.cat([kv.flip(1)[..., : self.nope], "
                     "kv[..., self.nope :]], dim=-1)"),
        ]  # fmt: skip

    def _past(self, *names: str) -> list[str]:
        d, pen = self.d, self.pen
        if d.cache != "tuple":
            return []
        lines = [f"if {self.past} is not None:"]
        for at, name in enumerate(names):
            past = f"{self.past}[{at}]"
            right = f"torch.cat([{past}, {name}], dim=1)"
            wrong = f"torch.cat([{name}, {past}], dim=1)"
            lines += [f"    {name} = {pen(right, cache_reversed=wrong, cache_dropped=name)}"]
        return [*lines, f"present = ({', '.join(names)},)"]


def write_latent(drawing: Drawing, pen: Pen) -> str:
    """The source of a module with a latent."""
    latent = Latent(drawing, pen)
    body = f"{latent.constructor()}\n\n{latent.forward()}"
    indented = "\n".join("    " + line if line else "" for line in body.splitlines())
    parts = [latent.sizes.config_class(), extras.RMS_NORM]
    if drawing.rope != "none":
        parts += [extras.rotation(drawing)]
    parts += [f"class {drawing.class_name}(nn.Module):\n{indented}\n"]
    return "\n\n\n".join(each.strip("\n") for each in parts if each) + "\n"
