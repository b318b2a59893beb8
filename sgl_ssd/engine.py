"""`sgl_ssd.Engine`: `sglang.Engine` with drafts from a second process, for offline use.

Takes the arguments of `sglang.Engine` and those of `sgl_ssd.launch_server` (`ssd_fan_out`,
`ssd_backup`, ...), by keyword. As with SGLang, child processes import the main module again, so a
script needs its `if __name__ == "__main__":`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from sglang.srt.entrypoints.engine import Engine as SGLangEngine
from sglang.srt.plugins.hook_registry import HookRegistry

from sgl_ssd import args as ssd_args
from sgl_ssd import config, host, plugin
from sgl_ssd.errors import ConfigError, DraftUnavailableError
from sgl_ssd.launch_server import check_models
from sgl_ssd.supervisor import DraftServers
from sgl_ssd.transport import private_ipc_endpoint, remove_private_ipc

logger = logging.getLogger(__name__)


class Engine(SGLangEngine):
    """An engine in this process, its scheduler and its draft servers in processes of their own."""

    def __init__(self, **kwargs: Any) -> None:
        """Start everything and wait until it can serve.

        Raises an `SSDError` for arguments or models that cannot work, and `DraftUnavailableError`
        when a draft server of our own does not start.
        """
        host.check_sglang_version()
        if "server_args" in kwargs:
            raise ConfigError("server_args: pass the arguments of ServerArgs by keyword instead")
        # Offline use is quiet by default, as SGLang's is.
        kwargs.setdefault("log_level", "error")
        self._drafts: DraftServers | None = None
        self._draft_error: DraftUnavailableError | None = None
        self._endpoint = private_ipc_endpoint()
        try:
            plan, server_kwargs = ssd_args.from_keywords(kwargs, self._endpoint)
            check_models(plan)
            with _configured(plan.verifier):
                self._start(plan, server_kwargs)
        except BaseException:
            self._stop_drafts()
            raise

    def _start(self, plan: ssd_args.LaunchPlan, server_kwargs: dict[str, Any]) -> None:
        _load_plugin()
        if not plan.drafts:
            super().__init__(**server_kwargs)
            return
        mine = set(psutil.Process().children(recursive=True))
        self._drafts = DraftServers(
            plan.drafts, _end_like_sglang if plan.verifier.draft_required else None
        )
        waiting = threading.Thread(
            target=self._await_draft,
            args=(self._drafts, plan.verifier.draft_start_timeout_s, mine),
            daemon=True,
        )
        # Both take their time to start: let them do so at once, unless they share a GPU.
        waiting.start()
        if plan.mem_fraction_static is not None:
            waiting.join()
            if self._draft_error is not None:
                raise self._draft_error
        try:
            super().__init__(**server_kwargs)
        except RuntimeError:
            if self._draft_error is not None:
                raise self._draft_error from None
            raise
        waiting.join()
        if self._draft_error is not None:
            super().shutdown()
            raise self._draft_error
        self._drafts.watch()

    def _await_draft(
        self, drafts: DraftServers, timeout_s: float, mine: set[psutil.Process]
    ) -> None:
        try:
            drafts.wait_ready(timeout_s, lambda seconds: None)
        except DraftUnavailableError as e:
            # The scheduler would wait for it until its own timeout: end what this start has begun.
            self._draft_error = e
            for child in set(psutil.Process().children(recursive=True)) - mine:
                with suppress(psutil.NoSuchProcess):
                    child.kill()

    def shutdown(self) -> None:
        """End every process of this engine. Idempotent; also called when the program exits."""
        # SGLang ends by killing all children, which would look like the death of a draft server.
        self._stop_drafts()
        super().shutdown()

    def _stop_drafts(self) -> None:
        drafts, self._drafts = self._drafts, None
        if drafts is not None:
            drafts.stop()
        remove_private_ipc(self._endpoint)


@contextmanager
def _configured(verifier: config.VerifierConfig) -> Iterator[None]:
    """The verifier's configuration in the environment, for the processes that start meanwhile."""
    before = os.environ.get(config.ENV)
    verifier.to_environment()
    try:
        yield
    finally:
        if before is None:
            del os.environ[config.ENV]
        else:
            os.environ[config.ENV] = before


def _load_plugin() -> None:
    """Put SSD in place in this process, also where a plain engine has run before."""
    try:
        host.load_plugins()
    except ConfigError:
        # SGLang loads plugins once a process, and ours may then have seen no configuration.
        plugin.load()
        HookRegistry.apply_hooks()
        host.load_plugins()


def _end_like_sglang() -> None:
    """A draft server that was required is lost: what SGLang does when its scheduler dies."""
    os.kill(os.getpid(), signal.SIGQUIT)
