"""Layers under torch's data parallelism as they are: FSDP2, DistributedDataParallel, activation
checkpointing, meta initialisation and distributed checkpoints."""

import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from layers import LAYERS, assert_same, attention, inputs, make, run_in_pieces
from ranks import on_ranks
from regard import KVCache, RelativeBias
from regard.distributed import context_parallel, tensor_parallel
from session import LONG

TOKENS = 7
SOME = ["GQA", "everything", "MLA", "MLA absorbed", "latent KV, normed"]


class Checkpointed(nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


@contextmanager
def _views_allowed():
    """torch warns that outputs of modules that it wraps are views, as those of nn.Linear with a
    bias are. Nothing here writes to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        yield


@_views_allowed()
def _trained(model, x, steps=2):
    """The losses of a few steps of gradient descent, whose gradients the second one sees."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def _whole(model):
    """Parameters and gradients of the whole model."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, x in (name, parameter.detach()), (f"gradient of {name}", parameter.grad):
            found[key] = x.full_tensor() if hasattr(x, "full_tensor") else x
    return found


def _single(name, batch):
    """One process with the whole batch."""
    layer = make(name).train()
    return _trained(layer, inputs(batch, TOKENS)), _whole(layer)


WRAPPINGS = {
    "fully_shard": lambda layer, mesh: fully_shard(layer, mesh=mesh),
    "checkpointed": lambda layer, mesh: fully_shard(Checkpointed(layer), mesh=mesh),
    "checkpoint of shards": lambda layer, mesh: Checkpointed(fully_shard(layer, mesh=mesh)),
    "kept gathered": lambda layer, mesh: fully_shard(layer, mesh=mesh, reshard_after_forward=False),
    "DDP": lambda layer, mesh: DistributedDataParallel(layer, device_mesh=mesh),
}


def _train_all(mesh, names, wrapping):
    results = {}
    rank = mesh.get_local_rank()
    for name in names:
        model = WRAPPINGS[wrapping](make(name).train(), mesh)
        x = inputs(mesh.size(), TOKENS)[rank : rank + 1]
        results[name] = _trained(model, x), _whole(model)
    return results


def _assert_equal_one_process(results, names):
    for name in names:
        losses, parameters = _single(name, len(results))
        assert_same(torch.stack([each[name][0] for each in results]).mean(0), losses)
        for each in results:
            found = {
                key.replace("layer.", "").replace("module.", ""): x
                for key, x in each[name][1].items()
            }
            assert found.keys() == parameters.keys()
            for key, x in parameters.items():
                if x is None:
                    assert found[key] is None
                else:
                    assert_same(found[key], x)


NORMAL = [(2, "fully_shard"), (3, "checkpoint of shards")]
CASES = [(n, each) for n in (2, 3, 4) for each in WRAPPINGS] if LONG else NORMAL


@pytest.mark.parametrize(("number", "wrapping"), CASES)
def test_training_equals_one_process(number, wrapping):
    names = [*LAYERS] if LONG or wrapping == "fully_shard" else SOME
    _assert_equal_one_process(on_ranks(number, _train_all, names, wrapping), names)


def _module_by_module(mesh):
    """Every projection wrapped by itself, then the layer."""
    errors, rank = {}, mesh.get_local_rank()
    for name in LAYERS:
        layer, x = make(name).train(), inputs(mesh.size(), 2)[rank : rank + 1]
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh)
        fully_shard(layer, mesh=mesh)
        if name in ("MLA absorbed", "MLA plain"):
            with pytest.raises(ValueError, match=r"kv_b_proj is a FSDPLinear.*use form='auto'"):
                layer(x)
            continue
        with _views_allowed():
            out = layer(x)
            out.square().mean().backward()
        errors[name] = out.detach() - make(name)(x)
        assert all(each.grad is not None for each in layer.parameters())
    return errors


def test_projections_wrapped_one_by_one():
    for errors in on_ranks(2, _module_by_module):
        for error in errors.values():
            assert_same(error, torch.zeros_like(error))


def _decoded(mesh):
    errors = []
    for name in LAYERS:
        x = inputs(1, 9)
        with torch.no_grad(), _views_allowed():
            layer = fully_shard(make(name), mesh=mesh)
            out = run_in_pieces(layer, x, KVCache(), [4, 5, 6, 7, 8])
            errors.append(out - run_in_pieces(make(name), x, KVCache(), [4, 5, 6, 7, 8]))
    return errors


def test_decoding_steps_of_sharded_layers():
    for errors in on_ranks(3, _decoded):
        for error in errors:
            assert_same(error, torch.zeros_like(error))


def _in_mixed_precision(mesh):
    """Weights and inputs in bfloat16, gradients summed in float32, against one process."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rows, found = inputs(mesh.size(), TOKENS).float(), []
    for name in LAYERS:
        layer = fully_shard(make(name).float(), mesh=mesh, mp_policy=policy)
        gradients = {}
        for rank in range(mesh.size()):
            single = make(name).to(torch.bfloat16)
            out = single(rows[rank : rank + 1].to(torch.bfloat16))
            out.float().square().mean().backward()
            for key, each in single.named_parameters():
                share = each.grad.float() / mesh.size()
                gradients[key] = gradients.get(key, 0) + share
            if rank == mesh.get_local_rank():
                expected = out
        with _views_allowed():
            out = layer(rows[mesh.get_local_rank() :][:1])
            out.float().square().mean().backward()
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, expected)
        for key, each in layer.named_parameters():
            assert each.grad.dtype == torch.float32
            found.append((each.grad.full_tensor(), gradients[key]))
    return found


