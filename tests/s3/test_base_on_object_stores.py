"""Saves upon a base in an object store: what is equal is copied by the store, counted on the wire;
each checkpoint stands alone, as on a disk; nobody's newer chunks are overwritten."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.errors import StorageError
from shardstore.mapping import ShardedTensor
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit import base
from shardstore.storage.commit import objects as object_commit
from shardstore.storage.commit.base import ReusingMover, read_base
from shardstore.storage.commit.checkpoints import delete_checkpoint
from shardstore.storage.format.manifest import ChunkRecord, RankManifest
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import SaveOptions
from shardstore.storage.runtime.counters import counters
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.prefix import ObjectPrefix
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import EmbeddedServer, S3Server
from tests.helpers.store_suite import Target, flipped

pytestmark = pytest.mark.usefixtures("copies_small_objects")

LEAST = ObjectPrefix.least_copied_bytes
CHUNK = 64 * 1024
CHUNKS = 20
SMALL = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=CHUNK)


@pytest.fixture(params=["s3", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    """A server, memory, a disk, and its files by way of fsspec."""
    if request.param == "memory":
        return Location.of(f"memory://{uuid.uuid4().hex}").child
    if request.param == "disk":
        return Location.of(tmp_path).child
    if request.param == "local":
        return Location.of(f"local://{tmp_path}").child
    server: S3Server = request.getfixturevalue("s3_server")
    first, second = (
        Location.of(f"s3://{server.new_bucket()}", server.storage_options) for _ in range(2)
    )
    return lambda name: (second if name == "b" else first).child(name)


def state_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}


def save(tensors: dict[str, torch.Tensor], at: Location, **options: Any) -> dict[str, int]:
    """Save in small chunks; what the store was given."""
    before = counters.copy()
    shardstore.save(state_of(tensors), at.place, SMALL, **options)
    return counters - before


def check(tensors: dict[str, torch.Tensor], at: Location) -> None:
    loaded = shardstore.load_plain_tensors(at.place)
    for key, tensor in tensors.items():
        assert torch.equal(loaded[key], tensor)


def random_state() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(CHUNKS, CHUNK // 4)}


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("s3", "at once"),
        ("s3", "in the background"),
        ("s3", "compressed"),
        ("memory", "at once"),
        ("local", "at once"),
        ("disk", "at once"),
        ("disk", "in the background"),
    ],
    indirect=["place"],
)
def test_only_what_changed_is_sent(place: Target, how: str) -> None:
    """Also between buckets; and the base may go."""
    tensors = random_state()
    options = {"compression": "zstd"} if how == "compressed" else {}
    first = save(tensors, place("a"), **options)
    tensors["w"][7, 3] += 1
    options |= {"base": place("a").place}
    if how == "in the background":
        before = counters.copy()
        options |= {"staging_budget_bytes": 3 * CHUNK}
        shardstore.async_save(state_of(tensors), place("b").place, SMALL, **options).result(60)
        second = counters - before
    else:
        second = save(tensors, place("b"), **options)
    assert second["chunks_written"] == 1
    assert second["bytes_written"] <= 0.06 * first["bytes_written"]
    record = json.loads(place("b").read("zarr.json"))["attributes"]["shardstore"]["commit"]
    assert record["reused_bytes"] == second["bytes_reused"]
    assert record["stored_bytes"] == record["reused_bytes"] + second["bytes_written"]
    delete_checkpoint(place("a"))
    check(tensors, place("b"))


def test_a_base_that_is_replaced_is_sent(place: Target) -> None:
    """An object store has the old checkpoint deleted before the new one is written."""
    tensors = random_state()
    save(tensors, place("a"))
    counted = save(tensors, place("a"), base=place("a").place, overwrite=True)
    assert counted["chunks_written"] == CHUNKS
    check(tensors, place("a"))


@pytest.mark.parametrize("place", ["s3", "memory", "disk"], indirect=True)
def test_damaged_chunks_of_the_base_are_not_taken_over(
    place: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """Truncated, longer, gone, or another chunk of the same size: one warning names three. A
    flipped bit is found where it is asked for."""
    tensors, base = random_state(), place("a")
    save(tensors, base)
    whole = base.read("w/c.2.0")
    base.write("w/c.2.0", whole[:100])
    base.write("w/c.3.0", whole + b"more")
    base.write("w/c.4.0", whole)
    base.delete("w/c.5.0")
    counted = save(tensors, place("b"), base=base.place)
    assert counted["chunks_written"] == 4
    check(tensors, place("b"))
    (warning,) = [text for text in caplog.messages if "of the base" in text]
    assert warning.startswith("4 chunk(s)")
    for number, what in enumerate(("fewer than", "more than", "another checksum"), 2):
        assert any(f"w/c.{number}.0" in one and what in one for one in warning.split(";"))
    base.replace("w/c.6.0", flipped(base.read("w/c.6.0"), 100))
    counted = save(tensors, place("c"), base=base.place, verify_base=True)
    assert counted["chunks_written"] == 5
    check(tensors, place("c"))


def test_chunks_that_are_sent_sooner_than_copied_are_sent(
    place: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectPrefix, "least_copied_bytes", LEAST)
    tensors = {"large": torch.randn(LEAST // 4), "small": torch.randn(LEAST // 4 - 2)}
    shardstore.save(state_of(tensors), place("a").place)
    before = counters.copy()
    shardstore.save(state_of(tensors), place("b").place, base=place("a").place)
    counted = counters - before
    assert (counted["chunks_written"], counted["bytes_reused"]) == (1, LEAST + 4)
    check(tensors, place("b"))


def test_a_base_in_another_store_is_sent(
    s3_server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = random_state()
    save(tensors, Location.of(tmp_path / "a"))
    at = Location.of(f"s3://{s3_server.new_bucket()}/b", s3_server.storage_options)
    assert save(tensors, at, base=tmp_path / "a")["bytes_reused"] == 0
    assert "is another store; all chunks are written" in caplog.text
    check(tensors, at)


def test_a_base_is_found_by_options_of_its_own(
    s3_server: S3Server, own_s3_server: EmbeddedServer
) -> None:
    """Not by those of the target, nor by some of the one and some of the other."""
    tensors = random_state()
    there, here = (
        Location.of(f"s3://{server.new_bucket()}/a", server.storage_options)
        for server in (own_s3_server.server, s3_server)
    )
    save(tensors, there)
    counted = save(tensors, here, base=there)
    assert counted["chunks_written"] == CHUNKS
    check(tensors, here)


def test_bytes_on_the_wire(proxied: S3Server, proxy: FaultProxy) -> None:
    """Counted between this process and the server, requests and all."""
    tensors, sent = random_state(), []
    bucket = Location.of(f"s3://{proxied.new_bucket()}", proxied.storage_options)
    for name, options in (("a", {}), ("b", {"base": bucket.child("a").place})):
        proxy.clear()
        save(tensors, bucket.child(name), **options)
        sent.append(sum(passed.sent_bytes for passed in proxy.log))
        tensors["w"][7, 3] += 1
    assert sent[1] <= 0.06 * sent[0]


def test_a_store_that_refuses_copies(
    proxied: S3Server, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything is sent then, and that is said once."""
    tensors, options = random_state(), proxied.storage_options
    options["config_kwargs"]["retries"] = {"total_max_attempts": 1}
    bucket = Location.of(f"s3://{proxied.new_bucket()}", options)
    save(tensors, bucket.child("a"))
    rule = proxy.add(Fault.SLOW_DOWN, copies=True, count=None)
    counted = save(tensors, bucket.child("b"), base=bucket.child("a").place)
    assert rule.hits
    assert counted["chunks_written"] == CHUNKS
    assert caplog.text.count("cannot be copied") == 1
    check(tensors, bucket.child("b"))


