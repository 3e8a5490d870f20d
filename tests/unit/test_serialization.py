"""Saves and loads by the public functions: their places, options and imports, many elements."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import shardstore
from shardstore import CheckpointManager, SaveOptions, ShardedTensor, serialization
from shardstore.errors import (
    AccessPatternError,
    ArgumentError,
    FormatVersionError,
    NotACheckpointError,
    StorageError,
)
from shardstore.storage.stores.location import Location
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.processes import run_to_end


def _state(value: float = 1.0) -> dict[str, object]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((2, 3), value)), "step": 3}


@pytest.mark.parametrize("name", ["my run", "50%", "50%25", "a%20b", "ü", "q?x=1#f", "a\nb", "+"])
def test_a_file_url_with_escapes_is_the_folder_that_they_stand_for(
    tmp_path: Path, name: str
) -> None:
    """RFC 8089, and RFC 3986, section 2.1: as ``Path.as_uri`` writes a path."""
    folder = tmp_path / name
    url = folder.as_uri()
    shardstore.save(_state(7.0), url)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    for place in (folder, url, url.replace("file:///", "FILE://localhost/")):
        assert torch.equal(shardstore.load(_state(), place)["w"], torch.full((2, 3), 7.0))
        assert Location.of(place).url == str(folder)


def test_escapes_stand_for_bytes(tmp_path: Path) -> None:
    assert Location.of(f"file://{tmp_path}/%ff").url == os.fsdecode(
        os.fsencode(tmp_path) + b"/\xff"
    )
    assert Location.of(f"file://{tmp_path}/100%").url == f"{tmp_path}/100%"
    with pytest.raises(ArgumentError, match="NUL"):
        shardstore.save(_state(), f"file://{tmp_path}/a%00b")


def test_a_store_that_nobody_knows_is_refused_at_once() -> None:
    says = "fsspec knows no store nosuchstore://.*install its package.*endpoint_url"
    with pytest.raises(StorageError, match=says):
        shardstore.save(_state(), "nosuchstore://a-bucket/step-1")


def test_keys_with_slashes_of_the_old_layout_are_found_in_their_folders(tmp_path: Path) -> None:
    state = {"x": ShardedTensor.from_rank_offsets("a/b", torch.arange(6.0))}
    shardstore.save(state, tmp_path / "c", ("zarr", 1))
    (tmp_path / "c" / "a").mkdir()
    shutil.move(tmp_path / "c" / "a%2Fb", tmp_path / "c" / "a" / "b")
    wanted = {"x": ShardedTensor.from_rank_offsets("a/b", torch.zeros(6))}
    assert torch.equal(shardstore.load(wanted, tmp_path / "c")["x"], torch.arange(6.0))


def test_a_stored_dict_stays_a_dict_where_a_list_is_given(tmp_path: Path) -> None:
    stored = {0: 5, 3: 6}
    shardstore.save({**_state(), "common": stored}, tmp_path / "c")
    loaded = shardstore.load({**_state(), "common": [torch.ones(1)]}, tmp_path / "c")
    assert loaded["common"] == stored


def test_a_shard_beyond_the_global_shape_is_refused_and_not_filled_with_zeros(
    tmp_path: Path,
) -> None:
    """A shard without elements may lie anywhere."""
    shardstore.save(_state(5.0), tmp_path / "a")
    for shape, offset in (((2, 3), (1, 0)), ((3, 3), (0, 0)), ((0, 3), (5, 0))):
        given = ShardedTensor("w", torch.ones(shape), torch.float32, shape, (2, 3), offset, None)
        refused = pytest.raises(AccessPatternError, match="beyond the global shape")
        with refused if given.data.numel() else nullcontext():
            shardstore.load({"w": given}, tmp_path / "a", validate_access_integrity=False)
        assert torch.equal(given.data, torch.ones(shape))


@pytest.mark.parametrize("name", ["sharded_strategy", "common_strategy"])
def test_what_is_no_strategy_is_named_at_the_load(name: str, tmp_path: Path) -> None:
    shardstore.save(_state(), tmp_path / "a")
    with pytest.raises(shardstore.CheckpointingException, match=f"{name}='zarr' must be"):
        shardstore.load(_state(), tmp_path / "a", **{name: "zarr"})


@pytest.mark.parametrize(
    ("entry", "value"), [("sharded_backend", "nobody's"), ("common_backend_version", 99)]
)
def test_a_checkpoint_of_an_unknown_backend_is_named(
    tmp_path: Path, entry: str, value: object
) -> None:
    place = tmp_path / "c"
    shardstore.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, place)
    config = json.loads((place / "metadata.json").read_text())
    (place / "metadata.json").write_text(json.dumps({**config, entry: value}))
    with pytest.raises(FormatVersionError, match="Registered for") as caught:
        shardstore.load({}, place)
    assert str(place) in str(caught.value)
    assert repr(value) in str(caught.value)
    assert caught.value.url == str(place)


def test_metadata_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "c" / "metadata.json").mkdir(parents=True)
    with pytest.raises(NotACheckpointError, match="is not a distributed checkpoint"):
        shardstore.load({}, tmp_path / "c")


def test_a_storage_error_keeps_its_number_on_other_ranks() -> None:
    error = StorageError("the disk is full", key="w", url="/x")
    error.errno = errno.ENOSPC
    again = pickle.loads(pickle.dumps(error))
    assert (again.errno, again.key, again.url) == (errno.ENOSPC, "w", "/x")
    assert str(again) == "the disk is full"


def test_what_json_does_not_have_is_text_in_the_root_document(tmp_path: Path) -> None:
    """A reader of strict JSON must be able to read the root document, whatever the metadata."""
    metadata = {"loss": float("nan"), "kind": {"a": [1, 2]}, "odd": {1, 2}}
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
    shardstore.save(state, tmp_path / "c", content_metadata=metadata)

    def never(constant: str) -> object:
        raise AssertionError(constant)

    root = json.loads((tmp_path / "c" / "zarr.json").read_text(), parse_constant=never)
    kept = root["attributes"]["content_metadata"]
    assert kept == {"loss": "nan", "kind": {"a": [1, 2]}, "odd": str({1, 2})}


def test_programs_replace_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They set these names of the module, which are looked up when save and load are called."""
    layouts, asked = [], []
    default, metadata = (
        serialization.get_default_save_sharded_strategy,
        serialization.load_sharded_metadata,
    )

    def old_layout() -> object:
        layouts.append(1)
        return default("zarr", 1)

    def counted(place: object, *strategies: object) -> object:
        asked.append(place)
        return metadata(place, *strategies)  # type: ignore[arg-type]

    monkeypatch.setattr(serialization, "get_default_save_sharded_strategy", old_layout)
    monkeypatch.setattr(serialization, "load_sharded_metadata", counted)
    shardstore.save(_state(), tmp_path / "a")
    shardstore.async_save(_state(), tmp_path / "b").result()
    assert len(layouts) == 2
    for name in ("a", "b"):
        assert (tmp_path / name / "w" / ".zarray").exists()
    loaded, missing, unexpected = shardstore.load(_state(), tmp_path / "a", strict="return_all")
    assert (list(loaded["w"].shape), missing, unexpected) == ([2, 3], set(), set())
    assert len(asked) == 1


