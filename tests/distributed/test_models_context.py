"""Context parallel of transformers models against the model in one process.

The oracle is transformers' own attention, in one process, on the whole sequence.
"""

import copy
import functools

import pytest
import torch
import transformers
from torch.distributed.fsdp import fully_shard

from ranks import on_ranks
from regard.convert import as_latent
from regard.distributed import context_parallel, counted, sum_gradients, tensor_parallel
from regard.hf import attention_modules, attention_of, install, place
from session import LONG
from split_models import BUILDERS, SMALL, batch_of, model_of, same_gradients, trained


def _on_shards(mesh, families, cases, installed=False):
    """Logits of all tokens, the loss and all gradients, of each case."""
    results = []
    for family, (length, padded, checkpointed) in [(f, c) for f in families for c in cases]:
        model = model_of(family)
        if installed:
            install(model)
        if checkpointed:
            _checkpoint(model)
        plan = context_parallel(model, mesh)
        results.append(_results(model, plan, batch_of(length, padded)))
    return results


def _results(model, plan, batch):
    out = model(**{name: plan.shard(x) for name, x in batch.items()})
    out.loss.backward()
    sum_gradients(model, plan.ranks.mesh)
    loss = plan.ranks.all_reduce(out.loss.detach(), "loss")
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return plan.gathered(out.logits).detach(), loss, gradients


