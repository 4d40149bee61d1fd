"""Classes are built although their arguments have names as strangers choose them."""

import copy
import pickle

import pytest
import torch

import named
import subjects
from regard_verify import Conventions, SubjectError, understand
from regard_verify.subject.construct import Configuration, build
from regard_verify.subject.modules import set_dropout

NOTHING = Conventions()
SETTABLE = [
    named.HeadNum, named.Annotated, named.ClassAttributes, named.FromDictionary, named.DimHead
]  # fmt: skip


@pytest.mark.parametrize(
    ("made_by", "width", "heads", "key_heads"),
    [
        (named.HeadNum, 32, 4, 2),
        (named.KeyValueHead, 32, 4, 2),
        (named.DimHead, 32, 8, 8),
        (named.TwelveHeads, 32, 4, 4),
        (named.Huge, 32, 4, 2),
        (named.HandsOn, 32, 8, 8),
        (named.Annotated, 32, 4, 4),
        (named.ClassAttributes, 32, 4, 4),
        (named.FromDictionary, 32, 4, 4),
        (named.WithDefaults, 32, 4, 4),
        (named.Nothing, 32, 4, 4),
    ],
)
def test_names_as_strangers_choose_them(made_by, width, heads, key_heads):
    made = build(made_by, NOTHING).made
    assert (made.q_proj.in_features, made.heads, made.key_heads) == (width, heads, key_heads)
    assert made(torch.randn(2, 3, width)).shape == (2, 3, width)


def test_arguments_that_a_class_takes_out_of_kwargs_are_declared():
    with pytest.raises(SubjectError, match=r"KeyError: 'd_model'.*declare it"):
        build(named.AnyName, NOTHING)
    own = Conventions(arguments={"d_model": 32, "n_heads": 4})
    assert build(named.AnyName, own).made.heads == 4


def test_defaults_of_a_configuration_stay_where_they_fit():
    settings = build(named.Annotated, NOTHING).made
    assert settings.drop.p == 0.1  # of a dataclass in a dataclass
    assert build(named.FromDictionary, NOTHING).made.fast is True


@pytest.mark.parametrize("made_by", SETTABLE)
def test_every_probability_of_dropout_can_be_set(made_by):
    made = build(made_by, NOTHING).made
    assert set_dropout(made, 0.5) and made.drop.p == 0.5


def test_the_most_tokens_are_raised_to_what_laws_ask_for():
    assert len(build(named.Short, NOTHING).made.tril) == 128


def test_another_is_built_with_changes():
    subject = understand(named.Switch)
    assert subject.switches == {"causal": False}
    assert subject.another().drop.p == 0.0
    assert subject.another(causal=True).causal is True
    with pytest.raises(SubjectError, match="Switch has no argument 'colour'; it has dim, heads"):
        subject.another(colour=1)


@pytest.mark.parametrize(
    ("made_by", "arguments", "width"),
    [
        (named.FromDictionary, {"cfg": {"emb_dim": 48}}, 48),
        (named.FromDictionary, {"emb_dim": 48}, 48),
        (named.Annotated, {"settings": {"n_embd": 48}}, 48),
        (named.WithDefaults, {"hparams": {"model_dim": 24}}, 24),
        (named.HeadNum, {"dim_model": 24}, 24),
    ],
)
def test_a_configuration_is_declared_as_json(made_by, arguments, width):
    made = build(made_by, Conventions(arguments=arguments)).made
    assert made.q_proj.in_features == width
    assert made.heads == 4


@pytest.mark.parametrize(
    ("made_by", "problem"),
    [
        (named.Unguessable, r"'alpha' of Unguessable cannot .*--like 'arguments={\"alpha\": ...}'"),
        (named.UnguessableConfig, r"no 'flavour'; declare it: .*{\"config\": {\"flavour\": ...}}"),
        (
            named.Refuses,
            r"Refuses\(dim=32, heads=4\) could not be built: .* \(.*named.py:\d+: assert",
        ),
    ],
)
def test_what_cannot_be_built_tells_how_to_declare_it(made_by, problem):
    with pytest.raises(SubjectError, match=problem):
        understand(made_by)


def test_a_guessed_configuration_can_be_copied_and_unpacked():
    config = Configuration({"n_embd": 48, "inner": Configuration({"heads": 2})})
    for twin in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin.inner.heads == 2
        assert twin["n_head"] == 4
        assert dict(**twin)["n_embd"] == 48
        assert not hasattr(twin, "flavour")


def test_a_forgotten_super_is_told_by_its_line():
    for made_by in (subjects.NoSuper, subjects.NoSuperNoModules):
        subject = understand(made_by)
        assert "subjects.py:" in subject.forgot_super
        assert subject.forgot_super.endswith("):")
    assert understand(named.Switch).forgot_super == ""


def test_the_width_is_among_the_arguments():
    assert understand(named.Transposed).conventions.width == 32