def test_a_pending_save_does_not_keep_the_state(tmp_path: Path) -> None:
    state = _state()
    tensor = weakref.ref(state["w"])
    request = shardstore.save(state, tmp_path / "a", async_sharded_save=True)
    del state
    assert tensor() is None
    request.execute_sync()
    assert list(shardstore.load_tensors_metadata(tmp_path / "a")) == ["w"]


OPTIONS = SaveOptions(target_chunk_bytes=1024, compression="zstd", durable=False)


def whole_state(**more: Any) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(64, 64), **more)}


def chunks_and_codecs(place: Path) -> tuple[Any, Any]:
    meta = shardstore.open(place).metas["w"]
    return meta.grid.chunk_shape, meta.codecs


def test_options_are_taken_whole_and_keywords_replace_them(tmp_path: Path) -> None:
    shardstore.save(whole_state(), tmp_path / "a", options=OPTIONS)
    assert chunks_and_codecs(tmp_path / "a") == ((4, 64), ("zstd", "crc32c"))
    shardstore.save(
        whole_state(), tmp_path / "a", options=OPTIONS, overwrite=True, compression=None
    )
    assert chunks_and_codecs(tmp_path / "a") == ((4, 64), ("crc32c",))
    shardstore.async_save(whole_state(), tmp_path / "b", options=OPTIONS).wait()
    assert chunks_and_codecs(tmp_path / "b") == ((4, 64), ("zstd", "crc32c"))
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=2048)
    shardstore.save(whole_state(), tmp_path / "c", strategy, options=OPTIONS)
    assert chunks_and_codecs(tmp_path / "c") == ((8, 64), ("zstd", "crc32c"))
    shardstore.save(whole_state(), tmp_path / "d")
    assert chunks_and_codecs(tmp_path / "d") == ((64, 64), ("crc32c",))