def _checkpoint(model):
    """By its name of transformers 5.23, or the one before, deprecated there."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()


@functools.cache
def _expected(family, length, padded):
    return trained(model_of(family), batch_of(length, padded))


def _same(result, family, length, padded=False, *_):
    (logits, loss, gradients), whole = result, _expected(family, length, padded)
    real = batch_of(length, padded).get("attention_mask", torch.ones(2, length)).bool()
    torch.testing.assert_close(logits[real], whole[0][real], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(loss, whole[1], atol=2e-6, rtol=1e-6)
    same_gradients(gradients, whole[2])


FEW = ["mistral", "gemma2", "deepseek"]
REST = [family for family in BUILDERS if family not in FEW]
CASES = [
    (2, [*BUILDERS] if LONG else REST, [(13, True, True)], False),
    (3, [*BUILDERS] if LONG else FEW, [(13, False, False)], False),
    (3, ["llama"], [(13, True, False), (4, False, False)], True),
    *([(4, [*BUILDERS], [(17, True, True), (8, False, True)], True)] if LONG else []),
]


def _fewer_tokens_than_pieces(mesh):
    plan = context_parallel(model := model_of("llama"), mesh)
    with pytest.raises(ValueError, match=r"rank 1 has none of the 1 tokens, .* give 4 tokens"):
        model(plan.shard(torch.tensor([[1]])))


def test_a_rank_without_tokens_is_refused_on_every_rank():
    on_ranks(2, _fewer_tokens_than_pieces)


@pytest.mark.parametrize(("number", "families", "cases", "installed"), CASES)
def test_logits_loss_and_gradients(number, families, cases, installed):
    for rank in on_ranks(number, _on_shards, families, cases, installed):
        named = [(family, *case) for family in families for case in cases]
        for each, result in zip(named, rank, strict=True):
            _same(result, *each)


def _packed(mesh, batch, positions, documents):
    model = model_of("mistral")
    plan = context_parallel(model, mesh)
    logits = model(plan.shard(batch), position_ids=plan.shard(positions)).logits
    named = model(plan.shard(batch), documents=plan.shard(documents)).logits
    return plan.layout, plan.gathered(logits).detach(), plan.gathered(named).detach()


def test_packed_documents():
    batch = batch_of(11)["input_ids"]
    ids = torch.tensor([[0] * 4 + [1] * 7, [0] * 6 + [1] * 5])
    positions = torch.tensor([[*range(4), *range(7)], [*range(6), *range(5)]])
    with torch.no_grad():
        whole = model_of("mistral")(batch, position_ids=positions, use_cache=False).logits
    for layout, logits, named in on_ranks(2, _packed, batch, positions, ids):
        assert layout == "contiguous"  # windows bound how far a query sees
        torch.testing.assert_close(logits, whole, atol=2e-5, rtol=1e-5)
        assert not torch.allclose(named[0, 4:], whole[0, 4:])  # positions go on, and rotation
        torch.testing.assert_close(named[0, :4], whole[0, :4], atol=2e-5, rtol=1e-5)


def _placed():
    model = model_of("llama").eval()
    layers = [as_latent(attention_of(each)) for each in attention_modules(model).values()]
    return place(model, layers).train()


def _of_placed(mesh):
    model = _placed()
    return _results(model, context_parallel(model, mesh), batch_of(9))


def test_placed_latent_layers():
    logits, loss, gradients = trained(_placed(), batch_of(9))
    for result in on_ranks(2, _of_placed):
        torch.testing.assert_close(result[0], logits, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(result[1], loss, atol=2e-6, rtol=1e-6)
        same_gradients(result[2], gradients)


def _heads_and_tokens(mesh, family):
    model = model_of(family)
    install(model)
    tensor_parallel(model, mesh["a"])
    plan = context_parallel(model, mesh["b"])
    logits, loss, gradients = _results(model, plan, batch_of(9))
    whole = {n: g for n, g in gradients.items() if not hasattr(g, "full_tensor")}
    return logits, loss, whole


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek"])
def test_heads_and_tokens_split(family):
    logits, loss, gradients = _expected(family, 9, False)
    for result in on_ranks(4, _heads_and_tokens, family, mesh=(2, 2)):
        torch.testing.assert_close(result[0], logits, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(result[1], loss, atol=2e-6, rtol=1e-6)
        same_gradients(result[2], {name: gradients[name] for name in result[2]})


def _fully_sharded(mesh, first):
    """FSDP2 on the same ranks divides the sum of gradients by their number."""
    model, batch = model_of("gpt_oss"), batch_of(9)
    plan = context_parallel(model, mesh) if first else None
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    plan = plan or context_parallel(model, mesh)
    loss = model(**{name: plan.shard(x) for name, x in batch.items()}).loss
    (loss * mesh.size()).backward()
    return {name: each.grad.full_tensor() for name, each in model.named_parameters()}


@pytest.mark.parametrize("first", [True, False])
def test_fsdp_on_the_same_ranks(first):
    for gradients in on_ranks(2, _fully_sharded, first):
        same_gradients(gradients, _expected("gpt_oss", 9, False)[2])


def _bytes(mesh, family):
    model = model_of(family)
    plan = context_parallel(model, mesh)
    batch = {name: plan.shard(x) for name, x in batch_of(13).items()}
    with counted() as forward:
        loss = model(**batch).loss
    with counted() as backward:
        loss.backward()
    return (forward.bytes, backward.bytes), tuple(plan.bytes_sent(2, 13)), repr(plan)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek"])
def test_bytes_are_those_of_the_plan(family):
    for sent, planned, text in on_ranks(2, _bytes, family):
        assert sent == planned
        assert min(sent) > 0
        assert text.startswith("ContextParallel(2 layers, rank ")


def _error(call):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return str(caught.value)


WRONG = {
    "labels": ({"labels": "ids"}, "labels= would be shifted inside each shard"),
    "use_cache": ({"use_cache": True}, "takes no use_cache: calls with shards fill no cache"),
    "attentions": ({"output_attentions": True}, "no rank has the weights of a whole row"),
    "whole mask": ({"attention_mask": "whole"}, "attention_mask is [2, 4] here"),
    "no tokens": ({"input_ids": None}, "one of input_ids= and inputs_embeds="),
}


def _wrong_calls(mesh):
    model = model_of("llama")
    plan = context_parallel(model, mesh)
    whole = batch_of(8)["input_ids"]
    named = {"ids": plan.shard(whole), "whole": whole}
    told = {}
    for name, (given, _) in WRONG.items():
        given = {key: named.get(x, x) if isinstance(x, str) else x for key, x in given.items()}
        told[name] = _error(lambda given=given: model(**({"input_ids": named["ids"]} | given)))
    rank = plan.ranks.rank
    told["unequal rows"] = _error(lambda: model(plan.shard(whole)[: 1 + rank]))
    told["not a shard"] = _error(lambda: model(whole[:, : 3 + 2 * rank]))
    told["one rank"] = _error(lambda: model(plan.shard(whole), use_cache=rank == 1))
    told["generate"] = _error(lambda: model.generate(whole, max_new_tokens=1))
    module = model.model.layers[0].self_attn
    told["alone"] = _error(lambda: module(torch.zeros(1, 2, 24), attention_mask=None))
    return told


def test_wrong_calls_raise_on_every_rank():
    for told in on_ranks(2, _wrong_calls):
        for name, (_, expected) in WRONG.items():
            assert expected in told[name]
            assert told[name].startswith("every rank: ")
        assert told["unequal rows"].startswith("the ranks differ in rows: rank 0 1, rank 1 2")
        assert "here [4, 4] of 8 in layout='zigzag', got [3, 5]" in told["not a shard"]
        assert told["one rank"].startswith("rank 1: a context-parallel LlamaForCausalLM takes no")
        assert "does not generate" in told["generate"]
        assert "call the model that context_parallel was given" in told["alone"]


def _dropping():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, attention_dropout=0.5)
    ).train()


def _dynamic():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return transformers.LlamaModel(transformers.LlamaConfig(**SMALL, rope_parameters=rope))


def _bert():
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    return transformers.BertModel(transformers.BertConfig(**sizes, num_hidden_layers=1))


def _t5():
    sizes = {"d_model": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1, "d_ff": 8, "vocab_size": 9}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def _cohere():
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL))


def _classifier():
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SMALL))


REFUSED = {
    _dynamic: "rope_type='dynamic' change with the length",
    _bert: "BertModel computes more than an output for each token",
    _t5: "T5ForConditionalGeneration has two sequences",
    _cohere: "CohereAttention (2 modules)",
    _classifier: "computes more than an output for each token",
}


def _refusals(mesh):
    transformers.logging.set_verbosity_error()
    told = []
    for build in REFUSED:
        model = build()
        told.append(_error(lambda model=model: context_parallel(model, mesh)))
        assert not any("forward" in vars(each) for each in model.modules())
        assert not model._forward_pre_hooks
    model = model_of("llama")
    plan = context_parallel(model, mesh)
    told.append(_error(lambda: context_parallel(model, mesh)))
    dropping = _dropping()
    plan = context_parallel(dropping, mesh)
    told.append(_error(lambda: dropping(plan.shard(batch_of(8)["input_ids"]))))
    return told


def test_models_that_are_refused():
    for told in on_ranks(2, _refusals):
        for text, expected in zip(told, REFUSED.values(), strict=False):
            assert expected in text
        assert "is context-parallel already" in told[-2]
        assert "dropout of attention weights in training" in told[-1]


def _removed(mesh):
    model, ids = model_of("llama"), batch_of(8)["input_ids"]
    install(model)
    before, names = model(ids).logits, set(vars(model))
    plan = context_parallel(model, mesh)
    twin = copy.deepcopy(model)
    shard = model(plan.shard(ids)).logits
    assert torch.equal(twin(plan.shard(ids)).logits, shard)
    plan.remove()
    assert set(vars(model)) == names
    return torch.equal(model(ids).logits, before), torch.allclose(plan.shard(before), shard, 1e-4)


def test_remove_restores_and_copies_are_parallel():
    assert on_ranks(2, _removed) == [(True, True)] * 2
