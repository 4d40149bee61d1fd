"""Files of tensors: whole or not at all, and each damaged one is refused by one kind of error."""

import errno
import json
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import session
from regard import whole_file
from regard.cache import files
from regard.cache.files import open_tensors, parse_json, write_tensors

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(4, dtype=torch.int32),
    "none": torch.zeros(0, 5),
    "one": torch.tensor(2.5, dtype=torch.bfloat16),
}


def read(path):
    with open_tensors(path) as file:
        return {name: file.read(name) for name in file.entries}


@pytest.mark.parametrize("dtype", files.DTYPES.values(), ids=str)
def test_every_dtype_is_written_as_safetensors_reads_it(tmp_path, dtype):
    x = torch.arange(-6, 6).abs().to(dtype).view(1, 3, 4)
    write_tensors(tmp_path / "a", {"k": "ü"}, {"x": x, "view": x[:, 1:, :2], "turned": x.mT})
    for found in (load_file(tmp_path / "a"), read(tmp_path / "a")):
        assert found["x"].dtype == dtype
        for name, want in (("x", x), ("view", x[:, 1:, :2]), ("turned", x.mT)):
            assert torch.equal(found[name].float(), want.float())


def test_files_of_safetensors_are_read(tmp_path):
    save_file(TENSORS, tmp_path / "a", {"k": "v"})
    found = read(tmp_path / "a")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], each) for name, each in TENSORS.items())


def test_dtypes_without_a_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"can be saved, got torch\.bool"):
        write_tensors(tmp_path / "a", {}, {"x": torch.tensor([True])})
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_before_anything_is_read(tmp_path, monkeypatch):
    write_tensors(tmp_path / "a", {}, TENSORS)  # which needs none
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"python -m pip install 'regard\[hf\]'"):
        read(tmp_path / "a")


def test_a_header_is_not_larger_than_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "HEADER_LIMIT", 64)
    with pytest.raises(ValueError, match="up to 64 bytes"):
        write_tensors(tmp_path / "a", {"long": "x" * 64}, {})
    assert not list(tmp_path.iterdir())


class Full:
    """A disk on which there is room for a header alone."""

    def __init__(self, file):
        self.file, self.written = file, 0

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def write(self, data):
        self.written += 1
        if self.written > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    write_tensors(tmp_path / "a", {"k": "before"}, TENSORS)
    right = os.fdopen
    monkeypatch.setattr(whole_file.os, "fdopen", lambda *args: Full(right(*args)))
    with pytest.raises(OSError, match="No space"):
        write_tensors(tmp_path / "a", {"k": "after"}, TENSORS)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    with open_tensors(tmp_path / "a") as file:
        assert file.metadata == {"k": "before"}


def test_places_that_cannot_be_written_raise_os_errors(tmp_path):
    with pytest.raises(OSError):
        write_tensors(tmp_path / "none" / "a", {}, TENSORS)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="it is a file, got 'a folder'"):
        write_tensors(tmp_path / "folder", {}, TENSORS)
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(OSError):
        read(tmp_path / "none")


def test_only_its_owner_can_read_a_file(tmp_path):
    write_tensors(tmp_path / "a", {}, TENSORS)
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # reading it would never end
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="it is a file"):
            read(tmp_path / name)
        with pytest.raises(ValueError, match="it is a file"):
            write_tensors(tmp_path / name, {}, {})
    assert (tmp_path / "pipe").is_fifo()  # not replaced: it could be a device
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_link_is_read_and_replaced_and_what_it_leads_to_stays(tmp_path):
    write_tensors(tmp_path / "a", {"k": "theirs"}, TENSORS)
    (tmp_path / "soft").symlink_to(tmp_path / "a")
    (tmp_path / "hard").hardlink_to(tmp_path / "a")
    (tmp_path / "broken").symlink_to(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to pipe").symlink_to(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("soft", "hard", "broken"):
        if name != "broken":
            assert read(tmp_path / name).keys() == TENSORS.keys()
        write_tensors(tmp_path / name, {"k": "mine"}, {})
        assert not (tmp_path / name).is_symlink() and read(tmp_path / name) == {}
    with open_tensors(tmp_path / "a") as file:
        assert file.metadata == {"k": "theirs"}
    assert not (tmp_path / "none").exists()
    for name in ("to pipe", "device"):
        with pytest.raises(ValueError, match="it is a file"):
            read(tmp_path / name)
        with pytest.raises(ValueError, match="it is a file"):
            write_tensors(tmp_path / name, {}, {})
        assert (tmp_path / name).is_symlink()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="files of Linux")
def test_a_file_of_the_system_without_a_size_is_refused():
    with pytest.raises(ValueError, match=r"up to 16777216 bytes|cannot read it"):
        read("/proc/self/environ")