@pytest.mark.long
def test_mixed_precision_equals_one_process_in_bfloat16():
    for found in on_ranks(2, _in_mixed_precision):
        for gradient, expected in found:
            assert_same(gradient.double(), expected.double(), 1e-6)  # sums of 2 in float32


def _from_meta(mesh):
    """Layers made without memory, sharded, then given memory, values, and those of a whole one."""
    rank, untouched, errors = mesh.get_local_rank(), [], []
    for name in LAYERS:
        with torch.device("meta"):
            layer = LAYERS[name]().double().eval()
        fully_shard(layer, mesh=mesh)
        layer.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(float("nan"))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DTensor random operators may not have complete")
            layer.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
        untouched += [
            key for key, each in _whole(layer).items() if each is not None and each.isnan().any()
        ]
        whole = make(name)
        options = states.StateDictOptions(full_state_dict=True)
        states.set_model_state_dict(layer, whole.state_dict(), options=options)
        x = inputs(mesh.size(), TOKENS)[rank : rank + 1]
        with torch.no_grad():
            errors.append(layer(x) - whole(x))
    return untouched, errors


def test_layers_made_on_the_meta_device():
    for untouched, errors in on_ranks(2, _from_meta):
        assert untouched == []
        for error in errors:
            assert_same(error, torch.zeros_like(error))


def _saved(mesh, folder):
    for name in SOME:
        layer = fully_shard(make(name), mesh=mesh)
        state = states.get_model_state_dict(layer)
        dcp.save(state, checkpoint_id=f"{folder}/{name}", process_group=mesh.get_group())


def _loaded(mesh, folder):
    results = {}
    for name in SOME:
        layer = fully_shard(LAYERS[name]().double(), mesh=mesh)
        state = states.get_model_state_dict(layer)
        dcp.load(state, checkpoint_id=f"{folder}/{name}", process_group=mesh.get_group())
        states.set_model_state_dict(layer, state)
        results[name] = _whole(layer)
    return results


@pytest.mark.long
def test_a_checkpoint_of_two_ranks_is_loaded_on_three_and_on_one(tmp_path):
    on_ranks(2, _saved, str(tmp_path))
    for results in on_ranks(3, _loaded, str(tmp_path)):
        for name, found in results.items():
            for key, whole in make(name).state_dict().items():
                assert torch.equal(found[key], whole)
    for name in SOME:
        state = LAYERS[name]().double().state_dict()
        with pytest.warns(UserWarning, match="load in a single process"):
            dcp.load(state, checkpoint_id=tmp_path / name, no_dist=True)
        for key, whole in make(name).state_dict().items():
            assert torch.equal(state[key], whole)


