"""The source of a drawing, right or with one fault."""

from dataclasses import dataclass

from strangers.draw import Drawing
from strangers.endings import write_layer
from strangers.functions import write_function, write_kernel
from strangers.latent import write_latent
from strangers.lists import write_list
from strangers.pen import Pen

WRITERS = {
    "layer": write_layer, "cross": write_layer, "qkv": write_layer, "latent": write_latent,
    "list": write_list,
    "function": write_function, "kernel": write_kernel,
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A file.

    Attributes:
        text: its source.
        name: of the attention in it.
        offered: names of the faults that can be put into it.
    """

    text: str
    name: str
    offered: tuple[str, ...]


def write(drawing: Drawing, fault: str = "") -> Source:
    """The source of a drawing, right or with one fault."""
    pen = Pen(fault)
    body = WRITERS[drawing.family](drawing, pen)
    imports = []
    if "@dataclass" in body:
        imports += ["from dataclasses import dataclass", ""]
    if "math." in body:
        imports += ["import math", ""]
    imports += ["import torch"]
    if "F." in body:
        imports += ["import torch.nn.functional as F"]
    if "nn." in body:
        imports += ["from torch import nn"]
    name = function_name(drawing) if drawing.family == "function" else drawing.class_name
    return Source("\n".join(imports) + "\n\n\n" + body, name, tuple(sorted(pen.offered)))


def function_name(drawing: Drawing) -> str:
    """What a function is called."""
    return drawing.pick(
        "function", "attention", "scaled_dot_product", "sdpa", "attend", "dot_product_attention"
    )
