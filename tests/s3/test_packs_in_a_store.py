"""Packs in an object store: few requests, the same faults as any object."""

from __future__ import annotations

import pytest
import torch

import shardstore
from shardstore import ShardedTensor
from shardstore.errors import CheckpointingException, ChunkCorruptError
from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import S3Server
from tests.helpers.s3_checkpoints import Run
from tests.s3.test_save_faults import ONCE

ARRAYS = 300


def state(version: float = 0.0) -> dict[str, ShardedTensor]:
    return {
        f"a{i}": ShardedTensor.from_rank_offsets(f"a{i}", torch.arange(64.0) + i + version)
        for i in range(ARRAYS)
    }


def names(run: Run, step: int) -> list[str]:
    return run.direct.keys(run.bucket, f"run/step-{step}/")


def check(run: Run, step: int, version: float = 0.0) -> None:
    empty = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(64)) for key in state()}
    found = shardstore.load(empty, run.url(step), storage_options=run.options)
    assert all(torch.equal(found[key], part.data) for key, part in state(version).items())


@pytest.fixture
def run(server: S3Server, proxy: FaultProxy) -> Run:
    run = Run.new(server.at(proxy.endpoint_url), server)
    run.save(1)
    return run


def test_many_arrays_take_few_requests(run: Run, proxy: FaultProxy) -> None:
    before = len(proxy.passed())
    shardstore.save(state(), run.url(2), storage_options=run.options, pack=True)
    saved = len(proxy.passed())
    check(run, 2)
    read = [r.path.rpartition("/step-2/")[2] for r in proxy.passed()[saved:]]
    assert saved - before <= 20
    assert sorted(read) == [".packs/0.0.zip", "common.pt", "metadata.json", "zarr.json"]
    shardstore.delete_checkpoint(run.url(2), storage_options=run.options)
    assert names(run, 2) == []


def test_parts_that_lie_near_each_other_are_one_request(run: Run, proxy: FaultProxy) -> None:
    shardstore.save(state(), run.url(2), storage_options=run.options, pack=True)
    before = len(proxy.passed())
    wanted = {f"a{i}": state()[f"a{i}"] for i in range(0, ARRAYS, 3)}
    shardstore.load(wanted, run.url(2), storage_options=run.options)
    assert len([r for r in proxy.passed()[before:] if ".packs" in r.path]) == 1


def test_another_save_replaces_a_packed_checkpoint(run: Run) -> None:
    for version, pack in enumerate([True, True, False, True]):
        options = {"storage_options": run.options, "overwrite": True}
        shardstore.save(state(version), run.url(2), pack=pack, **options)
        check(run, 2, version)
        assert any(".packs/" in name for name in names(run, 2)) is pack


@pytest.mark.parametrize("fault", ONCE, ids=lambda fault: fault.name.lower())
def test_a_pack_survives_one_fault(run: Run, proxy: FaultProxy, fault: Fault) -> None:
    rule = proxy.add(fault, methods=("PUT",), path=r"/\.packs/")
    run.save(2, pack=True)
    assert rule.hits
    assert run.version(2) == 2


def test_a_store_that_refuses_a_pack_leaves_no_checkpoint(run: Run, proxy: FaultProxy) -> None:
    proxy.add(Fault.SLOW_DOWN, methods=("PUT",), path=r"/\.packs/", count=None)
    with pytest.raises(CheckpointingException, match=r"\.packs/0\.0\.zip"):
        run.save(2, pack=True)
    assert run.version(2) is None
    assert names(run, 2) == []


def test_a_late_pack_of_another_save_is_noticed(run: Run) -> None:
    """No store keeps out every late writer, so the commit names the checksums."""
    run.save(2, pack=True)
    run.save(3, pack=True)
    client, late = run.direct.client(), "run/step-2/.packs/0.0.zip"
    source = {"Bucket": run.bucket, "Key": "run/step-3/.packs/0.0.zip"}
    client.copy_object(Bucket=run.bucket, Key=late, CopySource=source)
    with pytest.raises(ChunkCorruptError, match="late writer"):
        run.version(2)
