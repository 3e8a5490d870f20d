"""Two ranks and a store that fails one of them, or a rank that is killed: all are told, and nothing
half is seen.

The moments of a kill are requests: the proxy holds one, and its sender is killed meanwhile.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import shardstore
from shardstore.dcp import StorageWriter
from shardstore.errors import CheckpointingException
from shardstore.storage.commit import objects as object_commit
from shardstore.storage.stores import tensorstore as s3_io
from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import EmbeddedServer, S3Server
from tests.helpers.rank_server import start
from tests.helpers.ranks_helper import join, run_ranks
from tests.helpers.s3_checkpoints import Run, state

WORLD = 2
LIMIT_S = 60.0


# -- a rank is killed ------------------------------------------------------------------------------


def _main(rank: int, folder: str, run: Run, step: int, background: bool) -> None:
    """Save, and leave a note of how it ended."""
    torch.set_num_threads(1)
    os.environ["SHARDSTORE_DEADLINE_S"] = "10"
    join(f"{folder}/store", rank, WORLD)
    text = "saved"
    try:
        if background:
            options = run.options
            part = state(step, rank, WORLD)
            shardstore.async_save(part, run.url(step), storage_options=options).result(LIMIT_S)
        else:
            run.save(step, rank, WORLD)
    except CheckpointingException as error:
        text = f"{type(error).__name__}: {error}"
    Path(folder, f"{rank}.json").write_text(json.dumps(text))
    os._exit(0)  # the group may be beyond an orderly end


MOMENTS = {
    # Who is killed, and the request that it sends: the object of rank 1 is its own.
    "an object": (1, r"/o/shard_1_2\.pt$"),
    "the commit": (0, r"/step-\d+/zarr\.json$"),
}
STEPS = iter(range(2, 100))


@pytest.mark.parametrize(("moment", "background"), [("an object", True), ("the commit", False)])
def test_a_killed_rank_leaves_nothing_half(
    run: Run,
    proxy: FaultProxy,
    moment: str,
    background: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    victim, path = MOMENTS[moment]
    step = next(STEPS)
    # One request of the victim's is never answered, and the server never sees it.
    rule = proxy.add(Fault.SILENCE, methods=("PUT",), path=path)
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        ranks = start((_main, (rank, folder, run, step, background)) for rank in range(WORLD))
        deadline = time.monotonic() + LIMIT_S
        while not rule.hits and time.monotonic() < deadline:
            time.sleep(0.01)
        assert rule.hits == 1
        ranks[victim].kill()
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [process for process in ranks if process.exitcode is None]
        for process in hung:
            process.kill()
        assert not hung, "the other rank waits for the dead one"
        told = json.loads(Path(folder, f"{1 - victim}.json").read_text())
        assert not Path(folder, f"{victim}.json").exists()
    assert told.startswith("RanksError")
    assert "rank 0" in told if victim == 0 else "rank 1" in told
    proxy.clear()
    assert run.version(1) == 1
    assert run.version(step) is None
    assert run.direct.keys(run.bucket, f"run/step-{step}/zarr.json") == []
    # Who died between its last look and the commit is waited for; here it is certain.
    monkeypatch.setattr(object_commit, "SETTLE_S", 0.5)
    run.save(step)
    assert run.version(step) == step
    assert run.version(1) == 1
    keys = run.direct.keys(run.bucket, f"run/step-{step}/")
    assert [key for key in keys if ".attempts" in key] == []


# -- a load under faults ---------------------------------------------------------------------------


def _load(rank: int, world: int, run: Run) -> tuple[str, str]:
    os.environ["SHARDSTORE_DEADLINE_S"] = "600"
    s3_io.RETRIES = 3  # ten seconds in the place of one
    asked: dict[str, Any] = state(0, rank, world)
    del asked["step"], asked["o"]
    try:
        shardstore.load(asked, run.url(1), storage_options=run.options)
    except CheckpointingException as error:
        return type(error).__name__, str(error)
    return "loaded", ""


@pytest.mark.parametrize(
    ("fault", "path", "kinds"),
    [
        (Fault.SLOW_DOWN, r"/w/c\.2\.0$", ("RanksError", "StorageError")),
        (Fault.FLIP_ANSWER, r"/w/c\.2\.0$", ("RanksError", "ChunkCorruptError")),
        (Fault.SHORTEN_ANSWER, r"/w/c\.0\.0$", ("ChunkCorruptError", "RanksError")),
        (Fault.SLOW_DOWN, r"/step-1/zarr\.json$", ("StorageError", "StorageError|RanksError")),
    ],
    ids=["a chunk that never comes", "a chunk of rank 1", "a chunk of rank 0", "the root"],
)
def test_a_load_that_fails_on_one_rank_fails_on_all(
    run: Run, proxy: FaultProxy, fault: Fault, path: str, kinds: tuple[str, str]
) -> None:
    rule = proxy.add(fault, methods=("GET",), path=path, count=None)
    outcomes = run_ranks(_load, WORLD, run)
    assert rule.hits
    for wanted, (kind, text) in zip(kinds, outcomes, strict=True):
        assert kind in wanted.split("|"), text
        assert run.bucket in text
    for (kind, text), other in zip(outcomes, (1, 0), strict=True):
        if kind == "RanksError":
            assert f"rank {other}" in text
    proxy.clear()
    assert run.version(1) == 1


# -- ranks that see different stores ---------------------------------------------------------------


def _apart(
    rank: int, world: int, bucket: str, options: list[dict[str, Any]], ways: list[str]
) -> list[str]:
    os.environ["SHARDSTORE_DEADLINE_S"] = "600"
    told = []
    for how in ways:
        try:
            _save_apart(rank, world, f"s3://{bucket}/{how}", options[rank], how)
        except (CheckpointingException, CheckpointException) as error:
            told.append(str(error))
    return told


def _save_apart(rank: int, world: int, url: str, options: dict[str, Any], how: str) -> None:
    part = state(1, rank, world)
    if how == "boxes":
        del part["flat"]
    if how == "by DCP":
        dcp.save({"w": torch.ones(4)}, storage_writer=StorageWriter(url, storage_options=options))
    elif how == "in the background":
        shardstore.async_save(part, url, storage_options=options).result(LIMIT_S)
    else:
        shardstore.save(part, url, storage_options=options)


def test_ranks_that_see_different_stores_are_told_and_write_nothing(
    s3_server: S3Server, own_s3_server: EmbeddedServer
) -> None:
    """Two servers with a bucket of one name: each takes what it is given."""
    bucket = s3_server.new_bucket()
    other = own_s3_server.server
    other.client().create_bucket(Bucket=bucket)
    options = [s3_server.storage_options, other.storage_options]
    ways = ["all kinds", "boxes", "in the background", "by DCP"]
    told = run_ranks(_apart, WORLD, bucket, options, ways)
    assert [len(texts) for texts in told] == [len(ways)] * WORLD
    assert all("the ranks' stores differ" in text for texts in told for text in texts)
    assert all("rank 1" in text.lower() for text in told[0])
    assert other.keys(bucket) == []
    assert s3_server.keys(bucket) == []
