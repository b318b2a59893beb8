"""The examples, and the commands of README and docs, as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from documented import commands
from parity.harness import configure, ssd_state
from servers import ServerProcess

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# test_deployment.py runs what is on the page that it is named after.
DOCS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.stem != "deployment"]
PAGES = [ROOT / "README.md", *DOCS]
TOOLS = ("sgl_ssd.chat", "sgl_ssd.top")
# What commands answer, by a part of them; the first one that fits counts.
ANSWERS = {
    "/v1/completions": r'"completion_tokens": ?64',
    "/set_internal_state": r"true",
    "/server_info": r'"hit_rate"',
    "/generate": r'"completion_tokens": ?[1-9]',
    "sgl_ssd.chat --once": r"\d+ tokens · [\d.]+ tokens/s · .*accept length [\d.]+",
    "sgl_ssd.chat": r"/reset forgets",
    "sgl_ssd.top": r"accept length",
}


@pytest.fixture(scope="module", autouse=True)
def settings(ssd_server: ServerProcess) -> Iterator[None]:
    """Commands of the docs change settings, and write a timeline where the server was started."""
    settings = {"ssd_drafting": 1, "ssd_num_steps": 4, "ssd_fan_out": 4, "ssd_backup": 3}
    configure(ssd_server, **settings)
    yield
    traced = ssd_state(ssd_server)["trace"] != "off"
    configure(ssd_server, **settings, ssd_trace=0)
    if traced:
        for _ in range(100):
            state = ssd_state(ssd_server)
            if state["trace"] == "off":
                break
            time.sleep(0.1)
        Path(state["trace_file"]).unlink()


def run(command: str | list[str], cwd: Path, seconds: float = 240) -> str:
    """Standard output; both streams are shown when it fails."""
    done = subprocess.run(
        command, shell=isinstance(command, str), cwd=cwd, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=seconds,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def example(name: str, *arguments: str, cwd: Path) -> str:
    return run([sys.executable, str(EXAMPLES / name), *arguments], cwd)


# -- examples ------------------------------------------------------------------------------------


def test_every_example_is_run_here() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == set(re.findall(r'example\("(\w+\.py)"', Path(__file__).read_text()))


def test_openai_sdk(ssd_server: ServerProcess, tmp_path: Path) -> None:
    before = ssd_state(ssd_server)
    out = example("openai_sdk.py", ssd_server.url, cwd=tmp_path)
    assert re.search(r"--- [1-9]\d* tokens", out)
    assert out.split("tokens\n")[1].strip().startswith("def read_lines(path):")
    assert ssd_state(ssd_server)["accepted"] > before["accepted"]


def test_sglang_program(ssd_server: ServerProcess, tmp_path: Path) -> None:
    before = ssd_state(ssd_server)
    out = example("sglang_program.py", ssd_server.url, cwd=tmp_path)
    assert re.search(r"^result: \S", out, re.M)
    assert re.search(r"^call: add\((1, 2)?\)$", out, re.M)
    assert ssd_state(ssd_server)["drafted"] > before["drafted"]


def test_several_choices(ssd_server: ServerProcess, tmp_path: Path) -> None:
    out = example("several_choices.py", ssd_server.url, cwd=tmp_path)
    choices = re.findall(r"^choice (\d): (.*)$", out, re.M)
    assert [index for index, _ in choices] == ["0", "1", "2", "3"]
    assert len({text for _, text in choices}) > 1
    assert re.search(r"^seed 7: .*, the same again$", out, re.M)


def test_offline_batch(tmp_path: Path) -> None:
    out = example("offline_batch.py", cwd=tmp_path)
    lengths = [float(x) for x in re.findall(r"accept length (\d\.\d+)", out)]
    assert len(lengths) == 4 and max(lengths) > 1


# -- commands of the documents -------------------------------------------------------------------


def _commands() -> Iterator[str]:
    """Every curl request, and every call of a tool that talks to a server."""
    for page in PAGES:
        inline = re.findall(r"`(curl [^`]+)`", page.read_text())
        for command in commands(page) + inline:
            if command.startswith("curl ") or any(f"-m {tool}" in command for tool in TOOLS):
                yield command


def test_commands_were_found() -> None:
    found = "\n".join(_commands())
    for part in ("/v1/completions", "/server_info", "/set_internal_state", *TOOLS):
        assert part in found


@pytest.mark.parametrize("command", list(dict.fromkeys(_commands())))
def test_commands_of_the_documents(command: str, ssd_server: ServerProcess, tmp_path: Path) -> None:
    address = ssd_server.url.removeprefix("http://")
    here = command.replace("127.0.0.1:30000", address)
    if not command.startswith("curl"):
        here = re.sub(r"^(uv run )?python", sys.executable, here)
        here = re.sub(r"(-m sgl_ssd\.\w+)", rf"\1 {ssd_server.url}", here)
        if "sgl_ssd.top" in here and "--once" not in here:
            here += " --once"
    out = run(here, tmp_path)
    expected = next((text for part, text in ANSWERS.items() if part in command), None)
    assert expected is not None, "what does it answer?"
    assert re.search(expected, out), out[:2000]