def test_a_late_attempt_copies_nothing(place: Target) -> None:
    """It asks for the claims before it copies, and is told who took its target over."""
    tensors, there, target = random_state(), place("a"), place("b")
    save(tensors, there)
    late = object_commit.begin(target, SaveOptions())
    stored = StoredCheckpoint(there, documents=read_base(there))
    array = stored.arrays["w"]
    copies = ReusingMover(
        Mover.of(target, SaveOptions(), late.check), stored, late, RankManifest(0)
    )
    first, second = (
        ChunkWrite(array, (row, 0), tensors["w"][row : row + 1].numpy()) for row in (0, 1)
    )
    assert copies._taken_over(second)
    newer = object_commit.begin(target, SaveOptions())
    newer.put_all([("w/c.0.0", b"what the newer one wrote")])
    with pytest.raises(StorageError, match="newer attempt"):
        copies._taken_over(first)
    assert target.read("w/c.0.0") == b"what the newer one wrote"
    newer.abandon()


def test_leftovers_of_a_dead_save_are_replaced(place: Target) -> None:
    """What lies at the target before this attempt has another content."""
    tensors = random_state()
    save(tensors, place("a"))
    for number in range(CHUNKS):
        place("b").write(f"w/c.{number}.0", b"left over" * 100)
    save(tensors, place("b"), base=place("a").place)
    check(tensors, place("b"))


def test_nothing_is_hashed_after_a_failed_request(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Location.of(f"memory://{uuid.uuid4().hex}") for _ in range(2))
    tensors = {"w": torch.randn(4 * ObjectPrefix.copy_requests, 1024)}
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=4096)
    shardstore.save(state_of(tensors), first.place, strategy)
    hashed = []
    take_over = base.ReusingMover._taken_over

    def counted(mover: base.ReusingMover, item: ChunkWrite) -> ChunkRecord | None:
        hashed.append(item.index)
        return take_over(mover, item)

    def refuse(*_: object) -> bool:
        raise StorageError("the store is gone")

    monkeypatch.setattr(base.ReusingMover, "_taken_over", counted)
    monkeypatch.setattr(base.ReusingMover, "take", refuse)
    with pytest.raises(StorageError, match="the store is gone"):
        shardstore.save(state_of(tensors), second.place, strategy, base=first.place)
    assert len(hashed) <= 2 * ObjectPrefix.copy_requests
