"""The quick reader returns what gguf's own does, and parses each file once."""

import gguf
import numpy as np
import pytest
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from checkpoints import write_gguf
from regard.hf.loading.reading_gguf import read_once

ARRAYS = {
    "bytes": ([1, 255], gguf.GGUFValueType.UINT8),
    "signed": ([-3, 4, 5], gguf.GGUFValueType.INT16),
    "long": ([2**40, 7], gguf.GGUFValueType.UINT64),
    "floats": ([0.5, -1.5], gguf.GGUFValueType.FLOAT32),
    "doubles": ([1e300], gguf.GGUFValueType.FLOAT64),
    "flags": ([True, False, True], gguf.GGUFValueType.BOOL),
    "words": (["", "ä", "東京", " "], gguf.GGUFValueType.STRING),
}


def write_arrays(path):
    writer = gguf.GGUFWriter(path, "llama")
    for name, (values, kind) in ARRAYS.items():
        writer.add_key_value(f"test.{name}", values, gguf.GGUFValueType.ARRAY, sub_type=kind)
    writer.add_tensor("output.weight", np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("words", [0, 700])
def test_what_transformers_makes_of_a_file_is_the_same(words, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", words)
    wanted = load_gguf_checkpoint(str(tmp_path / "tiny.gguf"))
    with read_once():
        assert load_gguf_checkpoint(str(tmp_path / "tiny.gguf")) == wanted
    assert len(wanted["tokenizer"].get("tokens", ())) == words


@pytest.mark.parametrize("name", ARRAYS)
def test_every_kind_of_array_is_read(name, tmp_path):
    write_arrays(tmp_path / "arrays.gguf")
    from transformers.modeling_gguf_pytorch_utils import read_field

    own = gguf.GGUFReader(tmp_path / "arrays.gguf")
    with read_once():
        quick = gguf.GGUFReader(tmp_path / "arrays.gguf")
    assert read_field(quick, f"test.{name}") == read_field(own, f"test.{name}") == ARRAYS[name][0]
    assert quick.fields[f"test.{name}"].types == own.fields[f"test.{name}"].types
    assert [each.name for each in quick.tensors] == ["output.weight"]


def test_a_file_is_read_once_and_the_reader_put_back(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", 300)
    before = gguf.GGUFReader
    with read_once():
        assert gguf.GGUFReader(tmp_path / "tiny.gguf") is gguf.GGUFReader(tmp_path / "tiny.gguf")
    with pytest.raises(KeyError), read_once():
        raise KeyError
    assert gguf.GGUFReader is before
