"""Commands load a model in the dtype and on the device that were asked for."""

import pytest
import torch

from regard.cli.loading import device_named, load_for
from tiny import tiny


def test_a_cpu_computes_in_float32_and_knows_the_dtype_of_the_checkpoint(tmp_path):
    tiny("llama").half().save_pretrained(tmp_path)
    found = load_for(tmp_path, dtype=None, device="cpu")
    assert found.model.dtype == torch.float32
    assert found.stored == torch.float16
    assert found.tokenizer is None
    asked = load_for(tmp_path, dtype="bfloat16", device="cpu")
    assert (asked.model.dtype, asked.stored) == (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "--device 'gpu' is no device of torch; give cpu or cuda"),
        ("meta", "--device meta computes nothing"),
    ],
)
def test_a_device_that_cannot_be_used_is_a_sentence(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        device_named(name)
    with pytest.raises(ValueError, match=message):
        load_for(tmp_path, dtype=None, device=name)