def written(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(**changes):
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


X = entry()["x"]
WRONG = {
    "a gap": (entry(data_offsets=[4, 12]), 12),
    "an overlap": ({"x": X, "y": {**X, "data_offsets": [4, 12]}}, 12),
    "the same bytes twice": ({"x": X, "y": X}, 8),
    "more data": (entry(), 12),
    "less data": (entry(), 4),
    "a span": (entry(shape=[3]), 8),
    "a dtype": (entry(dtype="F33"), 8),
    "a dtype that is none": (entry(dtype=["F32"]), 8),
    "a negative size": (entry(shape=[-2]), 8),
    "a size that is true": (entry(shape=[True, 2]), 8),
    "a size with a fraction": (entry(shape=[2.0]), 8),
    "an offset": (entry(data_offsets=[0]), 8),
    "an offset backwards": (entry(data_offsets=[8, 0]), 8),
    "an entry that is none": ({"x": 3}, 8),
    "metadata": ({**entry(), "__metadata__": {"a": 1}}, 8),
    "a list": ([], 0),
    "no JSON": (b"{", 0),
    "no text": (b"\xff\xfe", 0),
    "depth": (b"[" * 100_000, 0),
    "a number without end": (b"1" * 10_000, 0),
}
BEYOND = {  # what safetensors reads, and no cache has
    "sizes beyond all memory": entry(shape=[0, 1 << 40, 1 << 40], data_offsets=[0, 0]),
    "a size beyond all memory": entry(shape=[0, (1 << 64) - 1], data_offsets=[0, 0]),
    "many axes": entry(shape=[0] * 9, data_offsets=[0, 0]),
    "another dtype": entry(dtype="BOOL", shape=[0], data_offsets=[0, 0]),
    "half a byte": entry(dtype="F4", shape=[0], data_offsets=[0, 0]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_header_that_is_wrong_is_refused(tmp_path, wrong):
    header, nbytes = WRONG[wrong]
    path = written(tmp_path / "a", header, bytes(nbytes))
    with pytest.raises(ValueError, match=f"^{path}: safetensors cannot read it: .*; save it again"):
        read(path)


@pytest.mark.parametrize("wrong", BEYOND)
def test_a_tensor_that_no_cache_has_is_refused(tmp_path, wrong):
    path = written(tmp_path / "a", BEYOND[wrong])
    with pytest.raises(ValueError, match=f"^{path}: 'x' has at most 8 sizes"):
        read(path)


def test_json_in_a_header_is_bounded(tmp_path):
    assert parse_json('{"length": 3}', tmp_path) == {"length": 3}
    for wrong in ("{", "[" * 100_000, "[" + "0," * (files.COMMAS + 1) + "0]", "1" * 10_000):
        with pytest.raises(ValueError, match=r"holds valid JSON|commas"):
            parse_json(wrong, tmp_path)


@pytest.mark.parametrize("start", [b"", b"1234567", b"\xff" * 8, struct.pack("<Q", 1 << 40)])
def test_a_start_that_is_wrong_is_refused(tmp_path, start):
    (tmp_path / "a").write_bytes(start)
    with pytest.raises(ValueError, match=r"begins with a header of up to"):
        read(tmp_path / "a")


def test_a_header_beyond_the_end_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(struct.pack("<Q", 1 << 20) + b"{}")
    with pytest.raises(ValueError, match="cannot read it"):
        read(tmp_path / "a")


def test_a_file_that_is_replaced_while_it_is_read_is_refused(tmp_path, monkeypatch):
    """The header of one file says nothing about the bytes of another."""
    write_tensors(tmp_path / "a", {}, {"x": torch.zeros(4)})
    right = safetensors.safe_open

    def replaced(path, **options):
        write_tensors(path, {}, {"x": torch.ones(8)})
        return right(path, **options)

    monkeypatch.setattr(safetensors, "safe_open", replaced)
    with pytest.raises(ValueError, match="another file"):
        read(tmp_path / "a")


def test_a_file_that_shrinks_is_refused(tmp_path):
    write_tensors(tmp_path / "a", {}, {"x": torch.zeros(1 << 20)})
    with open_tensors(tmp_path / "a") as file:
        os.truncate(tmp_path / "a", 1 << 20)
        with pytest.raises(ValueError, match="'x' has 4194304 bytes"):
            file.read("x")


@given(data=st.data())
@settings(max_examples=5_000 if session.LONG else 300, deadline=None)
def test_damaged_files_are_read_or_refused_by_one_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "a"
    write_tensors(path, {"format": "x"}, TENSORS)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(
        content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    )
    with suppress(ValueError):
        read(path)
