"""Thousands of damaged checkpoints: each loads or raises CheckpointError, quickly."""

import faulthandler
import json
import math
import os
import random
import resource
import struct
import sys
import warnings

import gguf
import pytest
import torch
from safetensors import SafetensorError, safe_open

import regard.hf
from checkpoints import tiny, write_gguf
from regard.hf import CheckpointError
from regard.hf.loading.reading_gguf import check_gguf
from regard.hf.loading.untrusted import check_safetensors

TIMES = 10 if os.environ.get("REGARD_LONG") == "1" else 1
CHUNKS = 10
MEBIBYTE = 1 << 20
INTEGERS = (
    0,
    1,
    2,
    31,
    127,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
VALUES = (
    *INTEGERS,
    None,
    True,
    False,
    -1,
    10**30,
    0.5,
    -1e308,
    math.nan,
    math.inf,
    "",
    "llama",
    "../x",
    "\0",
    "x" * 5000,
    [],
    [0],
    [[]] * 50,
    {},
    {"a": {"b": []}},
)


@pytest.fixture(autouse=True)
def _guarded():
    """Nothing here may hang, nor take memory that the files do not have."""
    faulthandler.dump_traceback_later(60 * TIMES, exit=True, file=sys.__stderr__)
    before = peak()
    yield
    faulthandler.cancel_dump_traceback_later()
    assert peak() - before < 300 * MEBIBYTE
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(0).device.type == "cpu"


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    tiny("llama").save_pretrained(folder)
    regard.hf.load(folder)  # whatever this imports is not held against a test
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    tiny("llama").save_pretrained(folder, max_shard_size="10KB")
    return folder


@pytest.fixture(scope="module")
def sound_gguf(tmp_path_factory):
    file = tmp_path_factory.mktemp("sound") / "tiny.gguf"
    write_gguf(file)
    regard.hf.load(file)
    return file.read_bytes()


def spoiled_bytes(data: bytes, reach: int, numbers: random.Random) -> bytes:
    """One change within the first `reach` bytes, or a cut, or noise."""
    out, at = bytearray(data), numbers.randrange(reach)
    length = numbers.choice((1, 4, 8, 30))
    match numbers.randrange(8):
        case 0 | 1:
            out[at] ^= 1 << numbers.randrange(8)
        case 2:
            del out[numbers.randrange(len(out)) :]
        case 3:
            number = numbers.choice(INTEGERS)
            size = numbers.choice((4, 8))
            out[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
        case 4:
            out[at : at + length] = numbers.randbytes(length)
        case 5:
            out[at:at] = out[at : at + length]
        case 6:
            del out[at : at + length]
        case _:
            keep = numbers.choice((0, 4, 8, 24))
            out[keep:] = numbers.randbytes(numbers.randrange(400))
    return bytes(out)


def spoiled_json(value: dict, numbers: random.Random) -> bytes:
    """JSON text with one entry exchanged, dropped, renamed, moved deep, or said twice."""
    value = json.loads(json.dumps(value))
    inner = value
    while isinstance(inner, dict | list) and inner:
        parent = inner
        at = numbers.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner = parent[at]
        if numbers.random() < 0.3:
            break
    match numbers.randrange(7):
        case 0 if isinstance(parent, dict):
            parent[at + numbers.choice(("x", "_size", ""))] = parent.pop(at)
        case 1:
            del parent[at]
        case 2:
            for _ in range(numbers.choice((3, 70, 900))):
                parent[at] = [parent[at]]
        case 3 if type(inner) is int:
            parent[at] = inner + numbers.choice((-1, 1, inner, 10**6))
        case 4:
            key = json.dumps(next(iter(value)))
            text = json.dumps(value)
            return (text[:-1] + f", {key}: {json.dumps(numbers.choice(VALUES))}}}").encode()
        case _:
            parent[at] = numbers.choice(VALUES)
    return json.dumps(value).encode()


def refused(call, *arguments) -> bool:
    """Whether `call` raises CheckpointError with a whole sentence; nothing else may come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers may think what it likes of odd sizes
        try:
            call(*arguments)
        except CheckpointError as error:
            sentence = str(error)
            assert ", got " in sentence and "; " in sentence and len(sentence) < 2000
            return True
        except FileNotFoundError as error:
            return "get the whole checkpoint" in str(error)
    return False


@pytest.mark.parametrize("seed", range(CHUNKS))
def test_damaged_safetensors(folder, tmp_path, seed):
    numbers = random.Random(seed)
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    file, passed = tmp_path / "model.safetensors", 0
    for _ in range(100 * TIMES):
        if numbers.random() < 0.5:
            file.write_bytes(spoiled_bytes(data, 8 + length, numbers))
        else:
            text = spoiled_json(header, numbers)
            file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        if not refused(check_safetensors, file):
            passed += 1
            with safe_open(file, "pt") as reader:  # what passes here passes there
                reader.keys()
    assert passed < 50 * TIMES


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"a": ("F32", [1], [4, 8])}, "invalid offset"),
        ({"a": ("F32", [2], [0, 8]), "b": ("F32", [1], [4, 8])}, "invalid offset"),
        ({"a": ("F32", [1], [0, 4])}, "incomplete metadata"),
        ({"a": ("F32", [3], [0, 8])}, "invalid shape"),
        ({"a": ("F32", [1 << 32, 1 << 32], [0, 8])}, "overflow"),
        ({"a": ("Q4", [2], [0, 8])}, "invalid JSON"),
        ({"a": ("F32", [-2], [0, 8])}, "invalid JSON"),
        ({"a": ("F32", [True, 2], [0, 8])}, "invalid JSON"),
        ({"a": ("F32", [2], [0, 8, 8])}, "invalid JSON"),
    ],
)
def test_headers_that_do_not_add_up_are_refused(tmp_path, tensors, sentence):
    keys = ("dtype", "shape", "data_offsets")
    header = {name: dict(zip(keys, entry, strict=True)) for name, entry in tensors.items()}
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match=sentence):
        check_safetensors(file)


def test_damaged_safetensors_do_not_load_half(folder, tmp_path):
    """The same, through load; a changed name or shape is found there."""
    numbers = random.Random(99)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for _ in range(30 * TIMES):
        spoiled = spoiled_bytes(data, 8 + length, numbers)
        (tmp_path / "model.safetensors").write_bytes(spoiled)
        refused(regard.hf.load, tmp_path)


@pytest.mark.parametrize("seed", range(2))
def test_damaged_gguf(sound_gguf, tmp_path, seed):
    numbers = random.Random(seed)
    end = sound_gguf.index(b"blk.0.ffn_down.weight") + 60
    file, passed = tmp_path / "tiny.gguf", 0
    for _ in range(100 * TIMES):
        file.write_bytes(spoiled_bytes(sound_gguf, end, numbers))
        if not refused(check_gguf, file):
            passed += 1
            gguf.GGUFReader(file)  # neither hangs nor raises
            refused(regard.hf.load, file)
    assert 0 < passed < 60 * TIMES


def text(string: bytes) -> bytes:
    return struct.pack("<Q", len(string)) + string


def header(*, version=3, tensors=1, keys=2, values=b"", infos=b"", data=64) -> bytes:
    """A GGUF of an architecture, `values` and one tensor."""
    architecture = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + architecture + values + infos
    return head + bytes(-len(head) % 32 + data)


def tensor(*, name=b"blk.0.a", dims=(8,), kind=0, offset=0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def array(*, kind: int, length: int, items: bytes = b"") -> bytes:
    return text(b"k") + struct.pack("<IIQ", 9, kind, length) + items


NAMES = (b"blk.0.a", b"blk.0.b", b"blk.0.c")
ALIGNED = text(b"general.alignment") + struct.pack("<II", 4, 3)
NUMBER = text(b"llama.block_count") + struct.pack("<II", 4, 1)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            header(values=array(kind=8, length=1 << 60)),
            "items of its arrays must be at most 2097152",
        ),
        (header(values=array(kind=8, length=1 << 20)), "gguf must be able to read it, got"),
        (header(values=array(kind=8, length=1, items=bytes([99]))), "an array must end by byte"),
        (header(values=array(kind=4, length=1 << 20)), "gguf must be able to read it, got"),
        (header(values=array(kind=9, length=1)), "must be strings or numbers, got 9"),
        (header(values=text(b"k") + struct.pack("<I", 13)), r"13\)? is not a valid GGUFValueType"),
        (header(values=struct.pack("<Q", 1 << 60)), "length of a string must be at most 16777216"),
        (header(values=struct.pack("<Q", 1 << 20)), "what its header describes must end by byte"),
        (header(values=text(b"\xff") + struct.pack("<II", 4, 1)), "UnicodeDecodeError"),
        (header(values=NUMBER + NUMBER, keys=3), "Duplicate llama.block_count"),
        (header(keys=1 << 60), "its number of keys must be at most 65536"),
        (header(tensors=1 << 60, values=NUMBER), "its number of tensors must be at most 65536"),
        (header(tensors=0, values=NUMBER), "'llama.block_count' must be 1 to 0, its blocks"),
        (header(version=1), r"its version must be one of \(2, 3\), got 1"),
        (header(version=3 << 24), r"its version must be one of \(2, 3\), got 50331648"),
        (
            header(values=NUMBER, infos=tensor(kind=99)),
            r"99\)? is not a valid GGMLQuantizationType",
        ),
        (header(values=NUMBER, infos=tensor(dims=(8,), kind=2)), "multiple of Q4_0"),
        (header(values=NUMBER, infos=tensor(offset=64)), "must end by byte 224, got 256"),
        (header(values=NUMBER, infos=tensor(dims=(1 << 32, 1 << 31))), "must end by byte"),
        (header(values=NUMBER, infos=tensor(dims=(1 << 32, 1 << 32))), "cannot reshape array"),
        (header(values=NUMBER, tensors=2, infos=tensor() * 2), "duplicated tensor"),
        (
            header(values=NUMBER, tensors=3, infos=b"".join(tensor(name=each) for each in NAMES)),
            "its tensors may have 64 bytes together, got 96",
        ),
        (
            header(values=text(b"k") + struct.pack("<II", 4, 1), infos=tensor()),
            "1 to 1, its blocks",
        ),
        (header(values=NUMBER, infos=tensor(name=b"a")), "'llama.block_count' must be 1 to 0"),
        (
            header(values=ALIGNED + NUMBER, keys=3, infos=tensor()),
            "must be a non-zero power of two",
        ),
        (
            header(
                values=text(b"llama.block_count") + struct.pack("<II", 4, 1 << 20), infos=tensor()
            ),
            "most 10000",
        ),
    ],
)
def test_lying_ggufs_are_refused(tmp_path, data, sentence):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=sentence):
        check_gguf(file)


def test_an_honest_gguf_is_not(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(header(values=NUMBER, infos=tensor()))
    assert check_gguf(tmp_path / "tiny.gguf").contents.elements == 8


def test_damaged_configurations(folder, tmp_path):
    numbers = random.Random(0)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    answers = set()
    for _ in range(50 * TIMES):
        (tmp_path / "config.json").write_bytes(spoiled_json(config, numbers))
        answers.add(refused(regard.hf.load, tmp_path))
    assert answers == {True, False}


def test_damaged_indexes(sharded):
    numbers = random.Random(0)
    file = sharded / "model.safetensors.index.json"
    sound = file.read_bytes()
    for _ in range(50 * TIMES):
        if numbers.random() < 0.5:
            file.write_bytes(spoiled_bytes(sound, len(sound), numbers))
        else:
            file.write_bytes(spoiled_json(json.loads(sound), numbers))
        refused(regard.hf.load, sharded)
    file.write_bytes(sound)
    assert not refused(regard.hf.load, sharded)


def test_without_the_checks_safetensors_would_raise_errors_of_its_own(folder, tmp_path):
    """The reader that follows refuses the same files: the two do not drift apart."""
    numbers = random.Random(7)
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    file = tmp_path / "model.safetensors"
    for _ in range(50):
        file.write_bytes(spoiled_bytes(data, 8 + length, numbers))
        try:
            with safe_open(file, "pt") as reader:
                reader.keys()
        except SafetensorError:
            assert refused(check_safetensors, file)
