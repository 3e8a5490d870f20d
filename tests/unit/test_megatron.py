"""Arguments that Megatron-Core's releases have: each is taken as its release means it."""

from __future__ import annotations

import json
import logging
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedTensor, megatron, serialization
from shardstore.dcp.torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from shardstore.errors import (
    ArgumentError,
    CheckpointingException,
    DamagedCheckpointError,
    DTypeMismatchError,
    NotACheckpointError,
)
from shardstore.megatron import install
from shardstore.strategies.async_utils import AsyncCallsQueue
from shardstore.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from shardstore.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from shardstore.validation import (
    save_integrity_manifest,
    verify_checkpoint,
    verify_integrity_manifest,
)
from tests.helpers.cli_checkpoints import flip

BACKENDS = ("zarr", "torch_dist")


def state(data: torch.Tensor | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    data = torch.arange(24, dtype=dtype).reshape(4, 6) if data is None else data
    return {"w": ShardedTensor.from_rank_offsets("w", data), "iteration": 3}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bool_is_never_a_common_strategy(tmp_path: Path, backend: str) -> None:
    strategy = serialization.get_default_save_sharded_strategy(backend)
    request = shardstore.save(state(), tmp_path / "19", strategy, False, True)  # as 0.19 has them
    request.execute_sync()
    shardstore.save(state(), tmp_path / "15", strategy, None, False, False)  # as 0.15 has them
    for name in ("19", "15"):
        empty = torch.zeros(4, 6)
        found = shardstore.load(state(empty), tmp_path / name, None, False, "raise_all")
        assert found["iteration"] == 3
        assert torch.equal(empty, torch.arange(24.0).reshape(4, 6))
        result = shardstore.load(state(), tmp_path / name, None, None, True, "return_all")
        assert result[1:] == (set(), set())


@pytest.mark.parametrize("strategy", ["mcore", "nvrx", None])
def test_each_async_strategy_is_known(tmp_path: Path, strategy: str | None) -> None:
    request = shardstore.save(state(), tmp_path, async_sharded_save=True, async_strategy=strategy)
    assert request is not None
    AsyncCallsQueue.warmup_persistent_caller(0, mp_mode="spawn")
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.close()
    assert shardstore.load_plain_tensors(tmp_path)["iteration"] == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("in_background", [False, True, "with a handle"])
def test_integrity_is_noted_and_verified(
    tmp_path: Path, backend: str, in_background: bool | str
) -> None:
    place, version = tmp_path / "step", (backend, 1 if backend != "zarr" else 2)
    options: Any = {"verify_integrity": True, "async_sharded_save": in_background}
    request = None
    if isinstance(in_background, str):
        shardstore.async_save(state(), place, version, verify_integrity=True).result()
    else:
        request = shardstore.save(state(), place, version, **options)
    if request is not None:
        assert not (place / "integrity.json").exists()
        request.execute_sync()
    files = json.loads((place / "integrity.json").read_text())["files"]
    there = {p.relative_to(place).as_posix() for p in place.rglob("*") if p.is_file()}
    assert set(files) == there - {"integrity.json"}
    shardstore.load(state(), place, verify_integrity=True)
    verify_integrity_manifest(place)
    victim = max(files, key=lambda name: (place / name).stat().st_size)
    flip(place / victim, -1)
    with pytest.raises(DamagedCheckpointError, match="expected"):
        shardstore.load(state(), place, verify_integrity=True)
    (place / victim).unlink()
    with pytest.raises(DamagedCheckpointError, match=f"{victim} is missing"):
        verify_integrity_manifest(place)
    shardstore.save(state(), place, overwrite=True)  # integrity.json is no file of another program
    assert not (place / "integrity.json").exists()


def test_integrity_of_a_checkpoint_without_it(tmp_path: Path) -> None:
    shardstore.save(state(), tmp_path)
    with pytest.raises(NotACheckpointError, match="save with verify_integrity=True"):
        shardstore.load(state(), tmp_path, verify_integrity=True)
    save_integrity_manifest(tmp_path)
    shardstore.load(state(), tmp_path, verify_integrity=True)
    (tmp_path / "integrity.json").write_text('{"algorithm": "sha256", "files": {"../x": "0"}}')
    with pytest.raises(CheckpointingException, match=r"\.\./x"):
        verify_integrity_manifest(tmp_path)


def test_verify_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match="is not a distributed checkpoint"):
        verify_checkpoint(tmp_path)
    with pytest.raises(CheckpointingException, match="does not exist"):
        verify_checkpoint(tmp_path / "none")
    shardstore.save(state(), tmp_path)
    assert verify_checkpoint(tmp_path).sharded_backend == "zarr"


