"""Modules with a module for each head, as tutorials write them first."""

from strangers.cores import Core, write_core
from strangers.draw import Drawing
from strangers.extras import Sizes
from strangers.pen import Pen, block


def write_list(drawing: Drawing, pen: Pen) -> str:
    """The source of a head and of the module that holds several."""
    return List(drawing, pen).source()


class List:
    """Writes both modules."""

    def __init__(self, drawing: Drawing, pen: Pen) -> None:
        self.d, self.pen, self.sizes = drawing, pen, Sizes(drawing)
        d, add = drawing, self.sizes.add
        self.width, self.heads = add(d.width_name), add(d.heads_name)
        self.rate = d.dropout and add(d.pick("rate", "dropout", "drop"), "float", "0.0")
        self.longest = d.causal == "buffer" and add(
            d.pick("longest", "context_length", "block_size", "max_len"),
            default="" if d.config != "plain" else d.pick("n", "", "256"),
        )
        self.name = d.pick("head", "Head", "AttentionHead", "SingleHead")

    def source(self) -> str:
        config = self.sizes.config_class()
        classes = [self._head(), self._whole()]
        return "\n\n\n".join(each.strip("\n") for each in [config, *classes] if each) + "\n"

    def _head(self) -> str:
        d, pen = self.d, self.pen
        given = ["width", "head_size"]
        lines = [pen("super().__init__()", super_missing="")]
        bias = f", bias={d.bias}" if d.pick("bias", "yes", "no") == "yes" else ""
        lines += [f"self.{name} = nn.Linear(width, head_size{bias})" for name in d.three]
        if self.rate:
            given += ["dropout"]
            lines += [
                "self.p = dropout" if d.core == "sdpa" else "self.dropout = nn.Dropout(dropout)"
            ]
        if d.causal == "buffer":
            given += ["longest"]
            ones = "torch.ones(longest, longest)"
            made = pen(
                f"torch.tril({ones})",
                causal_future=f"torch.tril({ones}, diagonal=1)",
                causal_own_hidden=f"torch.tril({ones}, diagonal=-1)",
            )
            lines += [f'self.register_buffer("tril", {made})']
        head = block([f"def __init__(self, {', '.join(given)}):", block(lines, 1)])
        return _class(self.name, head, self._forward())

    def _forward(self) -> str:
        d, x = self.d, self.d.x_name
        names = d.pick("order", "qkv", "kqv")
        of = dict(zip("qkv", d.three, strict=True))
        lines = [f"{each} = self.{of[each]}({x})" for each in names]
        core = Core(
            d, self.pen, "1", "q.shape[-1]", f"{x}.shape[-1]", "",
            dropout=("self.p" if d.core == "sdpa" else "self.dropout.p") if self.rate else "",
            module="dropout" if self.rate and d.core != "sdpa" else "",
            causal="never" if d.causal == "never" else "always",
            buffer="tril" if d.causal == "buffer" else "",
        )  # fmt: skip
        lines += [*write_core(core), "return out"]
        mask = f", {d.mask_name}=None" if d.masked else ""
        return block([f"def forward(self, {x}{mask}):", block(lines, 1)])

    def _whole(self) -> str:
        d, pen, x = self.d, self.pen, self.d.x_name
        own = f"{self.width} // {self.heads}"
        given = [self.width, own, self.rate, self.longest]
        made = f"{self.name}({', '.join(each for each in given if each)})"
        lines = [pen("super().__init__()", super_missing="")]
        lines += [f"self.heads = nn.ModuleList([{made} for _ in range({self.heads})])"]
        if d.output:
            lines += [f"self.{d.out_name} = nn.Linear({self.width}, {self.width})"]
        constructor = block([f"def __init__(self, {self.sizes.signature()}):", block(lines, 1)])
        mask = f", {d.mask_name}" if d.masked else ""
        call = pen(f"head({x}{mask})", one_head_for_all=f"self.heads[0]({x}{mask})")
        lines = [f"out = torch.cat([{call} for head in self.heads], dim=-1)"]
        if d.output:
            lines += [f"out = self.{d.out_name}(out)"]
        mask = f", {d.mask_name}=None" if d.masked else ""
        method = block([f"def forward(self, {x}{mask}):", block([*lines, "return out"], 1)])
        return _class(d.class_name, constructor, method)


def _class(name: str, *methods: str) -> str:
    inner = "\n\n".join(methods)
    indented = "\n".join("    " + line if line else "" for line in inner.splitlines())
    return f"class {name}(nn.Module):\n{indented}\n"
