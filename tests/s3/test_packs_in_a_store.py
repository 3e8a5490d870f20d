"""Packs in an object store: few requests, the same faults as any object."""

from __future__ import annotations

import pytest
import torch

import shardstore
from shardstore import ShardedTensor
from shardstore.errors import CheckpointingException
from testing.s3_proxy import Fault, FaultProxy
from tests.helpers.s3_checkpoints import Run, requests_of

ARRAYS = 60


def state() -> dict[str, ShardedTensor]:
    return {
        f"a{i}": ShardedTensor.from_rank_offsets(f"a{i}", torch.arange(64.0) + i)
        for i in range(ARRAYS)
    }


@pytest.fixture
def run(own_run: Run) -> Run:
    own_run.save(1)  # the store has been seen to honour conditions
    return own_run


def test_many_arrays_take_few_requests(run: Run, proxy: FaultProxy) -> None:
    """Parts that lie near each other are one of them."""
    options = {"storage_options": run.options}
    sent = requests_of(proxy, lambda: shardstore.save(state(), run.url(2), pack=True, **options))
    assert len(sent) <= 20
    loaded = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(64)) for key in state()}
    asked = requests_of(proxy, lambda: shardstore.load(loaded, run.url(2), **options))
    names = [request.path.rpartition("/step-2/")[2] for request in asked]
    assert sorted(names) == [".packs/0.0.zip", "common.pt", "metadata.json", "zarr.json"]
    assert all(torch.equal(loaded[key].data, part.data) for key, part in state().items())
    third = {f"a{i}": state()[f"a{i}"] for i in range(0, ARRAYS, 3)}
    asked = requests_of(proxy, lambda: shardstore.load(third, run.url(2), **options))
    assert len([request for request in asked if ".packs" in request.path]) == 1
    shardstore.delete_checkpoint(run.url(2), **options)
    assert run.direct.keys(run.bucket, "run/step-2/") == []


@pytest.mark.parametrize("fault", [Fault.DROP_ANSWER, Fault.RESET_IN_REQUEST])
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
    assert run.direct.keys(run.bucket, "run/step-2/") == []
