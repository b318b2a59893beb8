"""The commands of `docs/deployment.md`, run on one host: keys, a draft server over tcp, a router.

The page's two workers are a target at that draft server and `ssd_server`, which has one of its own.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from documented import DOCS, Recipe, commands
from parity.harness import Body, compare, configure, send_all, ssd_state
from rig import eventually
from servers import ServerProcess, free_port
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH

pytestmark = pytest.mark.integration

PAGE = DOCS / "deployment.md"
HERE = Path(__file__)
CPU = ["--device", "cpu", "--dtype", "float32"]


class Site:
    """The hosts of the page: all are this one, their files in one folder."""

    def __init__(self, folder: Path, second: ServerProcess) -> None:
        self._folder, self.second = folder, second
        self._log = folder / "draft.log"
        wire, http, target, router = (free_port() for _ in range(4))
        self._recipe = Recipe(
            PAGE,
            {
                "scp -r KEYS/target-a target-a:": "cp -r KEYS/target-a .",
                "Qwen/Qwen3-0.6B": str(DRAFT_PATH),
                "Qwen/Qwen3-32B": str(TARGET_PATH),
                "draft-host:5600": f"127.0.0.1:{wire}",
                "0.0.0.0:5600": f"0.0.0.0:{wire}",
                "127.0.0.1:5601": f"127.0.0.1:{http}",
                "--http-port 5601": f"--http-port {http}",
                "127.0.0.1:30000": f"127.0.0.1:{target}",
                "http://target-a:30000": f"http://127.0.0.1:{target}",
                "http://target-b:30000": second.url,
                "router-host:8000": f"127.0.0.1:{router}",
                "--port 8000": f"--port {router}",
            },
        )
        self.run("sgl_ssd.keys")
        self.run("scp -r")
        self.draft = self._start_draft("sgl_ssd.draft_server")
        flags = self._recipe.arguments("launch_server --model-path Qwen/Qwen3-32B")
        self.target = self._server("sgl_ssd.launch_server", [*flags, *CPU], target)
        flags = self._recipe.arguments("sglang_router.launch_router")
        self.router = self._server("sglang_router.launch_router", flags, router, "/readiness")

    def run(self, part: str) -> str:
        """Standard output of the page's command with `part` in it."""
        command = re.sub("^python", sys.executable, self._recipe.command(part))
        done = subprocess.run(
            command, shell=True, cwd=self._folder, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def requirement(self) -> str:
        """What the page installs."""
        return shlex.split(self._recipe.command("pip install"))[-1]

    def draft_says(self) -> str:
        return self._log.read_text()

    def _start_draft(self, part: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", part, *self._recipe.arguments(part)]
        with self._log.open("wb") as sink:
            return subprocess.Popen(
                [*words, "--device", "cpu", "--die-with-parent"],
                cwd=self._folder, stdout=sink, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _server(
        self, module: str, flags: list[str], port: int, ready_path: str = "/health_generate"
    ) -> ServerProcess:
        log = self._folder / f"{module}.log"
        return ServerProcess(
            module, flags, log=log, cwd=self._folder, port=port, ready_path=ready_path
        )


@pytest.fixture(scope="module")
def site(ssd_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The draft server and the target of the page, connected."""
    site = Site(tmp_path_factory.mktemp("site"), ssd_server)
    try:
        with site.target:
            yield site
    finally:
        site.draft.terminate()
        assert site.draft.wait(20) == 0


@pytest.fixture(scope="module")
def bodies(prompts: list[list[int]]) -> list[Body]:
    params = {"max_new_tokens": 32, "temperature": 0.8, "ignore_eos": True}
    return [
        {"input_ids": ids, "sampling_params": params | {"sampling_seed": i}}
        for i, ids in enumerate(prompts[:12])
    ]


@pytest.fixture(scope="module")
def expected(ssd_server: ServerProcess, bodies: list[Body]) -> list[Any]:
    """What one server says without drafts."""
    configure(ssd_server, ssd_drafting=0)
    return send_all(ssd_server, bodies, 6)


def test_every_command_of_the_page_is_run() -> None:
    parts: list[str] = []
    for path in (HERE, HERE.with_name("test_replicas.py")):
        parts += re.findall(r'(?:run|command|arguments|_draft)\(\s*"([^"]+)"', path.read_text())
    for command in commands(PAGE):
        assert any(part in command for part in parts), command


def test_a_draft_server_on_another_host(site, ssd_server, bodies, expected):
    """Over tcp beyond loopback, with keys; logs and numbers say what the page says they do."""
    answers = send_all(site.target, bodies, 6)
    compare(ssd_server, bodies, expected, answers, "another host").check()
    state = ssd_state(site.target)
    assert state["num_steps"] == 6 and state["hits"] > 0
    assert re.search(r'"draft": ?"up"', site.run("/server_info"))
    assert re.search(r'"peers": ?1', site.run("/stats"))
    for says, log in (
        ("draft server up", site.target.log.read_text()),
        ("connected (1 in all)", site.draft_says()),
    ):
        assert says in log and f"`{says}`" in PAGE.read_text()


def test_a_router_before_two_targets(site, ssd_server, bodies, expected, prompts, tokenizer):
    """Texts are the same, equal beginnings go to one worker, and one that ends is gone round."""
    assert f'"{site.requirement()}"' in (DOCS.parent / "pyproject.toml").read_text()
    servers = (site.target, site.second)
    configure(ssd_server, ssd_drafting=1)
    with site.router as router:
        assert eventually(lambda: len(router.get("/workers")["workers"]) == 2, 60)
        before = [ssd_state(server) for server in servers]
        answers = send_all(router, bodies, 6)
        assert re.search(r'"completion_tokens": ?64', site.run("/v1/completions"))
        after = [ssd_state(server) for server in servers]
        for old, new in zip(before, after, strict=True):
            assert new["hits"] > old["hits"]
        text = tokenizer.decode(prompts[13])
        params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        for i in range(4):
            router.post("/generate", {"text": f"{text} {i}", "sampling_params": params})
        last = [ssd_state(server) for server in servers]
        assert sum(new["rounds"] > old["rounds"] for old, new in zip(after, last, strict=True)) == 1
        site.target.assert_ends_cleanly()
        alone = send_all(router, bodies, 2)
    configure(ssd_server, ssd_drafting=0)
    compare(ssd_server, bodies, expected, answers, "router").check()
    compare(ssd_server, bodies, expected, alone, "one worker left").check()
