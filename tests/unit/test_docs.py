"""README and docs say what the code does: flags, commands, links."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from sgl_ssd import launch_server

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# Started by other modules, not by people.
INTERNAL = {"sgl_ssd.target_server"}


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_flags = _load(DOCS / "make_flags.py")


# -- flags ---------------------------------------------------------------------------------------


def test_the_page_of_flags_is_fresh() -> None:
    assert make_flags.PAGE.read_text() == make_flags.render(), "run: python docs/make_flags.py"


@pytest.mark.parametrize("module", make_flags.PROGRAMS)
def test_every_flag_is_documented(module: str) -> None:
    _, parser = make_flags.PROGRAMS[module]
    section = make_flags.PAGE.read_text().split(f"## python -m {module}\n")[1].split("\n## ")[0]
    for action in make_flags.actions(parser()):
        assert action.help, action.dest
        for flag in action.option_strings:
            assert f"`{flag}`" in section, flag


def test_every_program_is_documented() -> None:
    programs = set()
    for package, folder in (
        ("sgl_ssd", "sgl_ssd"),
        ("sgl_ssd.scheduler", "scheduler"),
        ("sgl_ssd.draft_server", "draft_server"),
    ):
        for path in (ROOT / folder).glob("*.py"):
            if re.search(r'^if __name__ == "__main__"', path.read_text(), re.M):
                programs.add(package if path.stem == "__main__" else f"{package}.{path.stem}")
    assert programs - INTERNAL == set(make_flags.PROGRAMS)


# -- commands ------------------------------------------------------------------------------------


def _code(text: str) -> Iterator[tuple[str, str]]:
    """Language and text of every block, and inline code as language ''."""
    yield from FENCE.findall(text)
    for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        yield "", code


def _commands() -> Iterator[tuple[str, str, list[str]]]:
    """Page, module and arguments of every `python -m MODULE ...`."""
    for page in PAGES:
        for language, code in _code(page.read_text()):
            if language not in ("", "bash"):
                continue
            for line in code.replace("\\\n", " ").splitlines():
                found = re.search(r"python -m (\S+)(.*)", line)
                if found:
                    words = shlex.split(found[2], comments=True)
                    yield page.name, found[1], [w for w in words if w != "..."]


COMMANDS = sorted({(page, module, tuple(words)) for page, module, words in _commands()})


def _split(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A tool's own arguments, and those behind `--`, which it hands to servers."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


@cache
def _parser(module: str) -> argparse.ArgumentParser | None:
    if module == "sgl_ssd.launch_server":
        return launch_server.build_parser()  # with SGLang's flags
    if module in make_flags.PROGRAMS:
        parser: argparse.ArgumentParser = make_flags.PROGRAMS[module][1]()
        return parser
    return None


def _path(module: str) -> Path | None:
    name = module.replace(".", "/")
    for folder in ("sgl_ssd/scheduler", "sgl_ssd/draft_server"):
        name = name.replace(folder, folder.removeprefix("sgl_ssd/"))
    found = [p for p in (ROOT / f"{name}.py", ROOT / name / "__main__.py") if p.exists()]
    return found[0] if found else None


def test_commands_were_found() -> None:
    modules = {module for _, module, _ in COMMANDS}
    assert set(make_flags.PROGRAMS) <= modules
    assert len(COMMANDS) > 20


@pytest.mark.parametrize(("page", "module", "words"), COMMANDS, ids=str)
def test_commands_name_modules_and_flags_that_exist(
    page: str, module: str, words: tuple[str, ...]
) -> None:
    own, served = _split(words)
    flags = [word.split("=")[0] for word in own if word.startswith("--")]
    parser, path = _parser(module), _path(module)
    for flag in [word for word in served if word.startswith("--")]:
        assert flag in launch_server.build_parser()._option_string_actions, f"{page}: {flag}"
    if parser is not None:
        for flag in flags:
            assert flag in parser._option_string_actions, f"{page}: {module} {flag}"
    elif path is not None:
        for flag in flags:
            assert f'"{flag}"' in path.read_text(), f"{page}: {module} {flag}"
    else:
        assert importlib.util.find_spec(module) is not None, f"{page}: {module}"


def test_python_in_the_docs_compiles() -> None:
    blocks = [c for p in PAGES for language, c in _code(p.read_text()) if language == "python"]
    assert blocks
    for block in blocks:
        ast.parse(block)


# -- links and pages -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = {
        page
        for entry in yaml.safe_load(text)["nav"]
        for value in entry.values()
        for page in ([value] if isinstance(value, str) else [p for e in value for p in e.values()])
    }
    assert listed == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
