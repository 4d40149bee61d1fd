"""Formulas against Python's own arithmetic, an evaluator of their JSON, and their text."""

import json
import math
import pickle
import random
import re
from fractions import Fraction

import pytest

from regard.plan.cost import formulas, sizes
from regard.plan.formula import (
    Formula,
    ceil_div,
    floor_div,
    maximum,
    minimum,
    number,
    power_of_two,
    size,
)
from regard.plan.shapes import STORAGES, LayerShape

NAMES = {"batch": 3, "context": 1000, "head_dim": 7, "tp": 4}
LAYERS = [
    LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=8, window=9),
    LayerShape(
        hidden_size=64,
        num_heads=8,
        num_kv_heads=8,
        head_dim=12,
        v_head_dim=8,
        kv_lora_rank=9,
        q_lora_rank=5,
        qk_rope_head_dim=4,
    ),
    LayerShape(hidden_size=6, num_heads=3, num_kv_heads=1, head_dim=5, v_head_dim=5, chunk=4),
]


def drawn(rng: random.Random, depth: int) -> Formula:
    """A random formula of whole numbers."""
    if not depth or rng.random() < 0.15:
        return size(rng.choice(list(NAMES))) if rng.random() < 0.6 else number(rng.randint(0, 9))
    first, other = drawn(rng, depth - 1), drawn(rng, depth - 1)
    return rng.choice(
        [
            lambda: first + other,
            lambda: first - other,
            lambda: first * other,
            lambda: minimum(first, other),
            lambda: maximum(first, other, 2),
            lambda: ceil_div(first, rng.randint(1, 5)),
            lambda: floor_div(first, rng.randint(1, 5)),
            lambda: power_of_two(minimum(first, 10**6)),
        ]
    )()


def of_json(node, sizes):
    """The value of a formula's JSON, by fractions and loops: nothing of the module."""
    if isinstance(node, str):
        return Fraction(sizes[node])
    if not isinstance(node, list):
        return Fraction(node)
    operation, *nodes = node
    values = [of_json(each, sizes) for each in nodes]
    result = values[0]
    if operation == "power_of_two":
        result = Fraction(1)
        while result < values[0]:
            result *= 2
    for value in values[1:]:
        result = {
            "+": lambda a, b: a + b,
            "-": lambda a, b: a - b,
            "*": lambda a, b: a * b,
            "min": min,
            "max": max,
            "ceil_div": lambda a, b: Fraction(math.ceil(a / b)),
            "floor_div": lambda a, b: Fraction(math.floor(a / b)),
        }[operation](result, value)
    return result


def of_text(text):
    """The value of a formula's text with all numbers in it, as Python reads it."""
    code = re.sub(r"\d+", r"Fraction(\g<0>)", text.replace(" x ", " * "))

    def power(value):
        return Fraction(2 ** max(0, math.ceil(value) - 1).bit_length())

    known = {"Fraction": Fraction, "ceil": math.ceil, "floor": math.floor, "power_of_two": power}
    return eval(code, {**known, "min": min, "max": max})


@pytest.mark.parametrize("seed", range(20))
def test_values_json_and_text_agree(seed):
    rng = random.Random(seed)
    for _ in range(30):
        formula = drawn(rng, 4)
        value = formula.evaluate(**NAMES)
        assert isinstance(value, int)
        assert value == of_json(json.loads(json.dumps(formula.to_json())), NAMES)
        assert value == of_text(formula.with_numbers(**NAMES))
        assert formula.names() <= NAMES.keys()


@pytest.mark.parametrize("layer", LAYERS, ids=["window", "MLA", "chunk"])
@pytest.mark.parametrize("storage", STORAGES.values(), ids=list(STORAGES))
def test_the_formulas_of_costs_agree_too(layer, storage):
    for context, tp, cp in ((1, 1, 1), (300, 1, 1), (1001, 3, 2)):
        numbers = sizes(layer, storage, context=context, batch=2, tp=tp, cp=cp)
        for formula in formulas(layer, storage).values():
            value = formula.evaluate(**numbers)
            assert value == of_json(formula.to_json(), numbers)
            assert value == of_text(formula.with_numbers(**numbers))


def test_numbers_on_either_side():
    context = size("context")
    assert (2 * context + 1 - (3 - context)).evaluate(context=10) == 28
    assert (context * 0.5).evaluate(context=5) == 2.5
    assert (1 + context).evaluate(context=2**80) == 2**80 + 1  # exact


def test_the_text_has_the_parentheses_that_it_needs():
    a, b, c = map(size, "abc")
    assert repr((a + b) * c - (a - (b - c))) == "(a + b) x c - (a - (b - c))"
    assert repr(a - b - c) == "a - b - c"
    assert repr(a * (b * c) + (a + b)) == "a x b x c + a + b"
    assert repr(ceil_div(a + b, b * c)) == "ceil((a + b) / (b x c))"
    assert repr(ceil_div(a * b, 8)) == "ceil(a x b / 8)"
    assert repr(floor_div(a, b - c)) == "floor(a / (b - c))"


def test_divisions_by_one_are_not_written():
    shared = ceil_div(size("num_heads") + 1, size("tp")) * 2
    assert shared.with_numbers(tp=1) == "(num_heads + 1) x 2"
    assert shared.with_numbers(tp=2) == "ceil((num_heads + 1) / 2) x 2"


def test_factors_of_one_are_left_out():
    a = size("a")
    assert repr(1 * a * 1) == "a"
    assert repr(number(1) * 1) == "1"
    assert (a * number(1)).to_json() == "a"


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="batch x context needs batch; give evaluate"):
        (size("batch") * size("context")).evaluate(context=2)
    with pytest.raises(ValueError, match=r"ceil\(4 / 0\) divides by zero"):
        ceil_div(size("a"), size("b")).evaluate(a=4, b=0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", ["3", None, True, 1j])
def test_other_things_are_refused(wrong):
    with pytest.raises(TypeError, match="numbers and formulas"):
        size("a") + wrong


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_numbers_are_finite(wrong):
    with pytest.raises(ValueError, match="finite"):
        number(wrong)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", ["", "1a", "a-b", "<script>", None])
def test_names_are_words(wrong):
    with pytest.raises(ValueError, match="letters, digits and underscores"):
        size(wrong)


def test_formulas_are_values():
    formula = 2 * size("a")
    assert formula.evaluate(a=2) == 4
    again = pickle.loads(pickle.dumps(formula))
    assert again == formula and hash(again) == hash(formula) and again.evaluate(a=3) == 6
