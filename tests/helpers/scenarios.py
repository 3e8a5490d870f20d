"""Many short scenarios in one spawn of ranks, and what they look for.

A scenario is a function ``fn(rank, folder)`` or ``fn(rank, world_size, folder)``, run on all ranks
at a time. The first to fail ends them all: the other ranks may be waiting for the one that failed.
"""

from __future__ import annotations

import inspect
import logging
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

import pytest
import torch.distributed as dist

from shardstore.errors import CheckpointingException

Scenario = Callable[..., None]


def scenarios_of(module: dict[str, Any]) -> list[Scenario]:
    """The scenarios among the functions of a module, given its ``globals()``; those with a leading
    underscore are none."""
    arguments = ["rank", "folder"], ["rank", "world_size", "folder"]
    return [
        value
        for name, value in module.items()
        if inspect.isfunction(value)
        and value.__module__ == module["__name__"]
        and list(inspect.signature(value).parameters) in arguments
        and not name.startswith("_")
    ]


def run_scenarios(
    rank: int, world_size: int, folder: str, scenarios: Sequence[Scenario]
) -> list[str]:
    """Run each in a folder of its own; the names of those that held, which is all of them."""
    os.environ["SHARDSTORE_DEADLINE_S"] = "30"
    held = []
    for scenario in scenarios:
        place = Path(folder, scenario.__name__)
        place.mkdir(exist_ok=True)
        given = {"rank": rank, "world_size": world_size, "folder": place}
        dist.barrier()
        try:
            scenario(**{name: given[name] for name in inspect.signature(scenario).parameters})
        except Exception as error:
            error.add_note(f"in {scenario.__name__} on rank {rank}")
            raise
        held.append(scenario.__name__)
        dist.barrier()
    return held


class Records(logging.Handler):
    """Texts that were logged at WARNING or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    """What is logged at WARNING or above, by anyone, while the block runs."""
    handler = Records()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.texts
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """A file system that refuses larger files, to this process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def raised(
    call: Callable[[], object],
    *words: str,
    kind: type[CheckpointingException] | UnionType = CheckpointingException,
) -> CheckpointingException:
    """The error of ours that a call raises, of this kind and with all these words in its text."""
    with pytest.raises(CheckpointingException) as caught:
        call()
    assert isinstance(caught.value, kind), repr(caught.value)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    return caught.value


def gathered(value: Any) -> list[Any]:
    """What each rank gives, by rank; all have come when it returns."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def remains(folder: Path) -> list[str]:
    """Names in a folder, hidden ones included: what a refused save left."""
    return sorted(os.listdir(folder))


def remains_of_all(folder: Path) -> list[str]:
    """The same, once all ranks have come."""
    dist.barrier()
    return remains(folder)
