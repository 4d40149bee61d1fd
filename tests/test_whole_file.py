"""A file is replaced whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest

from full_disk import files_of_at_most
from regard.whole_file import check_can_write, write_whole


@pytest.mark.parametrize("before", [None, b"earlier"])
def test_a_full_disk_leaves_the_earlier_file(before, tmp_path):
    path = tmp_path / "page.html"
    if before is not None:
        path.write_bytes(before)
    with files_of_at_most(4096), pytest.raises(OSError, match=r"page\.html.*; give a"):
        write_whole(path, bytes(10_000))
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [before] * (before is not None)


def test_links_and_permissions_stay(tmp_path):
    path, link = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"earlier")
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, b"later")
    assert link.is_symlink() and path.read_bytes() == b"later"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_new_file_has_the_usual_permissions(tmp_path):
    write_whole(tmp_path / "a", b"")
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_device_stays_a_device():
    write_whole(Path(os.devnull), b"x")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


def test_a_file_that_cannot_be_written_is_refused_before(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "none" / "a", tmp_path / "file" / "a", tmp_path):
        with pytest.raises(OSError, match=rf"^{path} cannot be written: .*; give a path on a disk"):
            check_can_write(path)
    with files_of_at_most(1000), pytest.raises(OSError, match="cannot be written"):
        check_can_write(tmp_path / "a")
    for path in (tmp_path / "a", tmp_path / "file", Path(os.devnull)):
        check_can_write(path)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["mine"]


def test_an_error_keeps_its_number(tmp_path):
    with files_of_at_most(1000), pytest.raises(OSError) as raised:
        write_whole(tmp_path / "a", bytes(5000))
    assert raised.value.errno == errno.EFBIG
