"""Two ranks and a store that fails one of them, or a rank that is killed: all are told, and nothing
half is seen.

The moments of a kill are requests: the proxy holds one, and its sender is killed meanwhile.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import shardstore
from shardstore.dcp import StorageWriter
from shardstore.errors import CheckpointingException, StorageError
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


@pytest.mark.parametrize(
    ("step", "victim", "path", "background"),
    [(2, 1, r"/o/shard_1_2\.pt$", True), (3, 0, r"/step-3/zarr\.json$", False)],
    ids=["its own object", "the commit"],
)
def test_a_killed_rank_leaves_nothing_half(
    run: Run,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    victim: int,
    path: str,
    background: bool,
) -> None:
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
        error = json.loads(Path(folder, f"{1 - victim}.json").read_text())
        assert not Path(folder, f"{victim}.json").exists()
    assert error.startswith("RanksError")
    assert f"rank {victim}" in error
    proxy.clear()
    assert run.version(1) == 1
    assert run.version(step) is None
    assert run.direct.keys(run.bucket, f"run/step-{step}/zarr.json") == []
    # Who died between its last look and the commit is waited for; here it is certain.
    monkeypatch.setattr(object_commit, "SETTLE_S", 0.5)
    run.save(step)
    assert run.version(step) == step
    assert run.version(1) == 1
    assert run.claims(step) == []


# -- faults of some requests -----------------------------------------------------------------------


def told(work: Callable[[], object]) -> tuple[str, str]:
    """What a rank learns of a save or a load: the error, if any."""
    try:
        work()
    except CheckpointingException as error:
        return type(error).__name__, str(error)
    return "no error", ""


LOADS = {
    11: (Fault.SLOW_DOWN, r"/w/c\.2\.0$", ("RanksError", "StorageError")),
    12: (Fault.FLIP_ANSWER, r"/w/c\.2\.0$", ("RanksError", "ChunkCorruptError")),
    13: (Fault.SHORTEN_ANSWER, r"/w/c\.0\.0$", ("ChunkCorruptError", "RanksError")),
    14: (Fault.SLOW_DOWN, r"/zarr\.json$", ("StorageError", "StorageError|RanksError")),
}
"""Steps whose loads fail: a chunk that never comes, a spoiled one of rank 1, and of rank 0, the
root; and the errors of the two ranks."""


def _loads(rank: int, world: int, run: Run) -> list[tuple[str, str]]:
    os.environ["SHARDSTORE_DEADLINE_S"] = "600"
    s3_io.RETRIES = 3  # ten seconds in the place of one
    asked: dict[str, Any] = state(0, rank, world)
    del asked["step"], asked["o"]
    return [
        told(lambda step=step: shardstore.load(asked, run.url(step), storage_options=run.options))
        for step in LOADS
    ]


def test_a_load_that_fails_on_one_rank_fails_on_all(run: Run, proxy: FaultProxy) -> None:
    rules = []
    for step, (fault, path, _) in LOADS.items():
        run.save_directly(step)
        rules.append(proxy.add(fault, methods=("GET",), path=f"/step-{step}{path}", count=None))
    outcomes = run_ranks(_loads, WORLD, run)
    assert all(rule.hits for rule in rules)
    proxy.clear()
    for number, (step, (_, _, kinds)) in enumerate(LOADS.items()):
        both = outcomes[0][number], outcomes[1][number]
        for wanted, (kind, text), other in zip(kinds, both, (1, 0), strict=True):
            assert kind in wanted.split("|"), text
            assert run.url(step) in text
            assert kind != "RanksError" or f"rank {other}" in text
        assert run.version(step) == step


def _saves(rank: int, world: int, run: Run) -> list[tuple[str, str]]:
    os.environ["SHARDSTORE_DEADLINE_S"] = "600"
    return [
        told(lambda: run.save(21, rank, world)),
        told(lambda: run.save(22, rank, world)),
        told(lambda: run.with_direct().save(22, rank, world)),
    ]


def test_a_save_that_the_store_fails_is_an_error_on_every_rank(run: Run, proxy: FaultProxy) -> None:
    """The commit has no answer, or a chunk of rank 1 is refused; the next save succeeds."""
    proxy.add(Fault.HELD, methods=("PUT",), path=r"/step-21/zarr\.json$", count=None)
    # The last rows of `w` are those of rank 1.
    rule = proxy.add(Fault.SLOW_DOWN, methods=("PUT",), path=r"/step-22/w/c\.2\.0$", count=None)
    outcomes = run_ranks(_saves, WORLD, run)
    for (held, unanswered), (refused, text), again in outcomes:
        assert "no error" not in (held, refused)
        assert "is not known" in unanswered
        assert run.bucket in text
        assert again == ("no error", "")
    assert "rank 1" in outcomes[0][1][1]
    assert rule.hits > 1
    assert run.version(1) == 1
    assert run.version(21) is None
    first, *tries = proxy.release()
    assert (first, {*tries} - {412}) == (200, set())  # the store has carried one of them out
    assert run.version(21, parts=2) == 21
    assert run.version(22, parts=2) == 22
    loaded = shardstore.load_tensors_metadata(run.url(22), storage_options=run.options)
    assert loaded["w"].global_shape == (48, 64)


# -- ranks that see different stores ---------------------------------------------------------------


def _apart(
    rank: int, world: int, bucket: str, options: list[dict[str, Any]], ways: list[str]
) -> list[str]:
    os.environ["SHARDSTORE_DEADLINE_S"] = "600"
    texts = []
    for how in ways:
        try:
            _save_apart(rank, world, f"s3://{bucket}/{how}", options[rank], how)
        except (CheckpointingException, CheckpointException) as error:
            texts.append(str(error))
    # The memory of a process is another store on each rank too.
    with pytest.raises(StorageError, match="memory of one process"):
        _save_apart(rank, world, "memory://bucket/step", {}, "boxes")
    return texts


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
    errors = run_ranks(_apart, WORLD, bucket, options, ways)
    assert [len(texts) for texts in errors] == [len(ways)] * WORLD
    assert all("the ranks' stores differ" in text for texts in errors for text in texts)
    assert all("rank 1" in text.lower() for text in errors[0])
    assert other.keys(bucket) == []
    assert s3_server.keys(bucket) == []