def test_the_common_part_as_an_object(tmp_path: Path) -> None:
    common: Any = ("torch_dist", 1)
    shardstore.save(state(), tmp_path, ("torch_dist", 1), common, content_metadata={"a": 1})
    assert not (tmp_path / "common.pt").exists()
    # As Megatron-Core 0.19 writes it.
    document = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    for text in ((tmp_path / "metadata.json").read_text(), json.dumps(document)):
        (tmp_path / "metadata.json").write_text(text)
        assert shardstore.load_common_state_dict(tmp_path)["iteration"] == 3
        assert shardstore.load_content_metadata(tmp_path) == {"a": 1}
        result = shardstore.load(state(), tmp_path, strict="return_all")
        assert result[1:] == (set(), set())
        assert result[0]["iteration"] == 3
        assert "common_state" not in result[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.int32])
def test_casts_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, backend: str, stored: torch.dtype
) -> None:
    values = torch.arange(24).reshape(4, 6).to(stored)
    two = {"w": ShardedTensor.from_rank_offsets("w", values)}
    two["v"] = ShardedTensor.from_rank_offsets("v", values + 1)
    shardstore.save(two, tmp_path, serialization.get_default_save_sharded_strategy(backend))
    asked = {key: torch.zeros(4, 6, dtype=torch.bfloat16) for key in two}
    wanted = {key: ShardedTensor.from_rank_offsets(key, data) for key, data in asked.items()}
    with pytest.raises(DTypeMismatchError, match="cast=True"):
        shardstore.load(wanted, tmp_path)
    with caplog.at_level(logging.WARNING):
        shardstore.load(wanted, tmp_path, cast="warn")
    assert torch.equal(asked["w"], values.bfloat16())
    assert torch.equal(asked["v"][0, :1], torch.ones(1))
    assert [record.getMessage()[:9] for record in caplog.records] == ["2 tensors"]
    kind = {"zarr": ZarrLoadShardedStrategy, "torch_dist": TorchDistLoadShardedStrategy}[backend]
    asked["w"].zero_()
    shardstore.load(wanted, tmp_path, kind(cast=True))
    assert torch.equal(asked["w"], values.bfloat16())


def test_what_has_no_meaning_is_accepted() -> None:
    save = TorchDistSaveShardedStrategy(cpu_shm_mode=True, cached_metadata=True)
    load = TorchDistLoadShardedStrategy(True, False, "name")
    assert load.cached_global_metadata is None
    FullyParallelSaveStrategyWrapper(save, pg_cache_path="x", pg_cache_create=True)
    FullyParallelLoadStrategyWrapper(load, pg_cache_path="x", pg_cache_create=True)


def test_the_newest_version_of_a_backend() -> None:
    kinds = {"torch_dist": TorchDistSaveShardedStrategy, "zarr": ZarrSaveShardedStrategy}
    for backend, version in (("torch_dist", 1), ("zarr", 2)):
        found = serialization.get_default_save_sharded_strategy(backend)
        assert (type(found), found.version) == (kinds[backend], version)
    with pytest.raises(CheckpointingException, match="Registered for"):
        serialization.get_default_save_sharded_strategy("none")


def test_install_refuses_another_format() -> None:
    with pytest.raises(ArgumentError, match="must be one of zarr, torch_dist"):
        install("pickle")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["missing.py"], ["--format", "zarr"]])
def test_a_missing_program_is_an_error(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron", *arguments])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(megatron.__file__, run_name="__main__")
    assert re.fullmatch(r"usage: .*|missing.py is not a file: .*", str(caught.value.code))
