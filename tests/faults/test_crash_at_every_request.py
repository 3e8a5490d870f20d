"""A process that dies at any request of a save in place, or of a deletion, leaves the old
checkpoint, the new one or none: never a mixed one, and nothing that hinders the next."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import shardstore
from shardstore.errors import NotACheckpointError, StorageError
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.storage.commit import objects as object_commit
from shardstore.strategies.zarr import ZarrSaveShardedStrategy

ROOT = "mortal://runs"
PLACE = f"{ROOT}/step-1"


class Killed(BaseException):
    """The process is dead: nothing that it still tries has an effect."""


class MortalFileSystem(MemoryFileSystem):
    """A store in memory that lets so many requests through, and then none any more."""

    protocol = "mortal"
    store: ClassVar[dict[str, Any]] = {}
    left: ClassVar[int | None] = None
    kept: ClassVar[str | None] = None
    """End of the name of an object that it refuses to delete."""

    @classmethod
    def request(cls) -> None:
        if cls.left is None:
            return
        if cls.left <= 0:
            raise Killed
        cls.left -= 1

    def _open(self, *args: Any, **kwargs: Any) -> Any:
        self.request()
        return super()._open(*args, **kwargs)

    def pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        self.request()
        return super().pipe_file(*args, **kwargs)

    def rm_file(self, *args: Any, **kwargs: Any) -> None:
        self.request()
        if self.kept is not None and args[0].endswith(self.kept):
            raise PermissionError(args[0])
        super().rm_file(*args, **kwargs)

    def ls(self, *args: Any, **kwargs: Any) -> Any:
        self.request()
        return super().ls(*args, **kwargs)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(object_commit, "SETTLE_S", 0.0)
    fsspec.register_implementation("mortal", MortalFileSystem, clobber=True)
    yield
    MortalFileSystem.kept = None
    put_back({})


def put_back(objects: dict[str, Any]) -> None:
    """Have the store hold these objects, for a process that lives."""
    MortalFileSystem.left = None
    MortalFileSystem.store.clear()
    MortalFileSystem.store.update(objects)
    MortalFileSystem.pseudo_dirs[:] = [""]


WAYS: list[dict[str, bool]] = [{}, {"array_documents": False}, {"pack": True}]


def whole_of(version: int) -> torch.Tensor:
    return torch.arange(48.0).reshape(6, 8) + 100 * version


def state(version: int) -> dict[str, Any]:
    whole = whole_of(version)
    return {
        "w": ShardedTensor.from_rank_offsets("w", whole),
        f"only-{version}": ShardedTensor.from_rank_offsets(f"only-{version}", whole[0].clone()),
        "o": ShardedObject("o", {"version": version}, (1,), (0,)),
        "step": version,
    }


def save(version: int, **options: Any) -> None:
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=64)
    shardstore.save(state(version), PLACE, strategy, **options)


def version_of(place: str | Path, *, is_reduced: bool = False) -> int | None:
    """The version that is there, every value of it, or all but a removed array."""
    try:
        loaded = shardstore.load_plain_tensors(place)
    except NotACheckpointError:
        return None
    found: int = loaded["step"]
    assert torch.equal(loaded["w"], whole_of(found))
    only = [key for key in loaded if key.startswith("only-")]
    assert only == [f"only-{found}"] or (is_reduced and only == [])
    asked: Any = shardstore.load({"o": state(0)["o"]}, place)
    assert asked["o"] == {"version": found}
    return found


def version() -> int | None:
    return version_of(PLACE)


def deaths(prepare: Callable[[], None], work: Callable[[], None]) -> Iterator[int]:
    """Do it again and again, each time with one request more before the death."""
    put_back({})
    prepare()
    before = dict(MortalFileSystem.store)
    for requests in itertools.count():
        put_back(before)
        MortalFileSystem.left = requests
        try:
            work()
        except Killed:
            MortalFileSystem.left = None
            yield requests
        else:
            MortalFileSystem.left = None
            assert requests >= 4
            return


def names() -> set[str]:
    """Objects of the checkpoint."""
    return {path.rpartition("/step-1/")[2] for path in MortalFileSystem.store}


def folders() -> set[str]:
    return {name.partition("/")[0] for name in names() if "/" in name}


@pytest.mark.parametrize(("old", "new"), [(0, 1), (1, 2), (2, 0), (2, 2)])
def test_overwriting_in_place(old: int, new: int) -> None:
    """With and without documents of the arrays, and with packs, which keep their names."""
    seen = []
    for _ in deaths(lambda: save(1, **WAYS[old]), lambda: save(2, overwrite=True, **WAYS[new])):
        seen.append(version())
        save(3, overwrite=True)
        assert version() == 3
        assert folders() == {"w", "only-3", "o"}
    # The old one, then for a while none, then the new one.
    assert seen == sorted(seen, key=[1, None, 2].index)
    assert set(seen) == {1, None, 2}
    assert version() == 2


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_first_save_that_dies_is_whole_or_invisible(way: dict[str, bool]) -> None:
    for _ in deaths(lambda: None, lambda: save(2, **way)):
        found = version()
        assert found in (None, 2)
        shardstore.sweep(ROOT, older_than=timedelta(0), dry_run=False)
        assert version() == found
        if found is None:
            assert MortalFileSystem.store == {}
            save(3)
            assert version() == 3


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_deletion_that_dies_can_be_repeated(way: dict[str, bool]) -> None:
    for _ in deaths(lambda: save(1, **way), lambda: shardstore.delete_checkpoint(PLACE)):
        found = version()
        assert found in (1, None)
        shardstore.sweep(ROOT, older_than=timedelta(0), dry_run=False)
        assert version() == found
        if found is None:
            assert MortalFileSystem.store == {}
    assert MortalFileSystem.store == {}


@pytest.mark.parametrize("documents", [True, False])
def test_a_store_that_refuses_a_deletion(documents: bool) -> None:
    """The save that clears the target gives up and takes its claim back; what it left is known."""
    save(1, array_documents=documents)
    MortalFileSystem.kept = "/only-1/c.0"
    with pytest.raises(StorageError):
        save(2, overwrite=True)
    assert not any(".attempts" in path for path in MortalFileSystem.store)
    MortalFileSystem.kept = None
    save(3, overwrite=True)
    assert version() == 3
    assert folders() == {"w", "only-3", "o"}


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_a_removal_of_tensors_without_documents(way: dict[str, bool]) -> None:
    """What is left of them when it dies goes with the checkpoint, or when it is asked for again."""
    for number, _ in enumerate(
        deaths(lambda: save(1, **way), lambda: shardstore.remove_sharded_tensors(PLACE, "only"))
    ):
        if number % 2:
            shardstore.remove_sharded_tensors(PLACE, "only")
            assert not any(name.startswith("only") for name in names())
        shardstore.delete_checkpoint(PLACE)
        assert MortalFileSystem.store == {}
    assert folders() == ({".packs", "o"} if "pack" in way else {"w", "o"})
