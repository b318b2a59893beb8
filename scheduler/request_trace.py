"""What happened in the rounds of one request, for a client that asked for it. Pure Python.

The request carries its trace to SGLang as a value per token, `customized_info`, of which each part
of an answer gets a slice; `sgl_ssd.explain` puts them together in the HTTP process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from sgl_ssd.explain import LAST_ROUNDS


class RequestTrace:
    """Rounds on their way to the client, the newest `LAST_ROUNDS`.

    `prompt_len`: tokens before the first one of the output. `settle` takes in outcomes that are on
    the host by now.
    """

    def __init__(self, prompt_len: int, settle: Callable[[], None]) -> None:
        self._prompt_len = prompt_len
        self._settle = settle
        self._answer_s = 0.0
        self._verifying: deque[dict[str, Any]] = deque(maxlen=LAST_ROUNDS)
        self._done: deque[tuple[int, dict[str, Any]]] = deque(maxlen=LAST_ROUNDS)
        self._rounds = 0

    def answered(self, seconds: float) -> None:
        """Drafts, or the news that there are none, came so long after the question (0: before)."""
        self._answer_s = seconds

    def verified(self, drafted: int, source: str, wait_s: float) -> None:
        """A verify begins with `drafted` tokens; `source` is where they come from, or why there
        are none. It waited `wait_s` for them."""
        self._rounds += 1
        self._verifying.append(
            {
                "round": self._rounds,
                "drafts": source,
                "drafted": drafted,
                "answer_ms": round(1e3 * self._answer_s, 3),
                "wait_ms": round(1e3 * wait_s, 3),
            }
        )
        self._answer_s = 0.0

    def committed(self, length: int, accepted: int, bonus: int, verify_s: float) -> None:
        """Its outcome: there were `length` tokens, then come `accepted` drafts and `bonus`."""
        if self._verifying:
            entry = self._verifying.popleft()
            entry |= {"k": accepted, "bonus": bonus, "verify_ms": round(1e3 * verify_s, 3)}
            self._done.append((length - self._prompt_len, entry))

    def __getitem__(self, part: slice) -> list[dict[str, Any]]:
        """What SGLang sends along with the output tokens `part`: rounds not sent before.

        One more row may run after the end of a text; it is no round of the request.
        """
        self._settle()
        sent = []
        while self._done and self._done[0][0] < part.stop:
            sent.append(self._done.popleft()[1])
        return sent
