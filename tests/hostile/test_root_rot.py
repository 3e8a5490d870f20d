"""Rot in the root document: a flipped bit is an error, or it changes nothing that anybody reads."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import CheckpointManager, ShardedObject
from shardstore.convert.conversion import convert
from shardstore.errors import CheckpointingException, DamagedCheckpointError
from shardstore.inspection.values import measure
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.checkpoints import delete_checkpoint
from shardstore.storage.format.documents import ROOT_SUM, parse_root
from shardstore.storage.stores.location import Location
from tests.golden.make_shardstore import TARGET as GOLDEN
from tests.golden.make_shardstore import sharded
from tests.golden.test_shardstore_golden import exact
from tests.helpers.root_documents import about, members, rewrite
from tests.helpers.verification import findings

pytestmark = pytest.mark.filterwarnings("ignore")

W = torch.arange(24, dtype=torch.float32).reshape(4, 6)
STATE = {"w": W, "b": torch.ones(3, dtype=torch.bfloat16), "none": torch.zeros(0, 2)}
OPENING = b'{"zarr_format":3,"node_type":"group","attributes":{"shardstore":{"root_crc32c":"'


def state_of(*, empty: bool = False) -> dict[str, Any]:
    fill = torch.zeros_like if empty else torch.clone
    tensors = {key: fill(value) for key, value in STATE.items()}
    rng = ShardedObject("o", None if empty else [1], (1,), (0,))
    return {**shardstore.shard(tensors), "o": rng}


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    state, about = {**state_of(), "lr": 0.5}, {"run": "é"}
    shardstore.save(state, tmp_path / "c", content_metadata=about, pack=request.param)
    return tmp_path / "c"


def load(place: Path) -> Any:
    return exact(shardstore.load(state_of(empty=True), place))


def load_all(place: Path) -> Any:
    return exact(shardstore.load_plain_tensors(place))


def look(place: Path) -> Any:
    """What is open to everybody who looks into a checkpoint."""
    found = shardstore.open(place)
    arrays = {key: (found[key][...].tobytes(), found.metas[key]) for key in found}
    about = exact(found.common), found.content_metadata, found.info["commit"]
    return arrays, *about, {key: found.objects[key] for key in found.objects}


def stats(place: Path) -> Any:
    found = shardstore.open(place)
    statistics, damage = measure([found[key] for key in found])
    if damage:
        raise DamagedCheckpointError(f"stats: {damage}")
    return {key: asdict(one) for key, one in statistics.items()}


def convert_it(place: Path) -> Any:
    target = place.parent / "converted"
    try:
        convert(place, target)
        return load_all(target), sorted(shardstore.open(target).objects)
    finally:
        for left in place.parent.glob("*converted*"):
            shutil.rmtree(left)


def is_damaged(place: Path) -> bool:
    try:
        return any(finding.severity == "damage" for finding in findings(place))
    except CheckpointingException:
        return True


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    data = path.read_bytes()
    rotten = bytearray(data)
    rotten[bit // 8] ^= 1 << bit % 8
    path.write_bytes(rotten)
    try:
        yield
    finally:
        path.write_bytes(data)


def answer(read: Callable[[Path], Any], place: Path) -> Any:
    """What a reader gives; ``None`` for an error of ours."""
    try:
        return read(place)
    except CheckpointingException:
        return None


def bits_of(path: Path, count: int) -> list[int]:
    """Bits spread over a document, and over its beginning, where its form is told."""
    bits = range(8 * path.stat().st_size)
    times = 20 if os.environ.get("SHARDSTORE_TESTS") == "all" else 1
    every = random.Random(times)
    return every.sample(bits[:800], count // 4) + every.sample(bits, min(count * times, len(bits)))


def test_every_flip_fails_the_checksum_or_changes_nothing(saved: Path) -> None:
    text = (saved / "zarr.json").read_bytes()
    pristine = parse_root(text, "x")
    told = 0
    for bit in range(8 * len(text)):
        rotten = bytearray(text)
        rotten[bit // 8] ^= 1 << bit % 8
        try:
            parsed = parse_root(bytes(rotten), "x")
        except CheckpointingException as error:
            told += isinstance(error, DamagedCheckpointError)
            continue
        # The name of the checksum itself, or what says that the attributes are ours, which a
        # checkpoint with a metadata.json must have.
        assert bit < 8 * len(OPENING)
        if parsed.format_version is None:
            with flipped(saved / "zarr.json", bit), pytest.raises(DamagedCheckpointError):
                _ = StoredCheckpoint(Location.of(saved)).root
        else:
            assert parsed.arrays() == pristine.arrays()
    assert told == 8 * (len(text) - len(OPENING))


@pytest.mark.parametrize(
    ("read", "count"), [(load, 80), (load_all, 80), (look, 60), (stats, 40), (convert_it, 12)]
)
def test_every_reader_meets_it(saved: Path, read: Callable[[Path], Any], count: int) -> None:
    pristine = read(saved)
    root = saved / "zarr.json"
    for bit in bits_of(root, count):
        with flipped(root, bit):
            found = answer(read, saved)
            assert found is None or found == pristine, root.read_bytes()[bit // 8 - 30 :][:60]
            assert found is not None or is_damaged(saved)


@pytest.mark.parametrize("name", ["plain", "objects", "no-array-documents", "early"])
def test_without_a_checksum_verify_finds_what_changes_a_load(tmp_path: Path, name: str) -> None:
    place = tmp_path / "c"
    shutil.copytree(GOLDEN / name, place)
    root = place / "zarr.json"
    assert ROOT_SUM.encode() not in root.read_bytes()
    assert not is_damaged(place)

    def read(place: Path) -> Any:
        return load_all(place), sorted(shardstore.open(place).objects)

    pristine, converted = read(place), convert_it(place)
    harmless = 0
    for number, bit in enumerate(bits_of(root, 60)):
        with flipped(root, bit):
            same = answer(read, place) == pristine
            harmless += same
            assert same or is_damaged(place), root.read_bytes()[bit // 8 - 30 :][:60]
            if number % 10 == 0:
                assert answer(convert_it, place) in (converted, None)
    assert harmless


def test_without_a_checksum_a_manager_goes_back(tmp_path: Path) -> None:
    """It restores the step before, or exactly what was saved, and never raises."""
    for step in (6, 7):
        shutil.copytree(GOLDEN / "steps" / "step-7", tmp_path / "run" / f"step-{step}")
    root = tmp_path / "run" / "step-7" / "zarr.json"
    wanted = sharded("steps/step-7", empty=True)
    manager = CheckpointManager(tmp_path / "run")
    first = manager.restore(wanted)
    assert first is not None
    steps = []
    for bit in bits_of(root, 80):
        with flipped(root, bit):
            found = manager.restore(sharded("steps/step-7", empty=True))
        assert exact({key: found.state[key] for key in wanted}) == exact(
            {key: first.state[key] for key in wanted}
        )
        steps.append(found.step)
    assert {6, 7} == set(steps)


# -- what rot and other programs may leave ---------------------------------------------------------


def a_group(root: dict[str, Any]) -> None:
    members(root)["b"]["node_type"] = "group"


def one_key_twice(root: dict[str, Any]) -> None:
    members(root)["b"]["attributes"]["shardstore"]["key"] = "w"


def an_array_less(root: dict[str, Any]) -> None:
    members(root).pop("b")


def a_file_that_is_not_there(root: dict[str, Any]) -> None:
    about(root)["file_crc32c"]["o/shard_1_2.pt"] = 7


@pytest.mark.parametrize("sign", [True, False])
@pytest.mark.parametrize(
    "change", [a_group, one_key_twice, an_array_less, a_file_that_is_not_there]
)
def test_damage_for_every_reader(saved: Path, change: Any, sign: bool) -> None:
    rewrite(saved, change, sign=sign)
    readers = [load, load_all, look, stats, convert_it]
    if change is a_file_that_is_not_there:
        readers = [look, convert_it]  # the others do not ask for it
        wanted = {"o": ShardedObject("o", None, (2,), (1,))}
        with pytest.raises(DamagedCheckpointError, match=r"shard_1_2\.pt is missing"):
            shardstore.load(wanted, saved, validate_access_integrity=False)
    for read in readers:
        with pytest.raises(DamagedCheckpointError, match="load an earlier"):
            read(saved)
    assert is_damaged(saved)
    delete_checkpoint(saved)
    assert not saved.exists()


def test_a_lost_object_is_a_reason_to_go_back(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, {**state_of(), "lr": step})
    manager.wait()
    (tmp_path / "step-2" / "o" / "shard_0_1.pt").unlink()
    found = manager.restore(state_of(empty=True))
    assert (found.step, found.state["lr"], found.damaged) == (1, 1, (2,))


def test_a_root_that_another_program_wrote_anew_is_read(saved: Path) -> None:
    """As zarr does for an attribute: the checksum is of the bytes, and holds no longer."""
    zarr = pytest.importorskip("zarr")
    pristine = load(saved)
    zarr.open_group(saved, mode="r+").attrs["note"] = "the good one"
    assert ROOT_SUM in (saved / "zarr.json").read_text()
    root = StoredCheckpoint(Location.of(saved)).root
    assert (root.is_rewritten, root.is_summed) == (True, False)
    assert load(saved) == pristine
    assert not is_damaged(saved)
    shardstore.remove_sharded_tensors(str(saved), "b")
    root = StoredCheckpoint(Location.of(saved)).root
    assert root.is_summed
    assert root.attributes["note"] == "the good one"


@pytest.mark.parametrize("lost", [True, False])
def test_content_metadata_of_version_0_1_0(tmp_path: Path, lost: bool) -> None:
    """Its root has no checksum, but ``common.pt`` has the same content metadata."""
    shutil.copytree(GOLDEN / "plain", tmp_path / "c")
    assert not is_damaged(tmp_path / "c")
    convert_it(tmp_path / "c")
    text = (tmp_path / "c" / "zarr.json").read_bytes()
    change = (b'"content_metadata"', b'"content_metadatb"') if lost else (b":7,", b":3,")
    (tmp_path / "c" / "zarr.json").write_bytes(text.replace(*change, 1))
    assert [one.kind for one in findings(tmp_path / "c")] == ["common-damaged"]
    with pytest.raises(DamagedCheckpointError, match="content_metadata"):
        convert_it(tmp_path / "c")


def test_the_checksum_is_as_the_format_says(saved: Path) -> None:
    """Told from the bytes alone, as another implementation would."""
    text = (saved / "zarr.json").read_bytes()
    assert text.startswith(OPENING)
    digits, rest = text[len(OPENING) :][:8], text[len(OPENING) + 8 :]
    crc = 0xFFFFFFFF
    for byte in rest:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    assert digits == b"%08x" % (crc ^ 0xFFFFFFFF)
