"""`python -m sgl_ssd.target_server`: the target's process, started by `sgl_ssd.launch_server`.

The same as `sglang.launch_server`, plus a check that our plugin is in place, and the page `/ssd`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from sgl_ssd.errors import SSDError
from sgl_ssd.host import load_plugins
from sgl_ssd.supervisor import LAUNCHER_ENV

_PR_SET_PDEATHSIG = 1


def _die_with_launcher() -> None:
    """Be killed when the launcher ends, which may have happened already.

    Called before the slow imports, so that none of them outlives it.
    """
    launcher = os.environ.pop(LAUNCHER_ENV, None)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher is not None and os.getppid() != int(launcher):
        os._exit(1)


def main(argv: list[str]) -> int:
    """Serve until stopped; returns the exit status."""
    _die_with_launcher()
    from sglang.srt.utils import kill_process_tree

    try:
        load_plugins()
        from sglang.launch_server import run_server
        from sglang.srt.server_args import prepare_server_args

        from sgl_ssd import page

        server_args = prepare_server_args(argv)
        page.install(server_args)
    except (SSDError, ValueError) as e:
        print(f"sgl_ssd: {e}", file=sys.stderr)
        return 1
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
