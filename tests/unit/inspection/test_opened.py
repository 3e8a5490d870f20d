"""``shardstore.open``: checkpoints, and Zarr of other programs, as mappings of keys to arrays."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore.errors import (
    ArgumentError,
    ChunkCorruptError,
    DTypeMismatchError,
    IndexRangeError,
    MissingKeyError,
    NotACheckpointError,
    StorageError,
)
from shardstore.inspection.values import Statistics, sums_of
from shardstore.inspection.verify import verify
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format import documents
from shardstore.storage.stores.location import Location
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from testing.s3_servers import S3Server
from tests.helpers.cli_checkpoints import flip
from tests.helpers.processes import run_to_end
from tests.helpers.users import another_user, folder_for_all


def values() -> dict[str, torch.Tensor]:
    return {
        "decoder.fc1.weight": torch.arange(600.0).reshape(30, 20),
        "decoder.fc1.bias": torch.linspace(-1, 1, 30).bfloat16(),
        "f8": torch.linspace(-4, 4, 6).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4, dtype=torch.int16),
    }


def memory_url() -> str:
    return f"memory://open-{uuid4().hex}/step-7"


def saved(place: Any, **options: Any) -> Any:
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, value) for key, value in values().items()
    }
    state["step"] = 7
    state["rng"] = ShardedObject("rng", {"seed": 1}, (1,), (0,))
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=400)
    shardstore.save(state, place, strategy, content_metadata={"run": "a"}, **options)
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = saved(tmp_path_factory.mktemp("open") / "step-7")
    return made


def test_an_opened_checkpoint_is_a_mapping_of_arrays(place: Path) -> None:
    ckpt = shardstore.open(place)
    assert set(ckpt) == set(values())
    assert len(ckpt) == 5
    assert "f8" in ckpt
    assert ckpt.get("f9") is None
    for key, value in values().items():
        array = ckpt[key]
        assert (array.shape, array.nbytes) == (tuple(value.shape), value.nbytes)
        assert str(array.dtype) == str(value.dtype).removeprefix("torch.")
        assert array.torch().dtype == value.dtype
        assert torch.equal(array.torch().float(), value.float()), key
        assert array.attrs["shardstore"]["key"] == key
        assert np.asarray(array).tobytes() == array[...].tobytes()
        if value.nbytes:
            assert array.zarr[...].tobytes() == array[...].tobytes()
            assert np.array(array.tensorstore).tobytes() == array[...].tobytes()
    weight = ckpt["decoder.fc1.weight"]
    assert np.array_equal(weight[3:5], np.arange(60, 100).reshape(2, 20))
    assert np.asarray(weight, dtype=np.float64).dtype == np.float64
    assert (len(weight), weight.ndim, weight.size) == (30, 2, 600)
    assert [row[0] for row in weight] == [20.0 * i for i in range(30)]
    with pytest.raises(ValueError, match="must be copied"):
        weight.__array__(copy=False)  # as np.array(weight, copy=False) of NumPy 2 calls it


def test_objects_and_common_values_are_no_arrays(place: Path) -> None:
    ckpt = shardstore.open(place)
    assert ckpt.common["step"] == 7
    assert dict(ckpt.objects) == {"rng/shard_0_1": {"seed": 1}}
    with pytest.raises(MissingKeyError, match="rng/shard_0_1"):
        ckpt.objects["rng/shard_0_2"]
    info = ckpt.info
    assert info["written_by"].startswith("shardstore ")
    assert info["created"]
    assert (info["arrays"], info["content_metadata"]) == (5, {"run": "a"})
    assert info["bytes"] == ckpt.nbytes == sum(value.nbytes for value in values().values())
    json.dumps(info)


def test_a_wrong_key_names_the_nearest(place: Path) -> None:
    with pytest.raises(KeyError, match=r"did you mean decoder\.fc1\.weight") as caught:
        shardstore.open(place)["decoder.fc1.wieght"]
    assert isinstance(caught.value, MissingKeyError)
    assert str(place) in str(caught.value)


def test_repr_is_a_table_of_arrays(place: Path, tmp_path: Path) -> None:
    lines = repr(shardstore.open(place)).splitlines()
    assert lines[0] == f"{place}: 5 arrays, 2.4 KiB"
    assert lines[1].split() == ["key", "shape", "dtype", "bytes"]
    assert "decoder.fc1.weight  (30, 20)  float32        2.3 KiB" in lines
    assert "decoder.fc1.bias" in repr(shardstore.open(place)["decoder.fc1.bias"])
    group = zarr.open_group(tmp_path / "many", mode="w")
    for i in range(60):
        group.create_array(f"{'long' * 20}{i:02}", shape=(2,), dtype="i4")
    text = repr(shardstore.open(tmp_path / "many"))
    assert "... 20 more" in text
    assert text.count("\n") == 42
    assert max(map(len, text.splitlines()[1:])) < 100


def test_a_checkpoint_without_arrays_says_where_its_tensors_are(tmp_path: Path) -> None:
    shardstore.save({"w": torch.ones(2)}, tmp_path / "c")
    assert "shard() are common values" in repr(shardstore.open(tmp_path / "c"))
    for read in (
        lambda: shardstore.open(tmp_path / "c")["w"],
        lambda: shardstore.load_plain_tensors(tmp_path / "c", keys=["w"]),
    ):
        with pytest.raises(MissingKeyError, match=r"'w'.*shard\(\) are common values"):
            read()


def test_damage_is_met_where_it_is_read(tmp_path: Path) -> None:
    ckpt = shardstore.open(saved(tmp_path / "a"))
    flip(tmp_path / "a" / "decoder.fc1.weight" / "c.0.0")
    with pytest.raises(ChunkCorruptError, match=r"decoder\.fc1\.weight"):
        ckpt["decoder.fc1.weight"][0]
    assert ckpt["decoder.fc1.weight"][29, 19] == 599


WRONG = [
    (30, IndexRangeError, "index 30 is out of range for axis 0 .*shape \\(30, 20\\).*length is 30"),
    ((0, -21), IndexRangeError, "index -21 is out of range for axis 1"),
    ((0, 0, 0), IndexRangeError, "3 indices are too many"),
    ((..., ...), ArgumentError, "one ellipsis"),
    ([1, 2], ArgumentError, "give integers, slices"),
    (True, ArgumentError, "is not an index"),
    (torch.tensor([1]), ArgumentError, "is not an index"),
    (torch.tensor(True), ArgumentError, "is not an index"),
    (None, ArgumentError, "is not an index"),
    (1.0, ArgumentError, "is not an index"),
    (slice(None, None, 0), ArgumentError, "is not an index"),
]


@pytest.mark.parametrize(("index", "error", "text"), WRONG, ids=lambda value: str(value)[:20])
def test_wrong_indices(place: Path, index: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        shardstore.open(place)["decoder.fc1.weight"][index]


def index_of(data: st.DataObject, shape: tuple[int, ...]) -> tuple[Any, ...]:
    ends = st.one_of(st.none(), st.integers(-9, 9))
    steps = st.one_of(st.none(), st.integers(-4, 4).filter(bool))
    parts: list[Any] = [
        data.draw(
            st.one_of(st.builds(slice, ends, ends, steps), *([st.integers(-n, n - 1)] if n else []))
        )
        for n in shape
    ]
    cut = data.draw(st.integers(0, len(parts)))
    if data.draw(st.booleans()):
        more = data.draw(st.integers(cut, len(parts)))
        return (*parts[:cut], ..., *parts[more:])
    return tuple(parts[:cut])


@given(st.data())
def test_slices_are_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    chunks = tuple(data.draw(st.integers(1, max(1, n))) for n in shape)
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    if key := data.draw(st.sampled_from(["", "w"])):
        root = tmp_path_factory.mktemp("numpy")
        strategy = ZarrSaveShardedStrategy(
            "zarr", 2, target_chunk_bytes=data.draw(st.integers(1, 60))
        )
        tensor = torch.from_numpy(whole)
        shardstore.save({key: ShardedTensor.from_rank_offsets(key, tensor)}, root, strategy)
    else:
        root, key = tmp_path_factory.mktemp("numpy") / "x", "x"
        zarr.create_array(root, data=whole, chunks=chunks)
    array = shardstore.open(root)[key]
    for _ in range(5):
        index = index_of(data, shape)
        found, expected = array[index], whole[index]
        assert type(found) is type(expected)
        assert np.array_equal(found, expected), index


@pytest.mark.parametrize(("zarr_format", "store"), [(2, "folder"), (3, "folder"), (3, "memory")])
def test_zarr_of_other_programs(tmp_path: Path, zarr_format: Any, store: str) -> None:
    url = str(tmp_path / "data.zarr") if store == "folder" else memory_url()
    group = zarr.open_group(url, mode="w", zarr_format=zarr_format, attributes={"title": "t"})
    group.create_array("a/b", data=np.arange(12.0).reshape(3, 4), chunks=(2, 3))
    group["a/b"].attrs["unit"] = "m"
    filled = group.create_array("filled", shape=(8,), chunks=(4,), dtype="i2", fill_value=9)
    filled[:2] = 1
    plain = group.create_array("plain", shape=(5,), dtype="i4", fill_value=3, compressors=None)
    assert plain.nchunks_initialized == 0
    ckpt = shardstore.open(url)
    assert set(ckpt) == {"a/b", "filled", "plain"}
    assert np.array_equal(ckpt["a/b"][::-1, 1:], np.arange(12.0).reshape(3, 4)[::-1, 1:])
    assert ckpt["filled"][...].tolist() == [1, 1] + [9] * 6
    assert ckpt["plain"][...].tolist() == [3] * 5
    assert ckpt["a/b"].zarr[0, 1] == 1.0
    assert ckpt["a/b"].attrs["unit"] == "m"
    assert ckpt.attrs["title"] == "t"
    assert (ckpt.common, dict(ckpt.objects)) == ({}, {})
    assert ckpt.info["written_by"] == "another program"
    assert ckpt.info["zarr_format"] == zarr_format
    alone = shardstore.open(f"{url}/filled")
    assert list(alone) == ["filled"]
    assert alone["filled"][2] == 9
    if store == "folder":
        assert ckpt["filled"].tensorstore[7].read().result() == 9


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_an_array_of_an_unknown_type(tmp_path: Path, zarr_format: Any, consolidated: bool) -> None:
    """Of another program: the others open, and its own entry raises an error."""
    group = zarr.create_group(tmp_path / "z", zarr_format=zarr_format)
    group.create_array("a", data=np.arange(4.0))
    group.create_array("when", data=np.zeros(3, "datetime64[s]"))
    group.create_array("b", data=np.ones((2, 2), "f4"))
    if consolidated:
        zarr.consolidate_metadata(tmp_path / "z", zarr_format=zarr_format)
    opened = shardstore.open(tmp_path / "z")
    assert sorted(opened) == ["a", "b"]
    assert (opened["a"][:] == np.arange(4.0)).all()
    with pytest.raises(DTypeMismatchError, match=r"when.*(datetime64|<M8)"):
        opened["when"]
    assert "not readable" in repr(opened)


@pytest.mark.parametrize("zarr_format", [1, 2, 3])
def test_an_array_whose_folder_cannot_be_read_is_not_left_out(
    tmp_path: Path, zarr_format: Any
) -> None:
    """Of Megatron-Core's backend, or of another program: the folders are its list of arrays."""
    place = folder_for_all(tmp_path / "all", 0o755) / "z"
    if zarr_format == 1:
        shardstore.save(
            shardstore.shard({"v": torch.ones(4), "w": torch.ones(4)}), place, ("zarr", 1)
        )
    else:
        group = zarr.create_group(place, zarr_format=zarr_format)
        for key in ("v", "w"):
            group.create_array(key, data=np.ones(4))
    place.chmod(0o755)
    (place / "w").chmod(0o000)
    verified = partial(verify, StoredCheckpoint(Location.of(place)), lambda _: None)
    with another_user():
        for read in (partial(shardstore.open, place), verified):
            with pytest.raises(StorageError, match=r"/w failed: Permission denied"):
                read()
    (place / "w").chmod(0o755)
    assert sorted(shardstore.open(place)) == ["v", "w"]


