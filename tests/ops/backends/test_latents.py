"""Decoding over latents on a GPU: what is taken, and when it is chosen. `tests/gpu` computes."""

from dataclasses import replace

import pytest
import torch

from regard import Causal, Padding, Span, prepare
from regard.devices import DATA_SHEETS
from regard.ops import estimates
from regard.ops.backends import latents
from regard.ops.choose import choose


@pytest.fixture
def call(monkeypatch):
    """A function that describes a call as if on an H100."""
    (sheet,) = (each for each in DATA_SHEETS if each.name == "NVIDIA H100")
    monkeypatch.setattr(estimates, "rates_of", lambda device: sheet)
    monkeypatch.setattr(latents, "_machine_objection", lambda device: None)

    def describe(dtype=torch.bfloat16, batch=2, heads=16, queries=1, width=576, values=512, **rest):
        q = torch.zeros(batch, heads, queries, width, dtype=dtype)
        k = torch.zeros(batch, 1, 4096, width, dtype=dtype)
        v = rest.pop("v", k[..., :values])
        made = prepare(q, k, v, backend="eager", **rest).call
        return replace(made, device=torch.device("cuda", 0))

    return describe


def test_objections(call):
    assert latents.objection(call()) is None
    assert "for CUDA, got cpu" in latents.objection(replace(call(), device=torch.device("cpu")))
    assert "float16 and bfloat16" in latents.objection(call(torch.float32))
    apart = torch.zeros(2, 1, 4096, 512, dtype=torch.bfloat16)
    assert "first columns are the values" in latents.objection(call(v=apart))
    assert "at most (512, 128)" in latents.objection(call(width=1100, values=1024))
    assert "at most (512, 128)" in latents.objection(call(width=300, values=100))
    assert "512 query rows, got 1024" in latents.objection(call(heads=128, queries=8))
    padding = Padding(torch.arange(4096) > 3)
    assert "no mask" in latents.objection(call(mask=padding))
    assert "no mask" in latents.objection(call(softcap=3.0))
    assert "no dropout" in latents.objection(call(dropout=0.5))
    assert "no gradient" in latents.objection(call().but(needs_grad=True))
    assert "plain tensors" in latents.objection(call().but(immediate=False))
    assert latents.objection(call(sinks=torch.zeros(16))) is None


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("batch", [1, 32])
def test_decoding_over_latents_chooses_it(call, heads, batch):
    assert choose(call(batch=batch, heads=heads)) == "latents"


def test_a_last_token_that_sees_all_needs_no_mask(call):
    assert choose(call(mask=Causal(), span=Span(4095, 4096, 0, 4096))) == "latents"


def test_without_triton_it_objects(monkeypatch):
    monkeypatch.setattr(latents, "find_spec", lambda name: None)
    assert "needs triton" in latents._machine_objection.__wrapped__(torch.device("cuda", 0))
