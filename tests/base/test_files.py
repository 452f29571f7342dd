"""Files that are written: whole, where they may be, and over nothing that somebody else wrote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sim.base.errors import InputError
from sim.base.files import Kind, make_folder, marked, require_outputs, write_whole
from sim.words.profile import PROFILE_FILE

TEXT = Kind("a text", marked("# ours"))
OURS, FOREIGN, NEW = b"# ours\nold", b"somebody else's", b"# ours\nnew"


def refused(path: str | Path, why: str, *, force: bool = False) -> None:
    """It is refused before the work and at writing, in one line, and nothing changes."""
    output = TEXT.at(path, force=force)
    for attempt in (output.require, lambda: output.write(NEW), lambda: require_outputs([None, output])):
        with pytest.raises(InputError, match=why) as raised:
            attempt()
        assert "\n" not in str(raised.value)


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    for old in (None, b"", OURS):
        path = tmp_path / f"file {old!r}"
        if old is not None:
            path.write_bytes(old)
        TEXT.at(path).write(NEW)
        assert path.read_bytes() == NEW
    assert not list(tmp_path.rglob(".*"))


def test_what_others_wrote_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(FOREIGN)
    refused(path, r"it is not a text that Longstep wrote; choose another file, or overwrite it with `force`")
    assert path.read_bytes() == FOREIGN
    TEXT.at(path, force=True).write(NEW)
    assert path.read_bytes() == NEW


def test_what_changes_meanwhile_is_seen(tmp_path: Path) -> None:
    output = TEXT.at(tmp_path / "file")
    output.require()
    Path(output.path).write_bytes(FOREIGN)
    with pytest.raises(InputError, match="that Longstep wrote"):
        output.write(NEW)
    assert Path(output.path).read_bytes() == FOREIGN


def test_the_mode_stays(tmp_path: Path) -> None:
    for mode in (0o640, 0o600, 0o755):
        path = tmp_path / f"{mode:o}"
        path.write_bytes(OURS)
        path.chmod(mode)
        TEXT.at(path).write(NEW)
        assert (path.read_bytes(), path.stat().st_mode & 0o7777) == (NEW, mode)


def test_a_new_file_has_the_mode_of_its_user(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        TEXT.at(tmp_path / "new").write(NEW)
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o7777 == 0o640


def test_a_read_only_file_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(OURS)
    path.chmod(0o444)
    refused(path, "it is read-only")
    assert path.read_bytes() == OURS
    TEXT.at(path, force=True).write(NEW)
    assert (path.read_bytes(), path.stat().st_mode & 0o7777) == (NEW, 0o444)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link, dangling = tmp_path / "far" / "file", tmp_path / "link", tmp_path / "dangling"
    target.write_bytes(FOREIGN)
    link.symlink_to("far/file")
    refused(link, "that Longstep wrote")
    target.write_bytes(OURS)
    TEXT.at(link).write(NEW)
    assert link.is_symlink()
    assert target.read_bytes() == NEW
    dangling.symlink_to("far/new")
    TEXT.at(dangling).write(NEW)
    assert dangling.is_symlink()
    assert (tmp_path / "far" / "new").read_bytes() == NEW
    link.unlink()
    link.symlink_to("no folder/file")
    refused(link, "there is no folder")
    link.unlink()
    link.symlink_to("link")
    refused(link, "symbolic links")


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_file_is_always_refused(tmp_path: Path, *, force: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to null").symlink_to("/dev/null")
    for path, what in (
        (tmp_path, "it is a folder"),
        (tmp_path / "pipe", "it is a pipe"),
        ("/dev/null", "it is a device"),
        (tmp_path / "to null", "it is a device"),
    ):
        refused(path, what, force=force)
        with pytest.raises(InputError, match=what):
            write_whole(Path(path), NEW)
    assert (tmp_path / "pipe").is_fifo()
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("force", [False, True])
def test_names_that_no_file_has(tmp_path: Path, *, force: bool) -> None:
    refused(tmp_path / ("x" * 300), "File name too long", force=force)
    refused(f"{tmp_path}/a\0b", "NUL byte", force=force)
    refused(tmp_path / "none" / "file", "there is no folder", force=force)
    (tmp_path / "file").write_bytes(OURS)
    refused(tmp_path / "file" / "file", "Not a directory", force=force)


def test_the_longest_name_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    TEXT.at(path).write(NEW)
    assert path.read_bytes() == NEW


def test_two_outputs_need_two_files(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(InputError, match="it is to hold a text and a text"):
        require_outputs([TEXT.at(tmp_path / "file"), TEXT.at(tmp_path / "link")])


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "file"
    path.write_bytes(OURS)
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, NEW)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", OURS)]


def test_what_cannot_be_decoded_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for foreign in (b"\x89PNG\xff", b'{"name": "\xff"}', b'{"name": 3}', b"{"):
        path.write_bytes(foreign)
        with pytest.raises(InputError, match="it is not a profile that Longstep wrote"):
            PROFILE_FILE.at(path).require()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OURS)
    with pytest.raises(InputError, match="cannot be made"):
        make_folder(tmp_path / "file" / "folder")
