"""`python -m sgl_ssd.top [URL]`: what a server does, live in the terminal."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sgl_ssd.client import Client, ServerError, add_server_args
from sgl_ssd.errors import SSDError
from sgl_ssd.live import Frame, History, Look, compare

BLOCKS = " ▁▂▃▄▅▆▇█"
# Parts of a round: how they are called, and their colour.
PARTS = {
    "target": ("waits for the target", "blue"),
    "drafts": ("waits for drafts", "red"),
    "launch": ("launches the verify", "yellow"),
    "verify": ("verify", "blue"),
    "host": ("host work", "green"),
}
# The fonts that the reader's machine has, none from elsewhere.
SVG_FORMAT = re.sub(r"@font-face {{.*?}}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)
MAX_REQUESTS = 12
CHART_POINTS = 60


def render(frame: Frame, speeds: Iterable[float] = (), width: int = 100) -> RenderableType:
    """A frame as a terminal shows it; `speeds` are the tokens/s of earlier frames."""
    rows: list[RenderableType] = [_numbers(frame), Text(_chart(list(speeds)), style="cyan")]
    if frame.round_ms is not None:
        rows += [Text(), *_round(frame, width - 4)]
    rows += [Text(), _shares(frame)]
    if len(frame.draft_servers) > 1:
        rows += [Text(), _draft_servers(frame)]
    if frame.requests:
        rows += [Text(), _requests(frame)]
    rows.append(Text())
    rows += [Text(f"! {text}", style="bold yellow") for text in frame.alerts]
    if not frame.alerts:
        rows.append(Text("no alerts", style="green"))
    return Panel(
        Group(*rows),
        title=_title(frame),
        subtitle=_settings(frame),
        width=width,
        border_style="dim",
    )


def _title(frame: Frame) -> Text:
    text = Text(f"{_name(frame.model)} ← {_name(frame.draft_model) or 'no draft server'}")
    if frame.draft != "none":
        text.append(f" ({frame.draft})", style="green" if frame.draft == "up" else "bold red")
    return text


def _name(path: str) -> str:
    return "/".join(Path(path).parts[-2:]) if not path.startswith("/") else Path(path).name


def _settings(frame: Frame) -> str:
    counts = frame.fan_out
    fan_out = counts[:1] if len(set(counts)) == 1 else counts
    return (
        f"K={frame.num_steps} F={','.join(map(str, fan_out))} "
        f"{frame.backup} {frame.verification}, drafting {frame.drafting}"
    )


def _numbers(frame: Frame) -> Table:
    table = Table.grid(padding=(0, 3))
    cells = [
        ("tokens/s", f"{frame.tokens_per_s:.1f}"),
        ("accept length", _number(frame.accept_length)),
        ("hit rate", _percent(frame.hit_rate)),
        ("verifier idle", _percent(frame.verifier_idle)),
        ("draft idle", _percent(frame.draft_idle)),
        ("sessions", str(frame.sessions)),
    ]
    table.add_row(*(Text(name, style="dim") for name, _ in cells))
    table.add_row(*(Text(value, style="bold") for _, value in cells))
    return table


def _chart(values: list[float]) -> str:
    highest = max(values, default=0.0)
    if not highest:
        return ""
    return "".join(BLOCKS[round(value / highest * (len(BLOCKS) - 1))] for value in values)


def _round(frame: Frame, width: int) -> Iterable[RenderableType]:
    assert frame.round_ms is not None
    yield Text.assemble(
        ("round ", "dim"), (f"{frame.round_ms:.1f} ms", "bold"),
        ("   verify ", "dim"), _ms(frame.verify_ms),
        ("   build ", "dim"), _ms(frame.build_ms),
        ("   draft step ", "dim"), _ms(frame.step_ms),
        ("   round trip ", "dim"), _ms(frame.round_trip_ms),
    )  # fmt: skip
    yield _bar(frame.round_parts, width)
    legend = Text()
    for name, value in frame.round_parts.items():
        label, colour = PARTS[name]
        legend.append("■ ", style=colour)
        legend.append(f"{label} {value:.1f} ms".replace(" ", "\u00a0") + "   ")
    yield legend


def _bar(parts: Mapping[str, float], width: int) -> Text:
    """One line, `width` characters long, each part its share of it."""
    whole = sum(parts.values())
    bar, done, drawn = Text(), 0.0, 0
    for name, value in parts.items():
        done += value
        until = round(width * done / whole) if whole else 0
        bar.append("█" * (until - drawn), style=PARTS[name][1])
        drawn = until
    return bar


def _shares(frame: Frame) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = [
        ("right by position", _per_index(frame.accepted_per_position, 1)),
        ("hits by accepted length", _per_index(frame.hit_rate_per_length, 0)),
        ("answers", _named(frame.outcomes)),
        ("rounds without drafts", _named(frame.without_drafts)),
        ("KV in use", f"target {frame.kv_use:.0%}   draft {_percent(frame.draft_kv_use)}"),
    ]
    for name, value in rows:
        if value:
            table.add_row(Text(name, style="dim"), Text(value))
    return table


def _draft_servers(frame: Frame) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    table.add_column("draft server")
    for name in ("", "sessions", "round trip", "ping"):
        table.add_column(name, justify="right")
    for i, server in enumerate(frame.draft_servers):
        up = server["draft"] == "up"
        table.add_row(
            Text(f"{i} {server['endpoint']}", overflow="ellipsis", no_wrap=True),
            Text(server["draft"], style="green" if up else "bold red"),
            str(server["open_sessions"]),
            Text(*_ms(server["round_trip_ms"] or None)),
            f"{server['ping_ms']:.2f} ms" if server["ping_ms"] else "–",
        )
    return table


def _requests(frame: Frame) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim", pad_edge=False)
    table.add_column("request")
    for name in ("prompt", "tokens", "rounds", "accept length"):
        table.add_column(name, justify="right")
    for row in frame.requests[:MAX_REQUESTS]:
        table.add_row(
            Text(str(row["rid"])[:12]),
            str(row["prompt_tokens"]),
            str(row["tokens"]),
            str(row["rounds"]),
            _number(row["accept_length"]),
        )
    if len(frame.requests) > MAX_REQUESTS:
        table.add_row(f"and {len(frame.requests) - MAX_REQUESTS} more")
    return table


def _per_index(shares: Iterable[float | None], first: int) -> str:
    return "   ".join(f"{i}: {_percent(share)}" for i, share in enumerate(shares, first))


def _named(shares: Mapping[str, float]) -> str:
    return "   ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _ms(value: float | None) -> tuple[str, str]:
    return ("–" if value is None else f"{value:.1f} ms", "bold")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_ssd.top",
        description="Live view of a server: speed, hits, where a round's time goes, and alerts.",
    )
    add_server_args(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S",
        help="seconds between two looks (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="with --once: a picture of it too")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Show frames until Ctrl-C; returns the exit status."""
    args = build_parser().parse_args(argv)
    client = Client(args.url, args.api_key)
    try:
        first = _look(client)
        if args.once:
            _once(client, first, args.interval, args.svg)
        else:
            _live(client, first, args.interval)
    except SSDError as e:
        print(f"sgl_ssd.top: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _look(client: Client) -> Look:
    return Look.of(client.get("/server_info"), time.monotonic())


def _once(client: Client, first: Look, interval: float, svg: Path | None) -> None:
    time.sleep(interval)
    console = Console(record=svg is not None)
    width = min(100, console.width)
    console.print(render(compare(first, _look(client)), width=width))
    if svg is not None:
        console.save_svg(str(svg), title="python -m sgl_ssd.top", code_format=SVG_FORMAT)


def _live(client: Client, first: Look, interval: float) -> None:
    history = History()
    history.frame(first)
    speeds: deque[float] = deque(maxlen=CHART_POINTS)
    console = Console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(interval)
            try:
                frame = history.frame(_look(client))
            except ServerError as e:
                live.update(Text(f"{e}; trying again", style="bold red"), refresh=True)
                continue
            speeds.append(frame.tokens_per_s)
            live.update(render(frame, speeds, min(100, console.width)), refresh=True)


if __name__ == "__main__":
    sys.exit(main())
