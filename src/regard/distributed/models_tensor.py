"""Tensor parallel of a transformers model: heads of its attention, columns of its MLPs.

Attention modules are found by the table of families, linear layers of MLPs by the config's plan
(`base_model_tp_plan`). Embeddings, norms, experts and the head of the model are replicated. A split
module's own code runs on its share: only its children's weights change.
"""

import re
from collections import defaultdict
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from regard.distributed.ranks import Ranks
from regard.distributed.tensor.heads import HeadSplit
from regard.distributed.tensor.layers import (
    Plan,
    Styles,
    kind_of,
    latent_styles,
    objection,
    projection_styles,
    split_styles,
)
from regard.distributed.tensor.linear import CopiedInput, LocalForward, SplitLinear
from regard.distributed.tensor.placing import Placing
from regard.distributed.tensor.weights import Split, SplitStyle, is_split
from regard.hf.families.finding import find, unknown_attention
from regard.hf.families.projecting import Separate
from regard.hf.families.recognising import family_of, known_family
from regard.hf.families.table import Family, is_placed
from regard.hf.running.binding import is_bound
from regard.hf.running.registering import NAME
from regard.matrices import product_objection

OUTPUTS = ("o_proj", "out_proj", "o")  # names of the linear layer that reads the heads' outputs
MLA = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


class LocalSinks(Split):
    """An attention module whose attribute `sinks` holds those of this rank's heads."""

    @property
    def sinks(self) -> Tensor | None:
        return self.local("sinks")


class ModelPlan(Plan):
    """The tensor-parallel plan of a transformers model."""

    def objection(self) -> str | None:
        """Why the model cannot be split; None if it can."""
        found = find(self.module)
        if found.unknown or not found.known:
            return f"{unknown_attention(self.module, found)}; install(model) runs it on one device"
        for name, module in found.known.items():
            if (why := _objection(module, self.ranks.size)) is not None:
                return f"{name} ({type(module).__name__}) {why}"
        for block in mlps(self.module):
            for name in block.linears:
                linear = self.module.get_submodule(name)
                if (why := product_objection(linear)) is not None:
                    return f"{name} {why}; call this before adapters and quantisation are added"
        return None

    def apply(self, mesh: DeviceMesh) -> None:
        """Split the attention modules and the MLPs of the model."""
        for module in find(self.module).known.values():
            split, styles = _styles(module, self.ranks)
            parallelize_module(module, mesh, styles)
            module.head_split = split  # type: ignore[assignment]
            if not is_placed(module) and not known_family(module).latent:
                module.register_forward_pre_hook(share_inputs, with_kwargs=True)
        for block in mlps(self.module):
            block.apply(self.module, mesh, self.ranks)
        if "save_pretrained" not in vars(self.module):  # where `place` refuses it
            save = partial(_save_pretrained, ranks=self.ranks)
            self.module.save_pretrained = MethodType(save, self.module)  # type: ignore[assignment]


def _save_pretrained(model: Any, folder: Any, *, ranks: Ranks, **options: Any) -> None:
    """Write the model of one device, by rank 0; all ranks call this, and return once it is
    written."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = options.pop("state_dict", None) or get_model_state_dict(model, options=whole)
    if ranks.rank == 0:
        type(model).save_pretrained(model, folder, state_dict=weights, **options)
    ranks.all_reduce(torch.zeros(1, device=ranks.mesh.device_type), "end of save_pretrained")


def share_inputs(module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of a split module: all-reduce the gradient of its input once, instead of in
    each child that reads the input."""
    family = family_of(module)
    read = {"hidden_states", *((family.context,) if family else ())}
    shared = module.head_split.shared
    if args:
        args = (shared(args[0]), *args[1:])
    tensors = {name for name in read & given.keys() if isinstance(given[name], Tensor)}
    return args, given | {name: shared(given[name]) for name in tensors}


def _objection(module: Any, size: int) -> str | None:
    """Why the heads of an attention module cannot be split; None if they can."""
    family = known_family(module)
    alone = "leave it on one device, with install alone"
    if is_placed(module):
        optional = ("sinks", "gate_proj")
        has = [name for name in optional if getattr(module, name, None) is not None]
        return f"has {' and '.join(has)}; {alone}" if has else objection(module, size)
    if (words := family.beyond_heads(module)) and "positions" not in words:
        return f"{words}; {alone}"
    runs_on_regard = getattr(module.config, "_attn_implementation", None) == NAME
    if not is_bound(module) and not (runs_on_regard and not family.latent):
        return "does not run on regard; call regard.hf.install(model) first"
    if family.dropout(module):
        return "drops attention weights, alike on all ranks; set that dropout to 0 in the config"
    if family.returns_bias:
        return "adds a bias of all heads to its scores; leave it on one device, with install alone"
    if not family.latent and (why := _projection_objection(family, module)) is not None:
        return f"{why}; leave it on one device, with install alone"
    if is_split(module):
        return "is split already; call this once, and before fully_shard"
    for name in linears_of(family, module):
        if (why := product_objection(module.get_submodule(name))) is not None:
            return f"{name} {why}; call this before adapters, quantisation and hooks are added"
    return None


