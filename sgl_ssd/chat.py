"""`python -m sgl_ssd.chat [URL]`: chat with a server in the terminal, and see how fast it is.

Talks to any server of the OpenAI API; the numbers of SSD need one of ours. They are differences of
the server's counters, so they hold the requests of others that ran meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from sgl_ssd.client import Client, ServerError, add_server_args
from sgl_ssd.errors import SSDError
from sgl_ssd.live import Frame, Look, compare

HELP = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


@dataclass(frozen=True)
class Answer:
    """One answer: its text, its tokens (0: stopped), seconds to its first and last piece."""

    text: str
    tokens: int
    first_s: float
    seconds: float

    def speed(self, frame: Frame | None) -> str:
        """The read-out below an answer."""
        # The first token comes from the prefill, so its time does not count for the rate.
        decode_s = self.seconds - self.first_s
        words = [f"{self.tokens} tokens" if self.tokens else "stopped"]
        if self.tokens > 1 and decode_s > 0:
            words.append(f"{(self.tokens - 1) / decode_s:.1f} tokens/s")
        words.append(f"first after {1e3 * self.first_s:.0f} ms")
        if frame is not None and frame.accept_length is not None:
            words.append(f"accept length {frame.accept_length:.2f}")
        if frame is not None and frame.hit_rate is not None:
            words.append(f"hit rate {frame.hit_rate:.0%}")
        return " · ".join(words)


class Chat:
    """A conversation with one server."""

    def __init__(self, client: Client, console: Console, options: dict[str, Any]) -> None:
        self._client = client
        self._console = console
        self._options = options
        self._messages: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget the conversation."""
        self._messages.clear()

    def ask(self, text: str) -> Answer:
        """Print the answer while it comes, then how fast it was. Raises `ServerError`."""
        self._messages.append({"role": "user", "content": text})
        try:
            before = self._look()
            answer = self._stream()
        except BaseException:
            self._messages.pop()
            raise
        after = self._look()
        frame = compare(before, after) if before is not None and after is not None else None
        self._messages.append({"role": "assistant", "content": answer.text})
        self._console.print(answer.speed(frame), style="dim", highlight=False)
        return answer

    def _stream(self) -> Answer:
        started = time.perf_counter()
        first_s, text, tokens = 0.0, "", 0
        body = {
            "model": "default",
            "messages": self._messages,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        try:
            for event in self._client.stream("/v1/chat/completions", body):
                for choice in event.get("choices", []):
                    delta = choice["delta"]
                    piece = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                    if piece and not text:
                        first_s = time.perf_counter() - started
                    text += piece
                    self._console.print(piece, end="", markup=False, highlight=False)
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        except KeyboardInterrupt:
            pass  # closing the connection makes the server end the request
        self._console.print()
        return Answer(text, tokens, first_s, time.perf_counter() - started)

    def _look(self) -> Look | None:
        try:
            return Look.of(self._client.get("/server_info"), time.perf_counter())
        except SSDError:
            return None  # a server of somebody else has no such numbers


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_ssd.chat",
        description="Chat with a server over the OpenAI API; each answer says how fast it was.",
    )
    add_server_args(parser)
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the model's")
    parser.add_argument(
        "--max-tokens", type=int, default=512, metavar="N",
        help="longest answer in tokens (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--once", metavar="TEXT", help="ask this, print the answer, and end")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Chat until the end of the input; returns the exit status."""
    args = build_parser().parse_args(argv)
    options: dict[str, Any] = {"max_tokens": args.max_tokens}
    if args.temperature is not None:
        options["temperature"] = args.temperature
    console = Console(soft_wrap=True)
    client = Client(args.url, args.api_key)
    chat = Chat(client, console, options)
    try:
        model = client.get("/v1/models")["data"][0]["id"]
        if args.once is not None:
            chat.ask(args.once)
            return 0
        console.print(f"{model} at {client.url}; {HELP}", style="dim", highlight=False)
        return _converse(chat, console)
    except (SSDError, LookupError, TypeError) as e:
        print(f"sgl_ssd.chat: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _converse(chat: Chat, console: Console) -> int:
    while True:
        try:
            text = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if text in ("/quit", "/exit"):
            return 0
        if text == "/reset":
            chat.reset()
        elif text.startswith("/"):
            console.print(HELP, style="dim", highlight=False)
        elif text:
            try:
                chat.ask(text)
            except ServerError as e:
                print(f"sgl_ssd.chat: {e}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
