"""``install()`` after a program has used Megatron-Core: objects made before are understood, and a
class derived before is an error that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.megatron_releases import PROGRAMS, run

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("version", "written"),
    [pytest.param("0.15.3", "torch_dist", marks=pytest.mark.long), ("0.19.2", "zarr")],
)
def test_objects_that_were_made_before_are_saved_and_loaded(
    tmp_path: Path, version: str, written: str
) -> None:
    printed = run(version, PROGRAMS / "made_before.py", tmp_path, written)
    assert printed.split() == ["megatron.core.dist_checkpointing.mapping", "shardstore.mapping"]
    assert (tmp_path / written / "zarr.json").exists() == (written == "zarr")


@pytest.mark.long
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
    printed = run("0.19.2", "-c", program, *(name for pair in kinds for name in pair))
    assert printed.splitlines() == [
        f"__main__.Mine is derived from megatron.core.dist_checkpointing.{module}.{kind}, which "
        "would stay Megatron-Core's own: call shardstore.megatron.install() before that module is "
        "imported"
        for module, kind in kinds
    ]


@pytest.mark.long
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
    run("0.19.2", "-c", program, tmp_path)
