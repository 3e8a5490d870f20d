"""Saves upon a base in an object store: what is equal is copied by the store, counted on the wire;
each checkpoint stands alone; nobody's newer chunks are overwritten."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
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

pytestmark = pytest.mark.usefixtures("copies_small_objects")

LEAST = ObjectPrefix.least_copied_bytes
CHUNK = 64 * 1024
SMALL = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=CHUNK)
Place = Callable[[str], tuple[str, dict[str, Any]]]


@pytest.fixture(params=["s3", "memory", "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A server, memory, and files by way of fsspec."""
    if request.param == "memory":
        bucket = uuid.uuid4().hex
        return lambda name: (f"memory://{bucket}-{name}/step", {})
    if request.param == "local":
        return lambda name: (f"local://{tmp_path}/{name}", {})
    server: S3Server = request.getfixturevalue("s3_server")
    first, second = server.new_bucket(), server.new_bucket()
    return lambda name: (f"s3://{second if name == 'b' else first}/{name}", server.storage_options)


def state_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}


def save(tensors: dict[str, torch.Tensor], at: tuple[str, Any], **options: Any) -> dict[str, int]:
    """Save in small chunks; what the store was given."""
    before = counters.copy()
    shardstore.save(state_of(tensors), at[0], SMALL, storage_options=at[1], **options)
    return counters - before


def check(tensors: dict[str, torch.Tensor], at: tuple[str, Any]) -> None:
    loaded = shardstore.load_plain_tensors(at[0], storage_options=at[1])
    for key, tensor in tensors.items():
        assert torch.equal(loaded[key], tensor)


def record_of(at: tuple[str, Any]) -> dict[str, Any]:
    root = json.loads(Location.of(at[0], at[1]).read("zarr.json"))
    record: dict[str, Any] = root["attributes"]["shardstore"]["commit"]
    return record


