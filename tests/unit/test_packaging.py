"""The built wheel, and editable installs, import from any working directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["sgl_ssd", "scheduler", "draft_server", "pyproject.toml", "LICENSE", "README.md"]
SITE_PACKAGES = sysconfig.get_path("purelib")

CHECK = """
import sys
from pathlib import Path
import sgl_ssd, sgl_ssd.scheduler, sgl_ssd.draft_server, sgl_ssd.errors, sgl_ssd.cpu.selection
home = Path(sys.argv[1]).resolve()
for module in (sgl_ssd, sgl_ssd.scheduler, sgl_ssd.draft_server, sgl_ssd.errors):
    assert home in Path(module.__file__).resolve().parents, module
assert "scheduler" not in sys.modules and "draft_server" not in sys.modules
print("ok", sgl_ssd.__version__)
"""
SPAWN = """
import multiprocessing, sys
def child(queue):
    import sgl_ssd.scheduler, sgl_ssd.draft_server
    queue.put(sgl_ssd.scheduler.__file__)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=60).startswith(sys.argv[1])
    process.join()
    print("ok")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree: building leaves files in it."""
    copy = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, copy / name, ignore=ignore)
        elif path.exists():
            shutil.copy(path, copy / name)
    return copy


def _build(source: Path, folder: Path, kind: str, settings: dict[str, str] | None = None) -> Path:
    """Run a hook of the build backend, as a build front end does, without fetching anything."""
    pytest.importorskip("setuptools", minversion="77")
    folder.mkdir()
    code = (
        f"import setuptools.build_meta as b; print(b.build_{kind}({str(folder)!r}, {settings!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(source, tmp_path_factory.mktemp("dist") / "out", "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder holding the wheel's files, as an installer lays them out."""
    site = tmp_path_factory.mktemp("site").resolve()
    zipfile.ZipFile(wheel).extractall(site)
    return site


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory of a user who has modules of the same names."""
    for name in ("scheduler", "draft_server", "plugin", "protocol"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the user's own module')")
    return tmp_path


def _python(arguments: list[str], *, site: Path, cwd: Path) -> str:
    """Run python on `site` and the dependencies, without any editable install of this project.

    `-S` leaves out the .pth files of site-packages, and an editable install hangs on one of those.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), SITE_PACKAGES])}
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_every_file(wheel: Path, source: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in (
        ("sgl_ssd", "sgl_ssd"),
        ("scheduler", "sgl_ssd/scheduler"),
        ("draft_server", "sgl_ssd/draft_server"),
    ):
        for path in (source / folder).rglob("*"):
            if path.is_file():
                assert f"{package}/{path.relative_to(source / folder).as_posix()}" in names, path
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sgl_ssd"}


def test_metadata(installed: Path) -> None:
    (info,) = installed.glob("*.dist-info")
    distribution = PathDistribution(info)
    assert distribution.metadata["Name"] == "sgl-ssd"
    assert distribution.version == "0.1.0"
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    requires = distribution.requires or []
    assert "sglang==0.5.17" in requires
    assert "transformers==5.12.1" in requires
    assert {(ep.group, ep.name, ep.value) for ep in distribution.entry_points} == {
        ("sglang.srt.plugins", "sgl_ssd", "sgl_ssd.plugin:load"),
        ("sglang.srt.platforms", "sgl_ssd_cpu", "sgl_ssd.cpu:activate"),
    }
    for entry_point in distribution.entry_points:
        module = entry_point.value.split(":")[0].replace(".", "/")
        assert (installed / f"{module}.py").exists() or (installed / module).is_dir()


def test_wheel_in_a_hostile_directory(installed: Path, hostile: Path) -> None:
    out = _python(["-c", CHECK, str(installed)], site=installed, cwd=hostile)
    assert out.startswith("ok 0.1.0")


def test_wheel_under_spawn(installed: Path, hostile: Path) -> None:
    script = hostile / "main.py"
    script.write_text(SPAWN)
    out = _python([str(script), str(installed)], site=installed, cwd=hostile)
    assert out.startswith("ok")


def test_wheel_in_the_source_tree(installed: Path, source: Path) -> None:
    """A user who installs from a clone and stays in it: the clone's own folders are found."""
    out = _python(["-c", CHECK, str(source)], site=installed, cwd=source)
    assert out.startswith("ok")


@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_editable_in_a_hostile_directory(mode: str, source: Path, hostile: Path) -> None:
    settings = {"editable_mode": mode}
    site = hostile / "site"
    wheel = _build(source, hostile / "dist", "editable", settings)
    zipfile.ZipFile(wheel).extractall(site)
    # A site folder is what makes Python read the .pth file of the editable install.
    code = f"import site; site.addsitedir({str(site)!r})\n{CHECK}"
    out = _python(["-c", code, str(source)], site=site, cwd=hostile)
    assert out.startswith("ok")
