"""What a call runs on, said in lines; and the weights that it has."""

from importlib.util import find_spec

import pytest
import torch

from regard import Causal, Part, SlidingWindow, Span, attend, attention_weights, explain, prepare
from regard.cache.paging.reading import PagedStream
from regard.cache.parts import Storage
from regard.ops.backends import BACKENDS
from regard.ops.explain import Verdict, explanation, weights_of


def test_every_backend_has_a_line_and_one_runs():
    q, k = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 9, 8)
    options = {"mask": Causal(), "span": Span(8, 9, 0, 9)}
    text = explain(q, k, k, **options)
    first, mask, *lines = text.splitlines()
    assert first == "1 query x 9 keys, 4 heads on 2, head dim 8, float32, cpu"
    assert mask.startswith("mask     Causal()")
    assert [line.split()[0] for line in lines] == list(BACKENDS)
    (running,) = [line.split()[0] for line in lines if " runs, " in line]
    assert running == prepare(q, k, k, **options).name
    assert explain(prepare(q, k, k, **options)) == text


def test_keys_that_no_query_may_attend_to_are_not_read():
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 100, 8)
    text = explain(q, k, k, mask=Causal() & SlidingWindow(10), span=Span(99, 100, 0, 100))
    assert "keys     10 are read: slots 90..99" in text


def test_values_of_another_width_are_said():
    q, v = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 4)
    assert "2 queries x 2 keys, 1 heads on 1, head dim 8 (values 4)" in explain(q, q, v)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (1.234e-5, "about 0.0123 ms"),
        (0.98765, "about 988 ms"),
        (1.25, "about 1.2 s"),
        (99.96, "about 100.0 s"),
        (12345.6, "about 12,346 s"),
        (None, "objects: it is too wide"),
    ],
)
def test_times_are_said_in_digits(seconds, said):
    assert str(Verdict("x", "it is too wide" if seconds is None else None, seconds)) == said


def test_what_is_said_is_there_as_data():
    q, k = torch.zeros(3, 4, 2, 16), torch.zeros(3, 2, 40, 16)
    prepared = prepare(q, k, k[..., :8], mask=Causal() & SlidingWindow(5), span=Span(38, 40, 0, 40))
    found = explanation(prepared)
    assert str(found) == explain(prepared)
    assert (found.batch, found.queries, found.keys) == (3, 2, 40)
    assert (found.num_heads, found.num_kv_heads, found.head_dim, found.v_head_dim) == (4, 2, 16, 8)
    assert (found.asked, found.mask) == (repr(prepared.call.given_mask), repr(prepared.mask))
    assert (found.kv_start, found.kv_stop) == (34, 40)
    assert (found.dtype, found.device, found.rates) == ("float32", "cpu", None)
    assert found.runs == prepared.name
    can = [each.name for each in found.backends if each.objection is None]
    assert can == [each.name for each in found.backends if each.seconds is not None]
    best = min((each for each in found.backends if each.seconds), key=lambda each: each.seconds)
    assert best.name == found.runs


def test_without_values_there_is_nothing_to_explain():
    with pytest.raises(TypeError, match="takes q, k and v as attend does"):
        explain(torch.zeros(1, 1, 2, 8))


def test_weights_times_values_are_the_output():
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 3)
    weights = attention_weights(q, k, mask=Causal())
    out = weights @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, attend(q, k, v, mask=Causal()))
    some = attention_weights(q, k, mask=Causal(), heads=[3, -4], queries=[4, -5])
    torch.testing.assert_close(some, weights[:, [3, 0]][:, :, [4, 0]])


def test_weights_are_those_of_all_keys_of_the_span():
    q, k = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 9, 8)
    span = Span(13, 15, 6, 15)  # a window of 3 reads the keys from slot 11
    call = prepare(q, k, k, mask=Causal() & SlidingWindow(3), span=span)
    got = weights_of(call, q, [Part(6, 15, (k, k))])
    scores = (q @ k.mT) * 8**-0.5
    keep = torch.tensor([[0] * 5 + [1] * 3 + [0], [0] * 6 + [1] * 3]).bool()
    torch.testing.assert_close(got, scores.masked_fill(~keep, -torch.inf).softmax(-1))


@pytest.mark.parametrize("wrong", [{"heads": [4]}, {"heads": [-5]}, {"queries": [5]}], ids=str)
def test_weights_of_what_is_not_there_are_refused(wrong):
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(IndexError, match="is not among the"):
        attention_weights(q, q, **wrong)


def test_it_says_how_keys_in_several_parts_are_read():
    q, k = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 9, 16)
    half = q.half(), k.half(), k.half()
    in_pages = Storage((PagedStream,), None, several=True)

    def said(backend, *tensors, **options):
        made = prepare(*(tensors or (q, k, k)), backend=backend, **options)
        lines = explain(made.stored_as(in_pages)).splitlines()
        (line,) = (line for line in lines if line.startswith("parts "))
        return line[9:]

    assert said("sdpa", *half) == (
        "copied side by side before they are read: sdpa gives no log-sum-exp in torch.float16: "
        "torch's kernel rounds its outputs to it"
    )
    assert said("eager", dropout=0.1) == (
        "copied side by side before they are read: dropout needs all of them"
    )
    for backend in ("sdpa", "grouped", "blocked"):
        assert said(backend) == (
            "read one at a time and merged; pages are copied, 1,024 tokens at a time"
        )
    if find_spec("numba"):
        assert said("fused") == "read one at a time and merged; pages are read as they lie"
    assert "parts " not in explain(q, k, k)


def test_weights_without_a_mask():
    q = torch.randn(1, 2, 3, 8)
    assert torch.equal(attention_weights(q, q, mask=None), attention_weights(q, q))


def test_chosen_rows_may_be_tensors_or_none():
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    whole = attention_weights(q, k, mask=Causal())
    chosen = attention_weights(
        q, k, mask=Causal(), heads=torch.tensor([1, 3]), queries=torch.tensor([4])
    )
    torch.testing.assert_close(chosen, whole[:, [1, 3], 4:])
    assert attention_weights(q, k, heads=[]).shape == (1, 0, 5, 5)
    assert attention_weights(q, k, heads=[], queries=[]).shape == (1, 0, 0, 5)
