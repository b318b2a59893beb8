"""What killed processes have left goes; what belongs to the living stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sgl_ssd import folders
from sgl_ssd.folders import make_folder, remove_folder

MAKER = """
import sys
from sgl_ssd.folders import make_folder
print(make_folder(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "SHORT", str(tmp_path))
    return tmp_path


def maker(temporary: Path) -> tuple[subprocess.Popen[str], str]:
    """Another process that has made a folder, and the folder, an hour old."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    assert process.stdout is not None
    folder = process.stdout.readline().strip()
    Path(folder, "draft").touch()
    age(folder)
    return process, folder


def age(folder: str) -> None:
    hour_ago = os.stat(folder).st_mtime - 3600
    os.utime(folder, (hour_ago, hour_ago))


def test_a_folder_is_for_this_user_alone_and_goes_when_told() -> None:
    folder = make_folder()
    assert os.stat(folder).st_mode & 0o777 == 0o700
    Path(folder, "file").touch()
    remove_folder(folder)
    remove_folder(folder)
    assert not os.path.exists(folder)


def test_a_socket_finds_room_where_temporary_files_have_long_names(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("deep" * 30)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert os.path.dirname(make_folder()) == str(temporary)


def test_the_folder_of_a_killed_process_goes_with_the_next_start(temporary: Path) -> None:
    process, folder = maker(temporary)
    try:
        make_folder()
        assert os.path.exists(folder), "its maker lives"
    finally:
        process.kill()
        process.communicate()
    mine = make_folder()
    assert os.path.exists(mine) and not os.path.exists(folder)


def test_what_may_be_somebody_elses_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, folder = maker(temporary)
    process.kill()
    process.communicate()
    young = temporary / f"{folders.PREFIX}young"
    young.mkdir()
    other = temporary / "other"
    other.mkdir()
    (temporary / f"{folders.PREFIX}link").symlink_to(other)
    (temporary / f"{folders.PREFIX}file").touch()
    age(str(other))
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    make_folder()
    assert os.path.exists(folder), "it belongs to another user"
    monkeypatch.undo()
    folders._sweep(str(temporary))
    assert not os.path.exists(folder)
    assert young.exists() and other.exists()


BAR = """
import multiprocessing, sys
from sgl_ssd.folders import keep_tqdm_in_process
multiprocessing.set_start_method("spawn")
if sys.argv[1] == "ours":
    keep_tqdm_in_process()
import tqdm.auto
list(tqdm.auto.tqdm(range(2)))
print([type(lock).__module__ for lock in getattr(tqdm.tqdm.get_lock(), "locks", [])])
"""


@pytest.mark.parametrize(("whose", "semaphores"), [("tqdm's", 1), ("ours", 0)])
def test_progress_bars_make_no_named_semaphore(whose: str, semaphores: int) -> None:
    command = [sys.executable, "-c", BAR, whose]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.count("multiprocessing.synchronize") == semaphores
