"""Imports point one way: base modules, then the two sides, then what starts them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "sgl_ssd": ROOT / "sgl_ssd",
    "sgl_ssd.scheduler": ROOT / "scheduler",
    "sgl_ssd.draft_server": ROOT / "draft_server",
}

# Who may import SGLang. A name with a dot at its end stands for everything below it.
SGLANG_USERS = {
    "sgl_ssd.cpu.__init__",
    "sgl_ssd.cpu.allocator",
    "sgl_ssd.cpu.attention",
    "sgl_ssd.cpu.defaults",
    "sgl_ssd.cpu.grammar",
    "sgl_ssd.cpu.hooks",
    "sgl_ssd.cpu.lora",
    "sgl_ssd.cpu.platform",
    "sgl_ssd.detokenizer",
    "sgl_ssd.engine",
    "sgl_ssd.explain",
    "sgl_ssd.host",
    "sgl_ssd.request_checks",
    "sgl_ssd.launch_server",
    "sgl_ssd.page",
    "sgl_ssd.plugin",
    "sgl_ssd.target_server",
    "sgl_ssd.scheduler.",
    "sgl_ssd.draft_server.attention",
    "sgl_ssd.draft_server.kv",
    "sgl_ssd.draft_server.runner",
    "sgl_ssd.draft_server.step_graphs",
}
SIDES = ("sgl_ssd.scheduler", "sgl_ssd.draft_server")
# What both sides stand on; it knows neither of them nor what starts them.
BASE = {
    "sgl_ssd.config",
    "sgl_ssd.cpu",
    "sgl_ssd.errors",
    "sgl_ssd.explain",
    "sgl_ssd.fan_out",
    "sgl_ssd.folders",
    "sgl_ssd.gpus",
    "sgl_ssd.fused_draw",
    "sgl_ssd.keys",
    "sgl_ssd.measurements",
    "sgl_ssd.metrics",
    "sgl_ssd.models",
    "sgl_ssd.ngram",
    "sgl_ssd.planner",
    "sgl_ssd.protocol",
    "sgl_ssd.recorder",
    "sgl_ssd.rejection",
    "sgl_ssd.replicas",
    "sgl_ssd.sampling",
    "sgl_ssd.timeline",
    "sgl_ssd.transport",
    "sgl_ssd.vocabulary",
}


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            name = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            found[name] = path
    return found


MODULES = _modules()


def _imports(module: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a module imports, wherever in it."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                source = ".".join([*package, source] if source else package)
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def _is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _may_use_sglang(module: str) -> bool:
    return module in SGLANG_USERS or any(
        entry.endswith(".") and module.startswith(entry) for entry in SGLANG_USERS
    )


def test_modules_were_found() -> None:
    for package in FOLDERS:
        assert f"{package}.__init__" in MODULES


@pytest.mark.parametrize("module", MODULES)
def test_only_the_listed_modules_import_sglang(module: str) -> None:
    if _may_use_sglang(module):
        return
    offences = [(line, name) for line, name in _imports(module) if _is_below(name, "sglang")]
    assert offences == []


@pytest.mark.parametrize("module", MODULES)
def test_the_two_sides_do_not_know_each_other(module: str) -> None:
    for mine, other in (SIDES, SIDES[::-1]):
        if _is_below(module, mine):
            offences = [(line, name) for line, name in _imports(module) if _is_below(name, other)]
            assert offences == []


@pytest.mark.parametrize("module", MODULES)
def test_sides_do_not_import_what_starts_them(module: str) -> None:
    if not any(_is_below(module, side) for side in SIDES):
        return
    allowed = (*BASE, *SIDES)
    offences = [
        (line, name)
        for line, name in _imports(module)
        if _is_below(name, "sgl_ssd") and not any(_is_below(name, part) for part in allowed)
    ]
    assert offences == []


@pytest.mark.parametrize("module", MODULES)
def test_base_modules_import_base_modules_only(module: str) -> None:
    if not any(_is_below(module, base) for base in BASE):
        return
    offences = [
        (line, name)
        for line, name in _imports(module)
        if _is_below(name, "sgl_ssd") and not any(_is_below(name, base) for base in BASE)
    ]
    assert offences == []


@pytest.mark.parametrize("module", ["sgl_ssd.errors", "sgl_ssd.protocol", "sgl_ssd.fan_out"])
def test_the_lowest_modules_need_errors_only(module: str) -> None:
    if module not in MODULES:
        pytest.skip(f"{module} does not exist")
    names = [name for _line, name in _imports(module) if _is_below(name, "sgl_ssd")]
    assert all(_is_below(name, "sgl_ssd.errors") for name in names)


def test_nothing_pickles() -> None:
    """Neither the wire nor anything else deserialises code."""
    banned = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
    offences = [
        (module, line, name)
        for module in MODULES
        for line, name in _imports(module)
        if any(_is_below(name, word) for word in banned)
    ]
    assert offences == []