def test_either_the_option_or_the_argument_leaves_a_check_out(tmp_path: Path) -> None:
    unchecked = SaveOptions(validate_access_integrity=False)
    with pytest.raises(AccessPatternError):
        shardstore.save(whole_state(replica_id=1), tmp_path / "a", options=OPTIONS)
    shardstore.save(whole_state(replica_id=1), tmp_path / "b", options=unchecked)
    shardstore.save(whole_state(replica_id=1), tmp_path / "c", None, None, False, options=OPTIONS)


def test_a_manager_keeps_the_base_of_the_options(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        manager.save(1, whole_state())
        options = SaveOptions(base=tmp_path / "step-1", durable=False)
        record = manager.save(2, whole_state(), options=options)
    assert record["reused_bytes"] > 0


PROGRAM = """
import json, sys
import torch, torch.distributed
before = set(sys.modules)
import shardstore

def state():
    return {
        "w": shardstore.ShardedTensor.from_rank_offsets("w", torch.ones(64, 8).bfloat16()),
        "o": shardstore.ShardedObject("o", {"a": 1}, (1,), (0,)),
        "step": 3,
    }

shardstore.save(state(), sys.argv[1])
shardstore.async_save(state(), sys.argv[1] + "-async").result()
shardstore.load(state(), sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules.keys() - before})))
"""


def test_local_saves_and_loads_import_no_store(tmp_path: Path) -> None:
    ran = run_to_end([sys.executable, "-c", PROGRAM, tmp_path / "c"], check=True)
    imported = set(json.loads(ran.stdout))
    assert "shardstore" in imported
    # torch itself imports asyncio.
    assert not imported & {"zarr", "tensorstore", "fsspec", "s3fs", "obstore", "asyncio"}
    assert not imported & {"numcodecs", "aiohttp", "botocore", "xarray"}


ROWS, COLUMNS = 2**16 + 3, 2**15
EDGE = 2**31
"""First element of the row at which the count no longer fits."""


def elements(start: int, stop: int) -> torch.Tensor:
    """Elements of the flattened array."""
    value = torch.arange(start, stop, dtype=torch.int64)
    return torch.where((value - EDGE).abs() < 2 * COLUMNS, value % 251 + 1, 0).to(torch.uint8)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("many")
    data = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8)  # pages that nobody wrote take no memory
    assert data.numel() > EDGE
    data.view(-1)[EDGE - 3 * COLUMNS :] = elements(EDGE - 3 * COLUMNS, data.numel())
    shardstore.save({"w": ShardedTensor.from_rank_offsets("w", data)}, folder / "c")
    yield folder / "c"
    shutil.rmtree(folder)


@pytest.mark.long
def test_rows_beyond_31_bits_are_read(many: Path) -> None:
    region = (slice(2**16 - 1, ROWS), slice(5, COLUMNS - 5))
    loaded = shardstore.load_plain_tensors(many, keys=["w"], region=region)
    wanted = elements(EDGE - COLUMNS, ROWS * COLUMNS).view(-1, COLUMNS)[:, 5:-5]
    assert torch.equal(loaded["w"], wanted)
    assert wanted.any(dim=1)[:3].all()


@pytest.mark.long
def test_a_range_across_31_bits_is_read(many: Path) -> None:
    bounds = slice(EDGE - 100_000, EDGE + 70_001)
    part = ShardedTensor.from_rank_offsets_flat(
        "w", torch.ones(170_001, dtype=torch.uint8), (ROWS, COLUMNS), flattened_range=bounds
    )
    loaded = shardstore.load({"w": part}, many, validate_access_integrity=False)
    assert torch.equal(loaded["w"], elements(bounds.start, bounds.stop))


@pytest.mark.long
def test_plain_zarr_reads_rows_beyond_31_bits(many: Path) -> None:
    array = zarr.open_group(many, mode="r")["w"]
    assert isinstance(array, zarr.Array)
    assert array.shape == (ROWS, COLUMNS)
    found = np.asarray(array[2**16 - 2 :, 7])
    wanted = elements(EDGE - 2 * COLUMNS, ROWS * COLUMNS).view(-1, COLUMNS)[:, 7].numpy()
    assert (found == wanted).all()
