"""Saves upon a base: what is the same is linked, what changed is written, each checkpoint stands
alone; and compressed chunks."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore.errors import DamagedCheckpointError, FormatVersionError, NotACheckpointError
from shardstore.mapping import ShardedTensor
from shardstore.progress import Progress
from shardstore.storage.runtime.checksums import crc32c
from shardstore.storage.runtime.counters import counters
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.cli_checkpoints import flip
from tests.helpers.managed import warnings_of

CHUNK = 64 * 1024
SMALL = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=CHUNK)


def state_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}


def record_of(place: Path) -> dict[str, Any]:
    root = json.loads((place / "zarr.json").read_text())
    record: dict[str, Any] = root["attributes"]["shardstore"]["commit"]
    return record


def save(
    tensors: dict[str, torch.Tensor], place: Path, *, later: bool = False, **options: Any
) -> dict[str, int]:
    """Save in small chunks, perhaps in the background with little memory; what the store was
    given."""
    before = counters.copy()
    if later:
        handle = shardstore.async_save(
            state_of(tensors), place, SMALL, staging_budget_bytes=3 * CHUNK, **options
        )
        assert handle.result(60) == record_of(place)
    else:
        shardstore.save(state_of(tensors), place, SMALL, **options)
    return counters - before


at_once_or_later = pytest.mark.parametrize("later", [False, True])


def check(tensors: dict[str, torch.Tensor], place: Path) -> None:
    """By our own verified reads, and by plain zarr."""
    loaded = shardstore.load_plain_tensors(place)
    group = zarr.open_group(place, mode="r")
    for key, tensor in tensors.items():
        assert torch.equal(loaded[key], tensor)
        assert (np.asarray(group[key]) == tensor.numpy()).all()


def test_any_of_a_chain_may_be_deleted(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(8, CHUNK // 4)}
    states = []
    for number in range(4):
        tensors = {"w": tensors["w"].clone()}
        tensors["w"][number] = number
        base = {"base": tmp_path / f"{number - 1}"} if number else {}
        save(tensors, tmp_path / f"{number}", **base)
        states.append(tensors)
    shutil.rmtree(tmp_path / "1")
    shutil.rmtree(tmp_path / "0")
    check(states[2], tmp_path / "2")
    check(states[3], tmp_path / "3")
    # The base may be what is replaced.
    states[3]["w"][0] = 11
    counted = save(states[3], tmp_path / "3", base=tmp_path / "3", overwrite=True)
    assert counted["chunks_written"] == 1
    check(states[3], tmp_path / "3")


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 300)),
    changes=st.lists(st.integers(0, 2**31), max_size=4),
)
def test_only_changed_chunks_of_any_shape_are_written(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, int], changes: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("base")
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=1024)
    tensor = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    shardstore.save(state_of({"w": tensor}), folder / "a", strategy)
    for place in changes:
        tensor.view(-1)[place % tensor.numel()] = -1
    shardstore.save(state_of({"w": tensor}), folder / "b", strategy, base=folder / "a")
    check({"w": tensor}, folder / "b")


def test_equal_bytes_in_another_grid_or_type_are_sent(tmp_path: Path) -> None:
    zeros = torch.zeros(4, CHUNK // 4)
    save({"w": zeros, "v": zeros}, tmp_path / "a")
    other = {"w": zeros.view(torch.int32), "v": zeros.reshape(8, -1).clone()}
    counted = save(other, tmp_path / "b", base=tmp_path / "a")
    assert counted["bytes_reused"] == 0
    check(other, tmp_path / "b")
    counted = save({"w": zeros}, tmp_path / "c", base=tmp_path / "a", compression="zstd")
    assert counted["bytes_reused"] == 0


def test_an_equal_checksum_is_no_proof(tmp_path: Path) -> None:
    first = np.random.default_rng(0).bytes(CHUNK)
    polynomial = (1 | 0x82F63B78 << 1).to_bytes(5, "little")  # added anywhere, no crc32c changes
    other = bytes(a ^ b for a, b in zip(first, polynomial, strict=False)) + first[5:]
    assert other != first
    assert crc32c(other, 0) == crc32c(first, 0)
    one, two = (
        {"w": torch.frombuffer(bytearray(data), dtype=torch.uint8)} for data in (first, other)
    )
    save(one, tmp_path / "a", durable=False)
    counted = save(two, tmp_path / "b", base=tmp_path / "a", durable=False)
    assert counted["chunks_written"] == 1
    check(two, tmp_path / "b")


@at_once_or_later
def test_a_damaged_base_is_one_warning(
    tmp_path: Path, later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With the number of its damaged chunks, also where chunks are written in several rounds."""
    tensors = {f"w{i}": torch.randn(4, CHUNK // 4) for i in range(8)}
    save(tensors, tmp_path / "a", durable=False)
    for key in tensors:
        (tmp_path / "a" / key / "c.2.0").unlink()
        os.truncate(tmp_path / "a" / key / "c.3.0", 100)
    save(tensors, tmp_path / "b", later=later, base=tmp_path / "a", durable=False)
    (warning,) = warnings_of(caplog)
    assert "16 chunk(s)" in warning
    check(tensors, tmp_path / "b")


@pytest.mark.parametrize(("compression", "later"), [(None, False), ("zstd", True)])
def test_a_flipped_bit_is_found_where_it_is_asked_for(
    tmp_path: Path, compression: str | None, later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"w": torch.arange(CHUNK, dtype=torch.float32).reshape(4, -1), "v": torch.ones(3)}
    save(tensors, tmp_path / "a", compression=compression, durable=False)
    flip(tmp_path / "a" / "w" / "c.1.0", 100)
    options: dict[str, Any] = {"base": tmp_path / "a", "compression": compression, "durable": False}
    counted = save(tensors, tmp_path / "b", later=later, verify_base=True, **options)
    assert counted["chunks_written"] == 1
    assert "1 chunk(s) of the base" in caplog.text
    assert "w/c.1.0" in caplog.text
    check(tensors, tmp_path / "b")
    # Nothing but the file tells: unread, it is the same file afterwards, and found by who loads it.
    save(tensors, tmp_path / "c", **options)
    with pytest.raises(DamagedCheckpointError, match=r"\(1, 0\) of key 'w'"):
        check(tensors, tmp_path / "c")


def test_a_whole_base_is_read_once_and_taken_over(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4, CHUNK // 4)}
    first = save(tensors, tmp_path / "a", durable=False)
    counted = save(tensors, tmp_path / "b", base=tmp_path / "a", verify_base=True, durable=False)
    assert counted["chunks_written"] == 0
    assert counted["bytes_read"] == counted["bytes_reused"] == first["bytes_written"]


def test_a_base_that_is_still_being_saved_is_waited_for(tmp_path: Path) -> None:
    tensors, go_on = {"w": torch.randn(4, CHUNK // 4)}, threading.Event()

    def progress(event: Progress) -> None:
        if event.phase == "commit":
            assert go_on.wait(60)

    shardstore.async_save(state_of(tensors), tmp_path / "a", SMALL, progress=progress)
    threading.Timer(0.2, go_on.set).start()
    counted = save(tensors, tmp_path / "b", base=tmp_path / "a")
    assert counted["bytes_reused"] > tensors["w"].nbytes
    check(tensors, tmp_path / "b")


def test_a_base_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4, 4)}
    with pytest.raises(NotACheckpointError, match="is not a committed checkpoint"):
        save(tensors, tmp_path / "b", base=tmp_path / "a")
    save(tensors, tmp_path / "a")
    (tmp_path / "a" / "manifest.npz").write_bytes(b"no columns")
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.npz"):
        save(tensors, tmp_path / "b", base=tmp_path / "a")
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_a_base_on_another_file_system_is_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    place = other / f"shardstore-{os.getpid()}"
    tensors = {"w": torch.randn(4, CHUNK // 4)}
    try:
        save(tensors, place)
        counted = save(tensors, tmp_path / "b", base=place)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    assert counted["bytes_reused"] == 0
    assert "cannot be linked" in caplog.text
    check(tensors, tmp_path / "b")


@at_once_or_later
def test_compressed_chunks_are_taken_from_a_base(tmp_path: Path, later: bool) -> None:
    tensors = {
        "w": torch.zeros(4, CHUNK // 4),
        "v": torch.randn(3, 1000).bfloat16().float(),
        "scalar": torch.tensor(3.0),
    }
    save(tensors, tmp_path / "a", later=later, compression="zstd")
    check(tensors, tmp_path / "a")
    on_disk = sum(p.stat().st_size for p in (tmp_path / "a").glob("*/c*"))
    assert record_of(tmp_path / "a")["stored_bytes"] == on_disk
    assert on_disk < 0.5 * 4 * CHUNK
    codecs = json.loads((tmp_path / "a" / "w" / "zarr.json").read_text())["codecs"]
    assert [codec["name"] for codec in codecs] == ["bytes", "zstd", "crc32c"]
    counted = save(tensors, tmp_path / "b", compression="zstd", base=tmp_path / "a")
    assert counted["chunks_written"] == 0
    check(tensors, tmp_path / "b")


def test_the_layout_of_zarr_v2_has_no_compression(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(4)}
    with pytest.raises(FormatVersionError, match="has no compression"):
        shardstore.save(state_of(tensors), tmp_path / "a", ("zarr", 1), compression="zstd")
    assert os.listdir(tmp_path) == []


def test_a_base_is_of_no_use_to_the_layout_of_zarr_v2(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4)}
    save(tensors, tmp_path / "a")
    shardstore.save(state_of(tensors), tmp_path / "b", ("zarr", 1), base=tmp_path / "a")
    assert torch.equal(shardstore.load_plain_tensors(tmp_path / "b")["w"], tensors["w"])
