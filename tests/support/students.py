"""A tiny student with damaged attention, its teacher, and a short recipe to heal it by."""

import copy

import torch
from torch import nn

from regard.convert import Recipe
from regard.hf import attention_modules, attention_of
from tiny import tiny, tokens

WINDOWS = tokens(6, 17)
QUICK = Recipe(batch=2, lr=2e-3, positions=1.0)


class Placed(nn.Module):
    """A layer of regard in the place of a module of transformers."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, **given):
        return self.layer(hidden_states), None


def pair(family="llama", placed=False):
    """A teacher, and a student whose keys and values have lost half of their rank."""
    teacher = tiny(family)
    student = copy.deepcopy(teacher)
    for name, module in attention_modules(student).items():
        for each in (module.k_proj, module.v_proj):
            u, s, v = torch.linalg.svd(each.weight.detach(), full_matrices=False)
            each.weight.data = (u[:, :6] * s[:6]) @ v[:6]
        if placed:
            block = student.get_submodule(name.rpartition(".")[0])
            block.self_attn = Placed(attention_of(module))
    return student, teacher


def distance(student, teacher):
    """The divergence of the predictions, in nats a token, by its definition."""
    with torch.no_grad():
        ours, theirs = (m(tokens(3, 19)).logits.double().softmax(-1) for m in (student, teacher))
    return float((theirs * (theirs / ours).log()).sum(-1).mean())


def state_of(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}
