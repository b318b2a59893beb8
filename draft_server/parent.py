"""Ends this process when another one is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

POLL_S = 0.5
_PR_SET_PDEATHSIG = 1


def exit_with(pid: int) -> None:
    """Exit once process `pid` is gone: at once on Linux if it is the parent, else within a second.

    Exits now if it is gone already.
    """
    if pid == os.getppid() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(pid, pid == os.getppid()), daemon=True).start()


def _watch(pid: int, is_parent: bool) -> None:
    while _alive(pid) and (not is_parent or os.getppid() == pid):
        time.sleep(POLL_S)
    os._exit(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
