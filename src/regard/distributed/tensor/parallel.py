"""Tensor parallel: the heads of every layer split over the ranks of a mesh."""

from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from regard.distributed.context.agreement import agree
from regard.distributed.ranks import Ranks
from regard.distributed.tensor.layers import Plan, kind_of

Module = TypeVar("Module", bound=nn.Module)


def tensor_parallel(module: Module, mesh: DeviceMesh) -> Module:
    """A layer, or every attention layer inside a model, with its heads split over ranks.

    As Megatron splits them (Shoeybi et al. 2019, arXiv:1909.08053): each rank has the rows of the
    projections that make its heads and the columns of `o_proj` that read them, and the outputs are
    summed. All ranks call this, with the same module, whose weights become those of rank 0 of the
    mesh; from then on all give a layer the same input and get the same output. Other modules stay
    as they are. Called before `fully_shard`, which takes another dimension of the mesh.

    Key heads fewer than ranks are replicated, and their gradients summed. Numbers of heads need not
    divide: ranks are filled up with heads whose weights are zero (see `HeadLayout`). Of multi-head
    latent attention the heads are split and the latents replicated. A cache holds the key heads of
    its rank, and `layer.weights` returns the weights of its query heads. With dropout, each rank
    draws its own random numbers.

    The parameters are DTensors, of which each layer computes with the share of this rank. State
    dicts have the names, shapes and values of one device; where heads are padded, `state_dict` is
    called by all ranks together.
    `load_state_dict` takes such state dicts, and those of one device. The states of optimizers are
    those of the weights as they are stored, with padding: load them on as many ranks. Fused and
    foreach optimizers take no mixture of tensors and DTensors, but two groups of parameters;
    `clip_gradients` clips both.

    Of a model of transformers that runs on regard, the MLPs are split too, as the plan in its
    config says; embeddings, experts and the last projection are replicated. `generate` is called on
    all ranks, which give the same tokens, and `save_pretrained` writes the model of one device. A
    program for `torchrun --nproc-per-node 2`:

        model, tokenizer = regard.hf.smollm2()
        regard.hf.install(model)
        tensor_parallel(model, init_device_mesh("cpu", (2,)))
        ids = tokenizer("The quick brown fox jumps", return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=5, do_sample=False)
        print(tokenizer.decode(out[0]))

    Args:
        module: a layer of regard, a model that contains some, or a model of transformers with
            `regard.hf.install`. Changed in place.
        mesh: of one dimension, such as `init_device_mesh("cpu", (2,))`, or one of several.

    Returns:
        `module`.

    Raises:
        TypeError: if `mesh` is no mesh.
        ValueError: on every rank, if the mesh has one rank or several dimensions, a layer cannot
            be split, there is none, or the ranks have other layers. Nothing has been changed then.

    Examples:
        >>> from regard import Attention
        >>> from regard.distributed import tensor_parallel
        >>> try:
        ...     tensor_parallel(Attention(8, 2), mesh=None)
        ... except TypeError:
        ...     print('a mesh: init_device_mesh("cpu", (2,))')
        a mesh: init_device_mesh("cpu", (2,))
    """
    ranks, refusal, plans = Ranks(mesh), None, {}
    try:
        plans = _checked(module, ranks)
    except ValueError as error:
        refusal = error
    facts = {f"module {name or type(module).__name__}": _facts(p) for name, p in plans.items()}
    agree(ranks, facts, refusal=refusal)
    for plan in plans.values():
        plan.apply(mesh)
    return module


def _checked(module: nn.Module, ranks: Ranks) -> dict[str, Plan]:
    """The plans, all of which can be carried out."""
    plans = plans_of(module, ranks)
    if not plans:
        raise ValueError(
            f"{type(module).__name__} contains no attention layer that can be split, so that "
            "nothing would be sent; give a layer of regard, or a model that contains some"
        )
    for name, plan in plans.items():
        if (why := plan.objection()) is not None:
            kind = type(plan.module).__name__
            where = f"{name} ({kind})" if name else kind
            raise ValueError(f"{where} cannot be split: {why}")
    return plans


def _facts(plan: Plan) -> str:
    """The facts on which ranks must agree before weights are sent: the kind, and all shapes."""
    shapes = [f"{n} {list(p.shape)} {p.dtype}" for n, p in plan.module.named_parameters()]
    return f"{type(plan.module).__name__} of {', '.join(shapes)}"


def plans_of(module: nn.Module, ranks: Ranks) -> dict[str, Plan]:
    """The plans of a model's modules, by name. Modules inside a module with a plan have none."""
    found: dict[str, Plan] = {}
    for name, each in module.named_modules():
        if any(name.startswith(f"{above}.") or not above for above in found):
            continue
        if kind_of(each) is not None:
            found[name] = Plan(each, ranks)
        elif is_of_transformers(each):
            from regard.distributed.models_tensor import ModelPlan  # imports transformers' tables

            found[name] = ModelPlan(each, ranks)
    return found


def is_of_transformers(model: object) -> bool:
    """Whether this is a model of transformers: a class of its package with a config."""
    packages = (each.__module__.partition(".")[0] for each in type(model).__mro__)
    return isinstance(model, nn.Module) and hasattr(model, "config") and "transformers" in packages
