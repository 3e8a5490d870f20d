"""One rank fails in a save, at any of its steps, or asks a load for what can not be loaded: all
hear of it at once, and the next save or load works.

With flattened ranges in the state ranks meet once more before they write: a rank that fails before
that meeting must neither be waited for nor put the meetings after it out of step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedObject, ShardedTensor
from shardstore.distributed.coordinator import DEADLINE_VARIABLE
from shardstore.errors import CheckpointingException, MissingKeyError, RanksError
from shardstore.saving.plan import fetched
from shardstore.storage.movers.chunks import Source
from shardstore.strategies.common import TorchCommonSaveStrategy
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.scenarios import raised, remains_of_all

WORLD = 2
TIMEOUT_S = 280
DEADLINE_S = 600
"""Longer than any test here may take: whoever waits for it fails the test."""


class Fails(Exception):  # noqa: N818
    pass


def failing(kind: type[Any], text: str, *methods: str) -> type[Any]:
    """A strategy of which some methods fail."""

    def fails(*_: Any, **__: Any) -> Any:
        raise Fails(text)

    return type(kind.__name__, (kind,), dict.fromkeys(methods, fails))


CommonFails = failing(TorchCommonSaveStrategy, "common", "save_common")
ObjectsFail = failing(TorchCommonSaveStrategy, "objects", "save_sharded_objects")
StrategyFails = failing(ZarrSaveShardedStrategy, "strategy", "_plan")
Wraps = failing(ZarrSaveShardedStrategy, "wrapper", "save", "async_save")
"""Fails before the strategy that it wraps is called."""


class SourceFails(ZarrSaveShardedStrategy):
    """A tensor can not be read when its turn comes, as after an error of its device: of pieces of
    chunks that ranks exchange, where there are any."""

    def _plan(self, *args: Any) -> Any:
        def unreadable() -> Any:
            raise Fails("source")

        plan = super()._plan(*args)
        plan.cut = [replace(cut, local=dict.fromkeys(cut.local, unreadable)) for cut in plan.cut]
        if not plan.cut:
            plan.writes = [replace(write, source=unreadable) for write in plan.writes]
        return plan


class SourceFallsShort(ZarrSaveShardedStrategy):
    """A piece of a chunk is an element shorter than was announced."""

    def _plan(self, *args: Any) -> Any:
        plan = super()._plan(*args)
        plan.cut = [replace(cut, local=_without_last(cut.local)) for cut in plan.cut]
        return plan


def _without_last(local: dict[int, Source]) -> dict[int, Source]:
    return {start: fetched(source).reshape(-1)[:-1] for start, source in local.items()}


class PiecesFailFirst(SourceFails):
    """A piece of a chunk cannot be read, and a chunk of its own cannot be written after that."""

    def _plan(self, *args: Any) -> Any:
        def unwritable() -> Any:
            raise Fails("chunk")

        plan = super()._plan(*args)
        plan.writes = [replace(write, source=unwritable) for write in plan.writes]
        return plan


def unpicklable(rank: int) -> dict[str, Any]:
    return {"o": ShardedObject("o", (lambda: 0), (WORLD,), (rank,))}


FAILURES: dict[str, dict[str, Callable[[], Any]]] = {
    "common": {"common_strategy": lambda: CommonFails("torch", 1)},
    "objects": {"common_strategy": lambda: ObjectsFail("torch", 1)},
    "plan": {"sharded_strategy": lambda: StrategyFails("zarr", 2)},
    "source": {"sharded_strategy": lambda: SourceFails("zarr", 2)},
    "wrapper": {"sharded_strategy": lambda: Wraps("zarr", 2)},
    "an object that does not pickle": {},
}


def state(rank: int, flat: bool) -> dict[str, Any]:
    part = slice(0, 500) if rank == 0 else slice(500, 1024)
    out: dict[str, Any] = {
        "o": ShardedObject("o", rank, (WORLD,), (rank,)),
        "w": ShardedTensor.from_rank_offsets("w", torch.full((4,), float(rank)), (0, rank, WORLD)),
        "step": 1,
    }
    if flat:
        out["f"] = ShardedTensor.from_rank_offsets_flat(
            "f", torch.arange(1024.0)[part].clone(), (32, 32), flattened_range=part
        )
    return out


def save(
    rank: int, place: Path, flat: bool, asynchronous: bool, budget: int | None = None, **how: Any
) -> None:
    saved = {**state(rank, flat), **how.pop("more", {})}
    if asynchronous:
        request = shardstore.save(
            saved, place, async_sharded_save=True, staging_budget_bytes=budget, **how
        )
        request.execute_sync()
    else:
        shardstore.save(saved, place, **how)


WAYS: tuple[tuple[bool, int | None], ...] = ((False, None), (True, None), (True, 1))
"""Whether a save is asynchronous, and its staging memory."""


CASES = list(product((True, False), range(len(WAYS)), range(len(FAILURES)), range(WORLD)))
"""Whether the state has flattened ranges, and the numbers of the way, the failure and the rank."""


def failure_of(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


def all_are_told_and_the_next_save_works(rank: int, folder: Path) -> None:
    os.environ[DEADLINE_VARIABLE] = str(DEADLINE_S)
    for case in CASES:
        flat, way, failure, victim = case
        name, made = list(FAILURES.items())[failure]
        how = {key: make() for key, make in made.items()} or {"more": unpicklable(rank)}
        own = how if rank == victim else {}
        error = failure_of(partial(save, rank, folder / f"{case}", flat, *WAYS[way], **own))
        is_ours = isinstance(error, CheckpointingException)
        assert is_ours or rank == victim, (name, case, error)
        assert not (is_ours and made) or f"rank {victim}: Fails: " in str(error), (name, case)
        save(rank, folder / f"{case}-good", flat, *WAYS[way])
    assert remains_of_all(folder) == sorted(f"{case}-good" for case in CASES)


def what_is_told_of_pieces_that_ranks_exchange(rank: int, world_size: int, folder: Path) -> None:
    os.environ[DEADLINE_VARIABLE] = str(DEADLINE_S)
    cases = (
        (SourceFallsShort("zarr", 2), "source", "key 'f', chunk (", "announced"),
        (PiecesFailFirst("zarr", 2), "chunk", "source", "Fails"),
    )
    for number, (strategy, unexpected, *expected) in enumerate(cases):
        for victim in range(world_size):
            how = {"sharded_strategy": strategy} if rank == victim else {}
            place = folder / f"{number}-{victim}"
            said = repr(failure_of(partial(save, rank, place, True, False, **how)))
            assert all(word in said for word in expected), said
            assert unexpected not in said
    save(rank, folder / "good", True, False)
    assert remains_of_all(folder) == ["good"]


WRONG_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"keys": ["typo"]}, "key 'typo' is not in the checkpoint"),
    "one key": ({"keys": "w"}, "keys='w' must be a list of keys"),
    "no key": ({"keys": [["w"]]}, "unhashable type"),
    "step": ({"region": [slice(0, 2, 2)]}, "without steps"),
    "bound": ({"region": [slice("a")]}, "slices of whole numbers"),
    "options": ({"storage_options": ["x"]}, "storage_options must be a dict"),
    "device": ({"map_location": "meta"}, "map_location='meta'"),
    "empty place": ({"checkpoint_dir": ""}, "empty"),
    "no place": ({"checkpoint_dir": "nowhere"}, "nowhere does not exist"),
    "damaged place": ({"checkpoint_dir": "damaged"}, "damaged"),
}


def all_are_told_of_parts_that_can_not_be_loaded(rank: int, folder: Path) -> None:
    os.environ[DEADLINE_VARIABLE] = str(DEADLINE_S)
    for name in ("c", "damaged"):
        save(rank, folder / name, False, False)
    if rank == 0:
        (folder / "damaged" / "zarr.json").write_text("{")
    for (name, (options, says)), victims in product(WRONG_PARTS.items(), ((0,), (1,), (0, 1))):
        how = {"checkpoint_dir": "c", "keys": ["w"], **(options if rank in victims else {})}
        how["checkpoint_dir"] = how["checkpoint_dir"] and folder / how["checkpoint_dir"]
        error = failure_of(partial(shardstore.load_plain_tensors, **how))
        about = f"{name} on rank(s) {victims}: {error!r}"
        assert says in str(error), about
        assert isinstance(error, RanksError) == (rank not in victims), about
        assert rank in victims or f"rank {victims[0]}: " in str(error), about
        loaded = shardstore.load_plain_tensors(folder / "c", keys=["w"] if rank else None)
        assert loaded["w"].tolist() == [0.0] * 4 + [1.0] * 4, about
    with pytest.raises(MissingKeyError):
        shardstore.load_plain_tensors(folder / "c", keys=["typo"])


def ranks_that_call_different_functions_are_told_so_and_can_go_on(
    rank: int, world_size: int, folder: Path
) -> None:
    os.environ[DEADLINE_VARIABLE] = str(DEADLINE_S)
    place = folder / "c"
    save(rank, place, False, False)
    calls: tuple[Callable[[], object], ...] = (
        lambda: shardstore.load(state(rank, False), place),
        lambda: save(rank, folder / "other", False, False),
        lambda: shardstore.load_plain_tensors(place, keys=["w"]),
    )
    for n, called in enumerate(calls):
        for other in calls[:n] + calls[n + 1 : 2]:
            error = raised(called if rank == 0 else other, kind=RanksError)
            assert all(f"rank {r} is " in str(error) for r in range(world_size)), error
            shardstore.load(state(rank, False), place)
            save(rank, folder / f"next-{n}-{calls.index(other)}", False, False)


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)
