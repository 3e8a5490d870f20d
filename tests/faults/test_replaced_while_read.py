"""A checkpoint that is replaced or deleted while it is read is not called damaged.

The moment is the opening of the n-th file of the checkpoint; what happens there is another save.
"""

from __future__ import annotations

import itertools
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.convert import convert
from shardstore.errors import NotACheckpointError
from shardstore.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from shardstore.storage.checkpoint import ReplacedError, StoredCheckpoint
from shardstore.storage.movers import files
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.verification import findings

KEYS = 4
_doing: list[Callable[[str], None]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _doing and isinstance(arguments[0], str):
        _doing[0](arguments[0])


sys.addaudithook(_hook)


@contextmanager
def at_open(folder: Path, number: int, work: Callable[[], object]) -> Iterator[list[str]]:
    """Do some work right before the n-th opening of a file below a folder; yields their names."""
    calls, names = itertools.count(), list[str]()

    def opened(path: str) -> None:
        if path.startswith(f"{folder}/"):
            names.append(path)
            if next(calls) == number:
                todo, _doing[:] = list(_doing), []
                work()
                _doing[:] = todo

    read_whole = files.read_chunk_files

    def read_chunk_files(requests: list[Any]) -> list[Any]:  # opens them in compiled code
        found = []
        for request in requests:
            _hook("open", request[:1])
            found += read_whole([request])
        return found

    _doing[:] = [opened]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "read_chunk_files", read_chunk_files)
        yield names
    _doing.clear()


def state(version: int, parts: int = 1, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {"step": version, "o": ShardedObject("o", [version], (1,), (0,))}
    for i in range(KEYS):
        part = torch.full((6 * parts, 64), float(10 * version + i)).chunk(parts)[rank].clone()
        found[f"w{i}"] = ShardedTensor.from_rank_offsets(f"w{i}", part, (0, rank, parts))

    def build(key: str, value: torch.Tensor, *_: object) -> Any:
        return {"twice": ShardedTensor.from_rank_offsets(key, 2 * value, (0, rank, parts))}

    half = torch.full((4,), float(version))
    found["f"] = ShardedTensorFactory("f", half, build, lambda parts: parts["twice"] / 2)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint of version 1."""
    save(tmp_path / "c", 1)
    return tmp_path / "c"


def save(place: Path, version: int) -> None:
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=512)
    shardstore.save(state(version), place, strategy, overwrite=True, durable=False)


def version_of(loaded: Any, parts: int = 1) -> int:
    version: int = loaded["step"]
    assert loaded["o"] == [version]
    assert torch.equal(loaded["f"], torch.full((4,), float(version)))
    for i in range(KEYS):
        assert torch.equal(loaded[f"w{i}"], torch.full((6, 64), float(10 * version + i)))
    return version


def at_each_opening(
    place: Path, read: Callable[[], object], work: Callable[[], object]
) -> Iterator[None]:
    """For each file that a reader of version 1 opens: do some work right before it is opened."""
    with at_open(place, -1, lambda: None) as names:
        read()
    assert len(names) > 12
    for moment in range(len(names)):
        save(place, 1)
        with at_open(place, moment, work):
            yield


def test_a_load_gives_the_checkpoint_that_replaced_its_own(place: Path) -> None:
    """It loads the new one, whichever it began with."""
    load = partial(shardstore.load, state(0), place)
    for _ in at_each_opening(place, load, lambda: save(place, 2)):
        assert version_of(shardstore.load(state(0), place)) == 2


def test_a_load_of_what_is_deleted(place: Path) -> None:
    load = partial(shardstore.load, state(0), place)
    for _ in at_each_opening(place, load, lambda: shutil.rmtree(place)):
        with pytest.raises(NotACheckpointError, match="does not exist"):
            shardstore.load(state(0), place)


def test_a_load_of_what_is_replaced_again_and_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = itertools.count(2)
    read = StoredCheckpoint.read

    def overtaken(*args: Any, **kwargs: Any) -> None:
        save(place, next(versions))
        read(*args, **kwargs)

    monkeypatch.setattr(StoredCheckpoint, "read", overtaken)
    with pytest.raises(ReplacedError, match="was replaced while it was read"):
        shardstore.load(state(0), place)
    assert next(versions) == 4


def test_a_verification_of_a_replaced_checkpoint_finds_no_damage(place: Path) -> None:
    verify = partial(findings, place, threads=1)
    for _ in at_each_opening(place, verify, lambda: save(place, 2)):
        assert verify() == []


@pytest.mark.parametrize("deletes", [False, True])
def test_a_conversion_of_a_replaced_checkpoint_finds_no_damage(place: Path, deletes: bool) -> None:
    def read() -> None:
        out = tempfile.mkdtemp(dir=place.parent)
        convert(place, out, target_format="dcp", verify=False)

    change = partial(shutil.rmtree, place) if deletes else partial(save, place, 2)
    for _ in at_each_opening(place, read, change):
        with suppress(NotACheckpointError, ReplacedError):
            read()


def test_an_open_checkpoint_that_is_replaced_is_an_error(place: Path) -> None:
    opened = shardstore.open(place)
    save(place, 2)
    with pytest.raises(ReplacedError, match="was replaced while it was read"):
        opened["w0"][:]
    assert opened["w0"].shape == (6, 64)
    (place / "w1" / "c.0.0").unlink()
    with pytest.raises(shardstore.errors.ChunkMissingError):
        shardstore.open(place)["w1"][:]
    place.rename(place.with_name("elsewhere"))  # as for a rank of a machine that lacks the mount
    with pytest.raises(ReplacedError, match=f"{socket.gethostname()} does not see it"):
        opened["w0"][:]


def _rank(rank: int, world_size: int, folder: Path, victim: int) -> None:
    place = folder / "c"

    def replace() -> None:
        if rank == victim:
            place.rename(folder / "old")
            (folder / "new").rename(place)

    with at_open(place / "w1", 0, replace):
        wanted = {k: v for k, v in state(0, 2, rank).items() if k.startswith("w")}
        loaded: Any = shardstore.load(wanted, place)
    assert torch.equal(loaded["w1"], torch.full((6, 64), 21.0))


@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_go_on_together(tmp_path: Path, victim: int) -> None:
    """One of them meets the replacement."""
    for name, version in (("c", 1), ("new", 2)):
        whole = {f"w{i}": torch.full((12, 64), float(10 * version + i)) for i in range(KEYS)}
        shardstore.save(shardstore.shard(whole), tmp_path / name, durable=False)
    run_ranks(_rank, 2, tmp_path, victim)
