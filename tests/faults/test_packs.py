"""Packs that are damaged, lost or lied about, and arrays that leave them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

import shardstore
from shardstore import CheckpointManager
from shardstore.cli.app import run
from shardstore.errors import (
    ChunkCorruptError,
    ChunkMissingError,
    DamagedCheckpointError,
    NotACheckpointError,
    StorageError,
)
from shardstore.strategies.zarr import ZarrLoadShardedStrategy
from tests.helpers.cli_checkpoints import flip
from tests.helpers.root_documents import about, rewrite
from tests.helpers.verification import verified

STATE = {
    **{f"layer.{i}": torch.arange(8.0) + i for i in range(20)},
    ".packs": torch.arange(3),  # a name like any other
    f"layer.{'n' * 300}": torch.arange(3),  # the name of its node is another one
    "step": torch.tensor(3),
}


def empty(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return shardstore.shard({key: torch.zeros_like(value) for key, value in state.items()})


def check(place: Path, state: dict[str, torch.Tensor]) -> None:
    found = shardstore.load(empty(state), place)
    for key, value in state.items():
        assert torch.equal(found[key], value), key


@pytest.fixture
def place(tmp_path: Path) -> Path:
    shardstore.save(shardstore.shard(STATE), tmp_path / "c", pack=True)
    return tmp_path / "c"


def chunk_at(place: Path, key: str) -> tuple[Path, int, int]:
    meta = shardstore.open(place).metas[key]
    name, first, last = meta.places.of(0)
    return place / name, first, last


def test_a_flipped_byte_is_found_by_key(place: Path) -> None:
    pack, first, _ = chunk_at(place, "layer.7")
    flip(pack, first + 2)
    with pytest.raises(ChunkCorruptError, match=r"'layer\.7'.*\.packs/0\.0\.zip") as caught:
        shardstore.load(empty(STATE), place)
    assert (caught.value.key, caught.value.chunk) == ("layer.7", (0,))
    check(place, {key: value for key, value in STATE.items() if key != "layer.7"})
    result, found = verified(place, hashes=True)
    assert {(one.kind, one.key) for one in found} == {
        ("pack-damaged", None),
        ("chunk-crc", "layer.7"),
    }
    assert not result.ok
    assert run(["verify", str(place)]) == 1


def test_a_flipped_byte_between_the_chunks_is_found_by_a_verification(place: Path) -> None:
    pack, first, _ = chunk_at(place, "layer.7")
    flip(pack, first - 1)  # in the name of a member, which no load reads
    check(place, STATE)
    assert [one.kind for one in verified(place, hashes=True)[1]] == ["pack-damaged"]


@pytest.mark.parametrize("left", [0, 300])
def test_a_short_pack_is_an_error_for_the_keys_behind_its_end(place: Path, left: int) -> None:
    pack, *_ = chunk_at(place, "layer.0")
    pack.write_bytes(pack.read_bytes()[:left])
    with pytest.raises(ChunkCorruptError, match="bytes"):
        shardstore.load(empty(STATE), place)
    lost = {one.key for one in verified(place, hashes=True)[1] if one.kind == "chunk-size"}
    behind = {key for key in STATE if key != "step" and chunk_at(place, key)[2] > left}
    assert lost == behind


def test_a_lost_pack_is_an_error_for_each_of_its_keys(place: Path) -> None:
    chunk_at(place, "layer.0")[0].unlink()
    with pytest.raises(ChunkMissingError, match=r"'.*'.* lies in a pack that is missing"):
        shardstore.load(empty(STATE), place)
    found = verified(place, hashes=True)[1]
    assert {one.key for one in found if one.key} == STATE.keys() - {"step"}
    assert "file-missing" in {one.kind for one in found}


def test_two_exchanged_packs_are_noticed(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for number, place in enumerate(places):
        state = {key: value + number for key, value in STATE.items()}
        shardstore.save(shardstore.shard(state), place, pack=True)
    shutil.copy(places[1] / ".packs/0.0.zip", places[0] / ".packs/0.0.zip")
    with pytest.raises(ChunkCorruptError, match="not the chunk that was committed"):
        shardstore.load(empty(STATE), places[0])


def set_row(at: int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(packs: dict[str, Any]) -> None:
        packs["arrays"]["layer.3"][at] = value

    return change


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a pack outside": lambda packs: packs.update(files=["../../etc/passwd"]),
    "a pack of another name": lambda packs: packs.update(files=["layer.0/c.0"]),
    "no packs": lambda packs: packs.update(files=[]),
    "files that are a text": lambda packs: packs.update(files=7),
    "arrays that are a list": lambda packs: packs.update(arrays=[1]),
    "no row": lambda packs: packs["arrays"].update({"layer.3": 3}),
    "a short row": lambda packs: packs["arrays"]["layer.3"].pop(),
    "a node outside": lambda packs: packs["arrays"].update({"../x": packs["arrays"]["layer.3"]}),
    "an unknown type": set_row(0, "object"),
    "a shape of negative length": set_row(1, [-8]),
    "a huge shape": set_row(1, [2**62]),
    "a chunk of no length": set_row(2, [0]),
    "other axes": set_row(2, [8, 1]),
    "an unknown codec": set_row(3, "pickle"),
    "another key's name": set_row(5, "layer.4"),
    "no places": set_row(6, ""),
    "places that are no base64": set_row(6, "!"),
    "a place far behind": set_row(6, "AAAAAAAAAAAAAABAJAAAAA=="),
    "a place of gigabytes": set_row(6, "AAAAAAAAAAAAAAAA////fw=="),
    "another pack": set_row(6, "BwAAAAAAAAAAAAAAJAAAAA=="),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_document_that_lies_about_packs_is_an_error(
    place: Path, lie: Callable[[dict[str, Any]], None]
) -> None:
    rewrite(place, lambda root: lie(about(root)["packs"]), sign=True)
    with pytest.raises((DamagedCheckpointError, ChunkCorruptError, ChunkMissingError)):
        shardstore.load(empty({key: STATE[key] for key in ("layer.3", "layer.4")}), place)
    assert run(["verify", str(place)]) == 1


def test_a_compressed_chunk_is_no_larger_than_a_compressor_makes_it(tmp_path: Path) -> None:
    shardstore.save(shardstore.shard(STATE), tmp_path, pack=True, compression="zstd")
    lie = LIES["a place of gigabytes"]
    rewrite(tmp_path, lambda root: lie(about(root)["packs"]), sign=True)
    with pytest.raises(ChunkCorruptError, match="has 2147483647 bytes, not 5 to 4128"):
        shardstore.load(empty(STATE), tmp_path)


def test_a_pack_stays_while_one_array_needs_it(place: Path) -> None:
    strategy = ZarrLoadShardedStrategy()
    strategy.remove_sharded_tensors(str(place), "layer.")
    left = {key: STATE[key] for key in (".packs", "step")}
    assert set(shardstore.open(place)) == left.keys()
    check(place, left)
    result, found = verified(place, hashes=True)
    assert (result.ok, found, result.chunks) == (True, [], len(left))
    strategy.remove_sharded_tensors(str(place), ".packs")
    check(place, {"step": STATE["step"]})
    result, found = verified(place, hashes=True)
    assert result.ok
    assert found == []
    assert not (place / ".packs").exists()


def test_nothing_is_removed_behind_a_link(place: Path, tmp_path: Path) -> None:
    (place / ".packs").rename(tmp_path / "moved")
    (place / ".packs").symlink_to(tmp_path / "moved")
    with pytest.raises(StorageError, match=r"\.packs is a symbolic link"):
        ZarrLoadShardedStrategy().remove_sharded_tensors(str(place), "layer.1")
    check(place, STATE)


def test_an_array_of_another_program_with_the_name_of_a_packed_one_is_named(place: Path) -> None:
    group = zarr.open_group(place, mode="r+")
    group.create_array("layer.3", shape=(2,), dtype="f4")
    zarr.consolidate_metadata(place)
    with pytest.raises(DamagedCheckpointError, match=r"layer\.3"):
        shardstore.load(empty(STATE), place)


def test_a_packed_checkpoint_is_replaced_and_removed_whole(tmp_path: Path) -> None:
    place = tmp_path / "c"
    for pack in (True, False, True):
        shardstore.save(shardstore.shard(STATE), place, pack=pack, overwrite=True)
        check(place, STATE)
        assert (place / ".packs").exists() is pack
    (place / "notes.txt").write_text("mine")
    assert run(["rm", "--yes", str(place)]) == 0
    assert [path.name for path in place.iterdir()] == ["notes.txt"]


def test_a_base_with_packs_or_without_gives_whole_checkpoints(tmp_path: Path) -> None:
    big = {**STATE, "big": torch.randn(600_000)}
    last = None
    for number, pack in enumerate([True, True, False, True]):
        place = tmp_path / str(number)
        shardstore.save(shardstore.shard(big), place, pack=pack, base=last)
        check(place, big)
        commit = shardstore.open(place).info["commit"]
        assert (commit["reused_bytes"] > 2_000_000) is (number > 0)
        last = place
    for number in range(3):
        shutil.rmtree(tmp_path / str(number))
    check(tmp_path / "3", big)
    assert verified(tmp_path / "3", hashes=True)[0].ok


def test_a_manager_keeps_packed_steps_and_notices_a_lost_pack(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        for step in range(4):
            manager.save(step, shardstore.shard(STATE), pack=True)
        manager.wait()
        assert manager.steps() == [2, 3]
        (tmp_path / "step-3" / ".packs" / "0.0.zip").unlink()
        assert manager.restore(empty(STATE)).step == 2


def test_a_folder_with_packs_alone_is_no_checkpoint(place: Path) -> None:
    (place / "zarr.json").unlink()
    (place / "metadata.json").unlink()
    with pytest.raises(NotACheckpointError):
        shardstore.load(empty(STATE), place)