def test_an_object_whose_folder_cannot_be_read_is_not_missing(tmp_path: Path) -> None:
    place = folder_for_all(tmp_path / "all", 0o755) / "z"
    shardstore.save({"o": ShardedObject("o", [1], (1,), (0,))}, place)
    place.chmod(0o755)
    (place / "o").chmod(0o000)
    with another_user(), pytest.raises(StorageError, match=r"/o failed: Permission denied"):
        _ = shardstore.open(place).objects["o/shard_0_1"]
    (place / "o").chmod(0o755)


def test_without_documents_of_the_arrays(tmp_path: Path) -> None:
    array = shardstore.open(saved(tmp_path / "a", array_documents=False))["decoder.fc1.weight"]
    assert array.zarr[29, 19] == array.tensorstore[29, 19].read().result() == array[-1, -1] == 599


def test_an_absent_place_or_key_is_an_error(place: Path, tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError, match="does not exist"):
        shardstore.open(tmp_path / "nothing")
    with pytest.raises(NotACheckpointError, match="its key, scalar"):
        shardstore.open(place / "scalar")


@pytest.mark.parametrize("store", ["memory", "s3"])
def test_a_checkpoint_in_a_store_is_opened(request: pytest.FixtureRequest, store: str) -> None:
    url, options = memory_url(), {}
    if store == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        url, options = f"s3://{server.new_bucket()}/run/step-7", server.storage_options
    ckpt = shardstore.open(saved(url, storage_options=options, compression="zstd"), options)
    weight = ckpt["decoder.fc1.weight"]
    assert weight[29, ::10].tolist() == [580, 590]
    assert weight.zarr[29, 19] == 599
    assert store == "memory" or weight.tensorstore[29, 19].read().result() == 599
    assert (ckpt.common["step"], dict(ckpt.objects)) == (7, {"rng/shard_0_1": {"seed": 1}})
    with pytest.raises(MissingKeyError, match=url):
        ckpt["v"]