def random_state() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.randn(20, CHUNK // 4) for i in range(3)}


@pytest.mark.parametrize("how", ["at once", "in the background", "compressed"])
def test_only_what_changed_is_sent(place: Place, how: str) -> None:
    """Also between buckets; and the base may go."""
    tensors = random_state()
    options = {"compression": "zstd"} if how == "compressed" else {}
    first = save(tensors, place("a"), **options)
    for tensor in tensors.values():
        tensor[7, 3] += 1
    if how == "in the background":
        before = counters.copy()
        handle = shardstore.async_save(
            state_of(tensors),
            place("b")[0],
            SMALL,
            base=place("a")[0],
            storage_options=place("b")[1],
            staging_budget_bytes=3 * CHUNK,
        )
        handle.result(60)
        second = counters - before
    else:
        second = save(tensors, place("b"), base=place("a")[0], **options)
    assert second["chunks_written"] == 3
    assert second["bytes_written"] <= 0.06 * first["bytes_written"]
    record = record_of(place("b"))
    assert record["reused_bytes"] == second["bytes_reused"]
    assert record["stored_bytes"] == record["reused_bytes"] + second["bytes_written"]
    delete_checkpoint(Location.of(place("a")[0], place("a")[1]))
    check(tensors, place("b"))


def test_a_flipped_bit_is_found_where_it_is_asked_for(place: Place) -> None:
    tensors = random_state()
    save(tensors, place("a"))
    base = Location.of(place("a")[0], place("a")[1])
    data = bytearray(base.read("w1/c.3.0"))
    data[100] ^= 1
    base.replace("w1/c.3.0", bytes(data))
    counted = save(tensors, place("b"), base=place("a")[0], verify_base=True)
    assert counted["chunks_written"] == 1
    check(tensors, place("b"))


def test_a_base_that_is_replaced_is_sent(place: Place) -> None:
    """An object store has the old checkpoint deleted before the new one is written."""
    tensors = random_state()
    save(tensors, place("a"))
    counted = save(tensors, place("a"), base=place("a")[0], overwrite=True)
    assert counted["chunks_written"] == 60
    check(tensors, place("a"))


def test_damaged_chunks_of_the_base_are_not_taken_over(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Truncated, longer, gone, or another chunk of the same size: one warning names three."""
    tensors = random_state()
    save(tensors, place("a"))
    base = Location.of(place("a")[0], place("a")[1])
    whole = base.read("w0/c.2.0")
    base.write("w0/c.2.0", whole[:100])
    base.write("w0/c.3.0", whole + b"more")
    base.write("w0/c.4.0", whole)
    base.remote.delete(["w0/c.5.0"])
    counted = save(tensors, place("b"), base=place("a")[0])
    assert counted["chunks_written"] == 4
    check(tensors, place("b"))
    (warning,) = [text for text in caplog.messages if "of the base" in text]
    assert warning.startswith("4 chunk(s)")
    for number, what in enumerate(("fewer than", "more than", "another checksum"), 2):
        assert any(f"w0/c.{number}.0" in one and what in one for one in warning.split(";"))


def test_chunks_that_are_sent_sooner_than_copied_are_sent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectPrefix, "least_copied_bytes", LEAST)
    tensors = {"large": torch.randn(LEAST // 4), "small": torch.randn(LEAST // 4 - 2)}
    first, second = place("a"), place("b")
    shardstore.save(state_of(tensors), first[0], storage_options=first[1])
    before = counters.copy()
    shardstore.save(state_of(tensors), second[0], storage_options=second[1], base=first[0])
    counted = counters - before
    assert (counted["chunks_written"], counted["bytes_reused"]) == (1, LEAST + 4)
    check(tensors, second)


def test_a_base_in_another_store_is_sent(
    s3_server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = random_state()
    save(tensors, (str(tmp_path / "a"), {}))
    at = (f"s3://{s3_server.new_bucket()}/b", s3_server.storage_options)
    assert save(tensors, at, base=tmp_path / "a")["bytes_reused"] == 0
    assert "is another store; all chunks are written" in caplog.text
    check(tensors, at)


def test_a_base_is_found_by_options_of_its_own(
    s3_server: S3Server, own_s3_server: EmbeddedServer
) -> None:
    """Not by those of the target, nor by some of the one and some of the other."""
    tensors = random_state()
    bucket = own_s3_server.server.new_bucket()
    there = (f"s3://{bucket}/a", own_s3_server.server.storage_options)
    save(tensors, there)
    here = (f"s3://{s3_server.new_bucket()}/b", s3_server.storage_options)
    counted = save(tensors, here, base=Location.of(there[0], there[1]))
    assert counted["chunks_written"] == len(tensors) * 20
    check(tensors, here)


def test_bytes_on_the_wire(s3_server: S3Server) -> None:
    """Counted between this process and the server, requests and all."""
    bucket, tensors = s3_server.new_bucket(), random_state()
    with FaultProxy(s3_server.endpoint_url) as proxy:
        options = s3_server.at(proxy.endpoint_url).storage_options
        sent = []
        for name, base in (("a", {}), ("b", {"base": f"s3://{bucket}/a"})):
            proxy.clear()
            save(tensors, (f"s3://{bucket}/{name}", options), **base)
            sent.append(sum(passed.sent_bytes for passed in proxy.log))
            for tensor in tensors.values():
                tensor[7, 3] += 1
    assert sent[1] <= 0.06 * sent[0]


def test_a_store_that_refuses_copies(s3_server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    """Everything is sent then, and that is said once."""
    bucket, tensors = s3_server.new_bucket(), random_state()
    save(tensors, (f"s3://{bucket}/a", s3_server.storage_options))
    with FaultProxy(s3_server.endpoint_url) as proxy:
        options = s3_server.at(proxy.endpoint_url).storage_options
        options["config_kwargs"]["retries"] = {"total_max_attempts": 1}
        rule = proxy.add(Fault.SLOW_DOWN, copies=True, count=None)
        counted = save(tensors, (f"s3://{bucket}/b", options), base=f"s3://{bucket}/a")
    assert rule.hits
    assert counted["chunks_written"] == 60
    assert caplog.text.count("cannot be copied") == 1
    check(tensors, (f"s3://{bucket}/b", s3_server.storage_options))


def test_a_late_attempt_copies_nothing(place: Place) -> None:
    """It asks for the claims before it copies, and is told who took its target over."""
    tensors = random_state()
    save(tensors, place("a"))
    there = Location.of(place("a")[0], place("a")[1])
    target = Location.of(place("b")[0], place("b")[1])
    late = object_commit.begin(target, SaveOptions())
    stored = StoredCheckpoint(there, documents=read_base(there))
    array = stored.arrays["w0"]
    copies = ReusingMover(
        Mover.of(target, SaveOptions(), late.check), stored, late, RankManifest(0)
    )
    first, second = (
        ChunkWrite(array, (row, 0), tensors["w0"][row : row + 1].numpy()) for row in (0, 1)
    )
    assert copies._taken_over(second)
    newer = object_commit.begin(target, SaveOptions())
    newer.put_all([("w0/c.0.0", b"what the newer one wrote")])
    with pytest.raises(StorageError, match="newer attempt"):
        copies._taken_over(first)
    assert target.read("w0/c.0.0") == b"what the newer one wrote"
    newer.abandon()


def test_leftovers_of_a_dead_save_are_replaced(place: Place) -> None:
    """What lies at the target before this attempt has another content."""
    tensors = random_state()
    save(tensors, place("a"))
    target = Location.of(place("b")[0], place("b")[1])
    for number in range(20):
        target.write(f"w0/c.{number}.0", b"left over" * 100)
    save(tensors, place("b"), base=place("a")[0])
    check(tensors, place("b"))


def test_nothing_is_hashed_after_a_failed_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = uuid.uuid4().hex
    first, second = (f"memory://{bucket}-a/step", {}), (f"memory://{bucket}-b/step", {})
    tensors = {"w": torch.randn(400, CHUNK // 4)}
    save(tensors, first)
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
        save(tensors, second, base=first[0])
    assert len(hashed) <= 2 * ObjectPrefix.copy_requests
