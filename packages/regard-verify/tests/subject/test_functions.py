"""Functions with the signatures of other libraries are called as these libraries are."""

from dataclasses import replace

import pytest
import torch

import foreign
from covering import few
from regard_verify import Conventions, check, understand
from regard_verify.subject.modules import set_dropout


def broken(report):
    assert not report.problem
    return report.failed


ABILITIES = {
    foreign.flash_attn_func: ("BLHD", "causal window scale softcap dropout gqa cross"),
    foreign.memory_efficient_attention: ("BLHD", "bias scale dropout mask cross"),
    foreign.values_first: ("BHLD", "mask cross wide"),
    foreign.of_a_module: ("BHLD", "mask scale gqa cross"),
    foreign.required_mask: ("BHLD", "mask cross"),
    foreign.Temperature: ("BHLD", "cross"),
    foreign.unscaled: ("BHLD", "scale cross"),
    foreign.eager: ("BHLD", "causal scale dropout cross"),
    foreign.DotProduct: ("BHLD", "mask cross several_heads"),
    foreign.partial: ("BLHD", "causal window softcap dropout gqa"),
    foreign.holder.attend: ("BHLD", "causal"),
    foreign.Holder: ("BHLD", "cross"),
    foreign.compiled: ("BHLD", "causal cross"),
    foreign.operator: ("BHLD", "cross"),
    foreign.packet: ("BHLD", "cross"),
    foreign.scripted: ("BHLD", "cross"),
    foreign.Applied: ("BHLD", "cross"),
}


@pytest.mark.parametrize(
    "target", few(ABILITIES, 3), ids=lambda each: getattr(each, "__name__", type(each).__name__)
)
def test_what_a_function_can_do_is_found_out(target):
    subject = understand(target)
    layout, abilities = ABILITIES[target]
    assert subject.kind == "function"
    assert subject.conventions.layout == layout
    missing = [name for name in abilities.split() if not getattr(subject.has, name)]
    assert not missing, missing


@pytest.mark.parametrize(
    "target", few(ABILITIES, 3), ids=lambda each: getattr(each, "__name__", type(each).__name__)
)
def test_right_functions_break_no_law(target):
    report = check(target, quick=True)
    assert broken(report) == []
    assert len(report.having("passed")) > 10


def test_a_mask_that_is_required_and_not_none_shows_all_keys_at_first():
    subject = understand(foreign.required_mask)
    assert (subject.form.argument, subject.form.polarity) == ("padding_mask", "drop")


def test_a_wrong_window_is_noticed():
    def one_too_wide(q, k, v, causal=False, window_size=(-1, -1)):
        left, right = window_size
        window = (left + 1 if left >= 0 else left, right)
        return foreign.flash_attn_func(q, k, v, causal=causal, window_size=window)

    assert "window_edges" in broken(check(one_too_wide, only=["window_edges"]))


def test_other_inputs_are_asked_for_in_a_sentence():
    def packed(q, kv, causal=False):
        return foreign.flash_attn_func(q, *kv.unbind(2), causal=causal)

    def side_by_side(q, k, v):
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (q, k, v))
        return torch.bmm(q.flatten(0, 1), v.flatten(0, 1))

    for target in (packed, side_by_side):
        report = check(target, quick=True)
        assert "name a function of q, k and v" in report.problem
        assert not report.failed
    declared = check(side_by_side, {"layout": "BLE"}, quick=True)
    assert "BLE is declared: name a function of q, k and v" in declared.problem


def test_a_module_without_weights_is_called_in_eval_mode():
    subject = understand(foreign.DotProduct)
    assert subject.module is None
    assert not subject.thing.training
    twin = subject.another()
    assert set_dropout(twin, 0.5) and twin.drop.p == 0.5
    q, k, v = torch.randn(3, 1, 2, 3, 4).unbind()
    twin.eval()
    assert torch.equal(replace(subject.attend, target=twin)(q, k, v), subject.attend(q, k, v))


def test_a_kind_that_is_declared_is_honoured():
    class WithWeights(foreign.DotProduct):
        def __init__(self):
            super().__init__()
            self.temperature = torch.nn.Parameter(torch.ones(1))

    assert understand(WithWeights, Conventions(kind="function")).kind == "function"


@pytest.mark.parametrize("path", ["holder.attend", "layers.plain", "packet.default"])
def test_attributes_of_objects_are_named(path):
    subject = understand(f"{foreign.__file__}:{path}")
    assert subject.kind == "function"
    assert subject.conventions.layout == "BHLD"
