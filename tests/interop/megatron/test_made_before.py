"""``install()`` after a program has used Megatron-Core: objects made before are understood, and a
class derived before is an error that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".envs" / "megatron"
pytestmark = pytest.mark.megatron


def python(version: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python with a release of Megatron-Core."""
    if not (ENVIRONMENT / version).is_dir():
        pytest.skip("no environment with releases of megatron-core: scripts/megatron_env makes it")
    paths = [ROOT, ENVIRONMENT / version, ENVIRONMENT / "triton"]
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("version", "written"), [("0.15.3", "torch_dist"), ("0.19.2", "zarr")])
def test_objects_that_were_made_before_are_saved_and_loaded(
    tmp_path: Path, version: str, written: str
) -> None:
    done = python(version, Path(__file__).with_name("made_before.py"), tmp_path, written)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.split() == ["megatron.core.dist_checkpointing.mapping", "shardstore.mapping"]
    assert (tmp_path / written / "zarr.json").exists() == (written == "zarr")


def test_a_class_that_was_derived_before_is_an_error() -> None:
    program = """
import gc, importlib, sys, typing, typing_extensions
typing.override = typing_extensions.override
from shardstore.megatron import install

for name, kind in zip(*[iter(sys.argv[1:])] * 2):
    module = importlib.import_module(f"megatron.core.dist_checkpointing.{name}")

    class Mine(getattr(module, kind)):
        pass

    before = dict(sys.modules)
    try:
        install()
    except ValueError as error:
        print(error)
    assert getattr(module, kind) is Mine.__base__  # nothing was replaced
    assert all(sys.modules.get(name) is one for name, one in before.items())
    del Mine
    gc.collect()
kept = [module]
install()
assert sys.modules[module.__name__] is module is not kept[0]  # now the name is mended
"""
    kinds = [("mapping", "ShardedTensor"), ("mapping", "ShardedObject")]
    kinds += [("mapping", "ShardedTensorFactory"), ("mapping", "LocalNonpersistentObject")]
    kinds += [("strategies.torch", "TorchDistSaveShardedStrategy")]
    done = python("0.19.2", "-c", program, *(name for pair in kinds for name in pair))
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.splitlines() == [
        f"__main__.Mine is derived from megatron.core.dist_checkpointing.{module}.{kind}, which "
        "would stay Megatron-Core's own: call shardstore.megatron.install() before that module is "
        "imported"
        for module, kind in kinds
    ]


def test_a_class_that_is_derived_afterwards_works(tmp_path: Path) -> None:
    program = """
from shardstore.megatron import install
install()
import sys, torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

class Mine(ShardedTensor):
    pass

class Note(ShardedObject):
    pass

state = lambda fill: {
    "w": Mine.from_rank_offsets("w", torch.full((2,), fill)), "n": Note("n", fill, (1,), (0,)),
}
assert type(state(1.0)["w"]) is Mine
dist_checkpointing.save(state(1.0), sys.argv[1])
loaded = dist_checkpointing.load(state(0.0), sys.argv[1])
assert loaded["w"].tolist() == [1, 1] and loaded["n"] == 1
"""
    done = python("0.19.2", "-c", program, tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