def _projection_objection(family: Family, module: nn.Module) -> str | None:
    of = family.project.children
    if of is None:
        return "projects queries, keys and values in one linear layer"
    if of.norm == "width":
        return "norms all heads at once"
    if not any(hasattr(module, name) for name in OUTPUTS):
        return "leaves the projection of its output to another module"
    return None


def linears_of(family: Family, module: nn.Module) -> list[str]:
    """The names of the linear layers of an attention module that are split or replicated."""
    of = family.project.children
    names = MLA if family.latent or of is None else (of.q, of.k, of.v, *OUTPUTS)
    return [name for name in names if getattr(module, name, None) is not None]


def _styles(module: Any, ranks: Ranks) -> tuple[HeadSplit, Styles]:
    """The heads of an attention module and the styles of its children."""
    if kind_of(module) is not None:  # placed: the call is that of transformers' modules
        split, styles = split_styles(module, ranks)
        return split, _of_children(styles)
    family = known_family(module)
    heads, kv_heads, head_dim = family.sizes(module)
    split = HeadSplit(heads, heads if family.latent else kv_heads, ranks.size, ranks)
    place = Placing.of(split)
    if family.latent:
        return split, _of_children(latent_styles(module, place))
    of = family.project.children
    assert of is not None
    return split, _styles_of_heads(module, of, place, head_dim)


def _of_children(styles: Styles) -> Styles:
    """The styles without that of the module itself."""
    return {name: style for name, style in styles.items() if name}


def _styles_of_heads(module: Any, of: Separate, place: Placing, head_dim: int) -> Styles:
    (output,) = (name for name in OUTPUTS if hasattr(module, name))
    styles = projection_styles(place, head_dim, (of.q, of.k, of.v, output))
    if of.norm is not None:
        norm = place.whole(LocalForward, summed=True)
        styles |= {"q_norm": norm, "k_norm": norm}
    if module._parameters.get("sinks") is not None:
        styles[""] = SplitStyle(place.split, LocalSinks, {"sinks": place.heads(1)})
    return styles


class Block(NamedTuple):
    """The linear layers of an MLP that are split, by their names in the model."""

    name: str
    columns: tuple[str, ...]  # whose outputs are split
    rows: str  # that reads them

    @property
    def linears(self) -> tuple[str, ...]:
        """The names of all linear layers of the MLP."""
        return (*self.columns, self.rows)

    def apply(self, model: nn.Module, mesh: DeviceMesh, ranks: Ranks) -> None:
        """Split the MLP."""
        width: Any = model.get_submodule(self.rows).in_features
        split = HeadSplit(width, width, ranks.size, ranks)  # a column is a head of one channel
        place = Placing.of(split)
        block: Any = model.get_submodule(self.name)
        alone = {id(each) for name in self.linears for each in model.get_submodule(name).modules()}
        reads_alone = all(id(each) in alone for each in block.modules() if each._parameters)
        columns = place.linear(SplitLinear if reads_alone else CopiedInput, place.heads(1))
        styles: Styles = dict.fromkeys(self.columns, columns)
        parallelize_module(model, mesh, styles | {self.rows: place.output(1)})
        if reads_alone:
            block.head_split = split
            block.register_forward_pre_hook(share_inputs, with_kwargs=True)


def mlps(model: Any) -> list[Block]:
    """The MLPs that the plan in a model's config splits: linear layers by columns, and one by rows
    that reads them."""
    base = getattr(model, model.base_model_prefix, model)
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = next(name for name, each in model.named_modules() if each is base)
    attention = tuple(f"{name}." for name in find(model).known)
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, _ in base.named_modules(prefix=prefix):
        inside = re.sub(r"(?<=\.)\d+(?=\.)", "*", name.removeprefix(f"{prefix}."))
        style = plan.get(inside)  # names of a plan have `*` for the numbers of layers
        if style and not name.startswith(attention):
            groups[name.rpartition(".")[0]][style].append(name)
    return [
        Block(parent, tuple(by["colwise"]), by["rowwise"][0])
        for parent, by in groups.items()
        if by["colwise"] and len(by["rowwise"]) == 1
    ]
