"""What processes must not leave behind.

Folders for sockets and temporary files are of this user alone (mode 0700). A folder is locked by
the process that made it. Of one that was killed no lock is left: its folder goes when somebody
makes the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time

import tqdm

PREFIX = "sgl_ssd_run_"
MAX_SOCKET_PATH = 100  # characters; the system's own limit is 107 bytes
ROOM = MAX_SOCKET_PATH - len(f"/{PREFIX}12345678/draft")
SHORT = "/tmp"  # where a socket's path is never too long
YOUNG_S = 60.0  # a folder is there a moment before its lock

_locks: dict[str, int] = {}  # open for as long as the folder is ours


def make_folder() -> str:
    """A new folder among the temporary files; removes those of processes that were killed."""
    among = tempfile.gettempdir()
    if len(among) > ROOM and os.access(SHORT, os.W_OK):
        among = SHORT
    _sweep(among)
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=among)
    _locks[folder] = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(_locks[folder], fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder


def remove_folder(folder: str) -> None:
    """Remove a folder and all that is in it; nothing happens if it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)


def keep_tqdm_in_process() -> None:
    """Lock progress bars with a lock of this process.

    tqdm's own is a named semaphore, which stays in /dev/shm when the process is killed.
    """
    tqdm.tqdm.set_lock(threading.RLock())


def _sweep(among: str) -> None:
    with contextlib.suppress(OSError), os.scandir(among) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_dead(entry.path)


def _remove_if_dead(folder: str) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        status = os.fstat(lock)
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > YOUNG_S:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
