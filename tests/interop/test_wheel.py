"""The wheel, built and installed where nothing of the repository can be seen: it is whole, typed,
and does what the sources do.

The environment is new and has this one's packages behind its own, so that nothing is downloaded;
what is installed here as ``shardstore`` itself is hidden by what the wheel brings.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.helpers.processes import run_to_end

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("shardstore", "pyproject.toml", "README.md", "LICENSE")


def run(*command: object, cwd: Path) -> str:
    """Standard output of a command that must end well, without the repository on its path."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = run_to_end(command, cwd=cwd, env=environment, timeout=250)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc"))
        else:
            shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    if _setuptools_will_do():
        command += ["--no-build-isolation", "--no-index"]
    run(*command, "--wheel-dir", "dist", ".", cwd=folder)
    (built,) = (folder / "dist").iterdir()
    return built


def _setuptools_will_do() -> bool:
    """Whether what pyproject.toml asks for to build with is here already."""
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel in it."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(place, with_pip=False)
    interpreter = place / "bin" / "python"
    # A folder named in a .pth file comes last, and the .pth files in it do not count.
    (site,) = place.glob("lib/python*/site-packages")
    (site / "behind.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=place.parent)
    return interpreter


def test_the_wheel_has_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "shardstore").rglob("*.py")}
    assert sources <= names
    assert {
        "shardstore/py.typed",
        "shardstore/cli/report.html",
        *(f"shardstore/storage/{p}.md" for p in ("FORMAT", "PROTOCOL")),
    } <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"shardstore"}


PROGRAM = """
import importlib.resources, pathlib, sys
import torch, zarr
import shardstore
from shardstore import ShardedTensor

assert pathlib.Path(shardstore.__file__).is_relative_to(sys.prefix), shardstore.__file__
assert importlib.resources.files("shardstore").joinpath("py.typed").is_file()
w = torch.arange(12.0).reshape(3, 4).bfloat16()
shardstore.save({"w": ShardedTensor.from_rank_offsets("w", w), "step": 3}, "ckpt")
out = torch.zeros(3, 4, dtype=torch.bfloat16)
state = shardstore.load({"w": ShardedTensor.from_rank_offsets("w", out)}, "ckpt")
assert state["step"] == 3 and torch.equal(out, w)
"""

READER = """
import sys
import zarr
from importlib.metadata import entry_points

group = zarr.open_group("ckpt", mode="r")
assert str(group["w"].dtype) == "bfloat16" and group["w"][2, 3].astype(float) == 11
assert "torch" not in sys.modules
names = {point.name for point in entry_points(group="zarr.data_type")}
assert {"bfloat16", "float8_e4m3fn", "float8_e5m2"} <= names
for group_name in ("zarr.data_type", "zarr.ndbuffer"):
    for point in entry_points(group=group_name):
        point.load()
"""


def test_the_installed_package_saves_loads_and_is_read(python: Path, tmp_path: Path) -> None:
    """And each of its modules can be imported."""
    modules = [path.relative_to(ROOT).with_suffix("") for path in ROOT.glob("shardstore/**/*.py")]
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in modules)
    names.remove("shardstore.__main__")
    imports = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)\n"
    run(python, "-c", PROGRAM + imports, cwd=tmp_path)
    run(python, "-c", READER, cwd=tmp_path)
    command = python.with_name("shardstore")
    assert run(command, "verify", "ckpt", cwd=tmp_path).startswith("OK")
    version = run(python, "-m", "shardstore", "--version", cwd=tmp_path).strip()
    assert version == importlib.metadata.version("shardstore")
