"""A base that is replaced, deleted or damaged while a save takes its chunks over.

The moment is a call of the operation that takes a chunk over, counted; what happens there is done
by the operations of any other save.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.mapping import ShardedTensor
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit import folder
from shardstore.storage.commit.base import ReusingMover, read_base
from shardstore.storage.format.manifest import RankManifest
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.prefix import ObjectPrefix
from shardstore.storage.stores.remote import RemoteStore
from shardstore.strategies.zarr import ZarrSaveShardedStrategy

pytestmark = pytest.mark.usefixtures("copies_small_objects")

CHUNKS = 6
SMALL = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=8192, threads=1)


def tensor(seed: int) -> torch.Tensor:
    return torch.randn(CHUNKS, 2048, generator=torch.Generator().manual_seed(seed))


def save(value: torch.Tensor, place: str, **options: Any) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", value)}
    shardstore.save(state, place, SMALL, durable=False, **options)


def loaded(place: str) -> torch.Tensor:
    found = shardstore.load_plain_tensors(place)["w"]
    assert isinstance(found, torch.Tensor)
    return found


def at_call(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, work: Callable[[], None]
) -> None:
    """Do some work right before a call of a function, once."""
    function, calls = getattr(owner, name), itertools.count()

    def hooked(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            work()
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, hooked)


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"


@pytest.mark.parametrize(
    ("compression", "verify_base", "moment"),
    [(None, False, 0), (None, True, 3), ("zstd", False, 3), ("zstd", True, 0)],
)
@pytest.mark.parametrize("what", ["replace", "delete", "delete and save"])
def test_a_base_that_is_replaced_during_a_save_leaves_no_mixture(
    monkeypatch: pytest.MonkeyPatch,
    root: str,
    what: str,
    compression: str | None,
    verify_base: bool,
    moment: int,
) -> None:
    """Before the n-th chunk is taken over. The new one's chunks are of the same sizes."""
    base, options = f"{root}/a", {"compression": compression}
    save(tensor(1), base, **options)

    def change() -> None:
        if what != "replace":
            shardstore.delete_checkpoint(base)
        if what != "delete":
            save(tensor(2), base, overwrite=True, **options)

    monkeypatch.setattr(ObjectPrefix, "copy_requests", 1)  # the memory takes one thread's writes
    owner, name = (os, "link") if "://" not in root else (RemoteStore, "copy_from")
    at_call(monkeypatch, owner, name, moment, change)
    save(tensor(1), f"{root}/b", base=base, verify_base=verify_base, **options)
    assert torch.equal(loaded(f"{root}/b"), tensor(1))
    if what != "delete":
        assert torch.equal(loaded(base), tensor(2))


def test_a_chunk_that_is_a_link_is_copied(tmp_path: Path) -> None:
    """Of what it leads to, another may dispose."""
    save(tensor(1), str(tmp_path / "a"))
    for number, kind in enumerate(("file", "fifo")):
        chunk = tmp_path / "a" / "w" / f"c.{number}.0"
        chunk.rename(tmp_path / kind)
        if kind == "fifo":
            os.mkfifo(chunk)
        else:
            chunk.symlink_to(tmp_path / kind)
    save(tensor(1), str(tmp_path / "b"), base=tmp_path / "a")
    (tmp_path / "file").write_bytes(b"")
    assert torch.equal(loaded(str(tmp_path / "b")), tensor(1))
    linked = [os.stat(path).st_nlink for path in sorted((tmp_path / "b" / "w").glob("c.*"))]
    assert linked == [1, 1] + [2] * (CHUNKS - 2)


def test_nobody_writes_into_what_is_linked(tmp_path: Path) -> None:
    """Another writer of the same chunk, which the commit would find, changes no base."""
    save(tensor(1), str(tmp_path / "a"))
    base = Location.of(tmp_path / "a")
    before = base.read("w/c.2.0")
    attempt = folder.begin(Location.of(tmp_path / "b"), SaveOptions())
    array = StoredCheckpoint(base).arrays["w"]
    mover = Mover.of(attempt.location, SaveOptions(threads=1), attempt.check)
    stored = StoredCheckpoint(base, documents=read_base(base))
    links = ReusingMover(mover, stored, attempt, RankManifest(0))
    assert links._taken_over(ChunkWrite(array, (2, 0), tensor(1)[2:3].numpy()))
    assert (attempt.location.path / "w" / "c.2.0").stat().st_nlink == 2
    mover.write([ChunkWrite(array, (2, 0), tensor(2)[2:3].numpy())], lambda *_: None)
    assert base.read("w/c.2.0") == before
    assert attempt.location.read("w/c.2.0") != before
    attempt.abandon()
