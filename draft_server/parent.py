"""Ends this process when another one is gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

POLL_S = 0.5


def exit_with(pid: int, clean_up: Callable[[], object] | None = None) -> None:
    """Exit within a second once process `pid` is gone (it may be gone already), after `clean_up`.

    From a thread: a loop that is stuck does not keep this process alive.
    """
    is_parent = pid == os.getppid()
    threading.Thread(target=_watch, args=(pid, is_parent, clean_up), daemon=True).start()


def _watch(pid: int, is_parent: bool, clean_up: Callable[[], object] | None) -> None:
    while _alive(pid) and (not is_parent or os.getppid() == pid):
        time.sleep(POLL_S)
    try:
        if clean_up is not None:
            clean_up()
    finally:
        os._exit(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