def test_opening_imports_no_torch(place: Path, tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "x", data=np.arange(4))
    program = (
        "import sys, shardstore\n"
        "for place in sys.argv[1:]:\n"
        "    ckpt = shardstore.open(place)\n"
        "    assert repr(ckpt) and 'numpy' not in sys.modules or ckpt.is_foreign\n"
        "    assert list(ckpt.objects) is not None and ckpt.info and ckpt.attrs is not None\n"
        "    [(a[...], a.attrs, a.zarr, a.tensorstore, repr(a)) for a in ckpt.values()]\n"
        "assert 'torch' not in sys.modules\n"
    )
    words = [sys.executable, "-c", program, str(place), str(tmp_path / "x")]
    done = run_to_end(words)
    assert done.returncode == 0, done.stderr


def test_sizes_of_files_are_read_once_for_all_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {str(i): ShardedObject(f"o{i}", i, (1,), (0,)) for i in range(3)}
    shardstore.save(state, tmp_path / "a")
    calls: list[Any] = []
    made = documents.RootDocument.__post_init__

    def counted(root: documents.RootDocument) -> None:
        calls.append(root)
        made(root)

    monkeypatch.setattr(documents.RootDocument, "__post_init__", counted)
    assert sorted(shardstore.open(tmp_path / "a").objects.values()) == [0, 1, 2]
    assert len(calls) == 1


def test_statistics_of_parts_are_those_of_all_values() -> None:
    parts = [sums_of([np.ones(4)]), sums_of([]), sums_of([np.zeros(2), np.full(2, 5.0)])]
    found = Statistics.of(parts)
    assert (found.count, found.mean, found.zeros, found.max) == (8, 1.75, 2, 5.0)