def _with_a_shared_bias(mesh):
    """Two layers that share a bias have to be of one group of parameters, as torch requires."""

    def build():
        torch.manual_seed(0)
        bias = RelativeBias(4, num_buckets=8, max_distance=6)
        return nn.Sequential(*[attention(score_bias=bias) for _ in range(2)]).double()

    model, rank = build(), mesh.get_local_rank()
    fully_shard([*model], mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = inputs(mesh.size(), TOKENS)
    return _trained(model, x[rank : rank + 1]), _trained(build(), x), _whole(model)


def test_layers_that_share_a_bias():
    results = on_ranks(2, _with_a_shared_bias)
    assert_same(torch.stack([each[0] for each in results]).mean(0), results[0][1])
    assert "gradient of 0.score_bias.relative_attention_bias.weight" in results[0][2]


def _context_parallel(layer, mesh):
    plan = context_parallel(layer, mesh)
    return plan, fully_shard(layer, mesh=mesh)


def _context_parallel_and_checkpointed(layer, mesh):
    plan = context_parallel(layer, mesh)
    return plan, fully_shard(Checkpointed(layer), mesh=mesh)


def _context_parallel_after_wrapping(layer, mesh):
    model = fully_shard(layer, mesh=mesh)
    return context_parallel(layer, mesh), model


def _of_one_sequence(mesh, wrap, names):
    """Gradients where the same ranks share the tokens and the parameters. FSDP2 takes the mean of
    the ranks' gradients, so each gives the mean of its own tokens times their share."""
    results, x = {}, inputs(2, 13)
    for name in names:
        layer = make(name).train()
        plan, model = wrap(layer, mesh)
        with _views_allowed():
            (model(plan.shard(x)).square().sum() * mesh.size()).backward()
        results[name] = _whole(layer)
    return results


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "wrap"),
    [
        (3, _context_parallel),
        (2, _context_parallel_and_checkpointed),
        (2, _context_parallel_after_wrapping),
    ],
)
def test_ranks_that_share_tokens_and_parameters(number, wrap):
    names = [*LAYERS] if LONG else SOME
    for results in on_ranks(number, _of_one_sequence, wrap, names):
        for name in names:
            layer = make(name).train()
            layer(inputs(2, 13)).square().sum().backward()
            for key, x in _whole(layer).items():
                if x is not None:
                    assert_same(results[name][key], x)


def _tensor_parallel(mesh, names, wrapping):
    """Heads split over one dimension of the mesh, rows and parameters over the other."""
    results, row = {}, mesh["a"].get_local_rank()
    for name in names:
        layer = tensor_parallel(make(name).train(), mesh["b"])
        model = WRAPPINGS[wrapping](layer, mesh["a"])
        losses = _trained(model, inputs(2, TOKENS)[row : row + 1])
        state = layer.state_dict()
        other = fully_shard(tensor_parallel(make(name), mesh["b"]), mesh=mesh["a"])
        other.load_state_dict(state)
        with torch.no_grad(), _views_allowed():
            out = other(inputs(2, TOKENS))
        results[name] = losses, {key: x.full_tensor() for key, x in state.items()}, out
    return results


@pytest.mark.long
@pytest.mark.parametrize("wrapping", ["fully_shard", "checkpointed"])
def test_parameters_of_split_heads_sharded(wrapping):
    names = [*LAYERS] if LONG else SOME
    results = on_ranks(4, _tensor_parallel, names, wrapping, mesh=(2, 2))
    for name in names:
        layer = make(name).train()
        losses = _trained(layer, inputs(2, TOKENS))
        assert_same((results[0][name][0] + results[2][name][0]) / 2, losses)
        for each in results:
            _, state, out = each[name]
            assert state.keys() == layer.state_dict().keys()
            for key, x in layer.state_dict().items():
                assert_same(state[key], x)
            assert_same(out, layer(inputs(2, TOKENS)).detach())
