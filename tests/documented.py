"""The commands of a page of the documents, for tests that run them on this host."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def commands(page: Path) -> list[str]:
    """Every command of the page's bash blocks, on one line unless it has a quoted line break."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [command for block in blocks for command in _split(block)]


def _split(block: str) -> Iterator[str]:
    command = ""
    for line in block.replace("\\\n", " ").splitlines():
        command += line
        try:
            shlex.split(command, comments=True)
        except ValueError:  # a quote is open
            command += "\n"
        else:
            yield command
            command = ""


class Recipe:
    """The commands of one page, each found by a part of it, with names of this host in them."""

    def __init__(self, page: Path, here: Mapping[str, str]) -> None:
        """`here`: what stands for a name or a number of the page on this host."""
        self._commands, self._here = commands(page), here

    def command(self, part: str) -> str:
        """The only command with `part` in it, as it is run here."""
        (found,) = (command for command in self._commands if part in command)
        for name, value in self._here.items():
            found = found.replace(name, value)
        return found

    def arguments(self, part: str) -> list[str]:
        """What follows `python -m MODULE` in that command."""
        words = shlex.split(self.command(part), comments=True)
        return words[words.index("-m") + 2 :]
