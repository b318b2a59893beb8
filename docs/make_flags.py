"""Write `flags.md` from the parsers.

python docs/make_flags.py
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from sgl_ssd import args, chat, keys, plan, timeline, top  # noqa: E402
from sgl_ssd.draft_server.args import build_parser as draft_server_parser  # noqa: E402

PAGE = Path(__file__).with_name("flags.md")


def _launcher() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    args.add_ssd_args(parser)
    return parser


# Module -> what it is for, and its parser.
PROGRAMS: dict[str, tuple[str, Callable[[], argparse.ArgumentParser]]] = {
    "sgl_ssd.launch_server": (
        "Serves a model. All flags of `sglang.launch_server` work (`--help` lists them); these are "
        "ours, and those of SGLang's that mean something to SSD. `sgl_ssd.Engine` takes the same "
        "as keywords: `ssd_fan_out=4`.",
        _launcher,
    ),
    "sgl_ssd.draft_server": (
        "A draft server of its own, for launchers with `--ssd-draft-endpoint`.",
        draft_server_parser,
    ),
    "sgl_ssd.plan": ("What K and F would be best, and how fast that is.", plan.parser),
    "sgl_ssd.top": ("A live view of a server in the terminal.", top.build_parser),
    "sgl_ssd.chat": ("Chat with a server; each answer says how fast it was.", chat.build_parser),
    "sgl_ssd.timeline": (
        "Summarises what `--ssd-trace` has written, and draws a few rounds.",
        timeline.build_parser,
    ),
    "sgl_ssd.keys": ("Keys for a draft server that is reached over a network.", keys.build_parser),
}

DEFAULT_IN_WORDS = re.compile(r" \(default: ([^()]*)\)$")

HEAD = """# Flags

<!-- Written by docs/make_flags.py from the parsers: change those, then run it again. -->

"""


def render() -> str:
    """The whole page."""
    return HEAD + "\n".join(
        _program(module, purpose, parser()) for module, (purpose, parser) in PROGRAMS.items()
    )


def _program(module: str, purpose: str, parser: argparse.ArgumentParser) -> str:
    rows = "\n".join(_row(action) for action in actions(parser))
    head = "| flag | default | meaning |\n|---|---|---|"
    return f"## python -m {module}\n\n{purpose}\n\n{head}\n{rows}\n"


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """What a parser takes, without `--help`."""
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            yield action


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{_value(action)}`"
    if action.option_strings and action.nargs != 0:
        names += f" {_value(action)}"
    cells = (names, _default(action), _meaning(action))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return ", ".join(str(choice) for choice in action.choices)
    return str(action.metavar or action.dest).upper().replace("-", "_")


def _default(action: argparse.Action) -> str:
    if action.required:
        return "required"
    if action.default is None:
        told = DEFAULT_IN_WORDS.search(action.help or "")
        return told.group(1) if told else ""
    if action.default is False:
        return ""
    default = action.default if isinstance(action.default, list) else [action.default]
    return ", ".join(str(value) for value in default)


def _meaning(action: argparse.Action) -> str:
    """The help text, without the default that has a column of its own."""
    text = " ".join((action.help or "").split())
    if action.default is None:
        return DEFAULT_IN_WORDS.sub("", text)
    return text.removesuffix(" (default: %(default)s)").replace("%(default)s", _default(action))


if __name__ == "__main__":
    PAGE.write_text(render())
