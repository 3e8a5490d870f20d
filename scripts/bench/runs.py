"""The runner: cases, and rounds in which their clients take turns.

A client that fails is noted and leaves; the others of its interpreter go on in a fresh crew.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from bench.bucket import Bucket
from bench.clients import MEGATRON
from bench.crew import ClientError, Crew
from bench.results import Results, Sample
from testing.machine import Disk

Figures: TypeAlias = dict[str, Any]
"""Measure -> seconds, or (value, unit), or a list of either."""
Action: TypeAlias = Callable[["Run", "Turn"], Figures]

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """One thing that is measured of several clients.

    Attributes:
        name: by which `--only` chooses it.
        action: measures one client once.
        clients: who takes part.
        workload: the state that the ranks hold; None: the action needs no ranks.
        worlds: numbers of ranks; None: those that the command line names.
        warmups: rounds that do not count.
        rounds: how many at most; None: as many as the command line says.
        fresh: each client has processes of its own in every round.
        latency_ms: of every request to the object store.
    """

    name: str
    action: Action
    clients: Sequence[str]
    workload: str | None = "gpt"
    worlds: tuple[int, ...] | None = None
    warmups: int = 1
    rounds: int | None = None
    fresh: bool = False
    latency_ms: int = 0


@dataclass(frozen=True)
class Turn:
    """One client's turn in a round."""

    client: str
    world: int
    crew: Crew


@cache
def python_of(client: str) -> str:
    """The interpreter of a client; makes Megatron's environment where there is none yet.

    Raises:
        ClientError: it cannot be made.
    """
    if client != MEGATRON:
        return sys.executable
    command = ["bash", str(REPOSITORY / "scripts" / "megatron_env")]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise ClientError(f"scripts/megatron_env failed: no environment for {client}")
    return str(REPOSITORY / ".envs" / "megatron" / "bin" / "python")


class Run:
    """One run of the benchmark, and what it finds.

    Attributes:
        root: an empty folder on the file system that is measured.
        store: where checkpoints go.
        options: of the command line.
        scale: factor on the size of every state, 1 for the published figures.
        results: samples, notes and failures.
    """

    def __init__(self, root: Path, store: Disk | Bucket, options: argparse.Namespace) -> None:
        self.root, self.store, self.options = root, store, options
        self.scale, self.results = options.scale, Results()
        self._crews: dict[str, Crew] = {}

    def case(self, case: Case) -> None:
        """Measure a case in all of its worlds, and judge it."""
        store, late = self.store, case.latency_ms
        with store.late(late) if late and isinstance(store, Bucket) else nullcontext():
            for world in case.worlds or self.options.ranks:
                self._rounds(case, world)
        self.store.clear()

    def _rounds(self, case: Case, world: int) -> None:
        """Every client in every round.

        What a client leaves behind (caches, discards of freed space) may slow down the next one.
        Every other round goes backwards, and each pair of rounds begins with another client: of two
        clients each is the first as often as the other.
        """
        self._names = [name for name in case.clients if name in self.options.clients]
        rounds = min(self.options.repeats, case.rounds or self.options.repeats)
        try:
            for number in range(-case.warmups, rounds):
                for name in _order(list(self._names), number):
                    if name in self._names:  # else it left with another client of its interpreter
                        self._turn(case, world, name, number)
        finally:
            self._close()

    def _turn(self, case: Case, world: int, name: str, number: int) -> None:
        try:
            crew = self._crew(case, world, name)
            if name not in self._names:
                return
            figures = case.action(self, Turn(name, world, crew))
        except ClientError as reason:
            self._leave(case, world, name, str(reason))
            self._close()
            self.store.clear()
            return
        if case.fresh:
            self._close()
        told = []
        for measure, found in figures.items():
            for value, unit in _values(found):
                told.append(f"{measure} {value / 2**20 if unit == 'bytes' else value:.3f}")
                if number >= 0:
                    sample = Sample(case.name, world, name, measure, number, value, unit)
                    self.results.samples.append(sample)
        _say(f"{case.name}, {world} rank(s), round {number + 1}, {name}: {', '.join(told)}")

    def _crew(self, case: Case, world: int, name: str) -> Any:
        """The ranks that run a client; None for a case without any."""
        if case.workload is None:
            return None
        python = python_of(name)
        if python not in self._crews:
            mine = [name] if case.fresh else self._names
            names = [one for one in mine if (one == MEGATRON) == (name == MEGATRON)]
            crew = self._crews[python] = Crew(python, world)
            crew.build(case.workload, self.scale, names, self.options.device)
            for other, reason in crew.absent.items():
                self._leave(case, world, other, f"not available: {reason}")
            self._note(f"{case.name}, {world} rank(s)", name, crew)
        return self._crews[python]

    def _note(self, at: str, name: str, crew: Crew) -> None:
        notes, setup = self.results.notes, crew.setup[0]
        notes.setdefault("settings", {}).update(setup["settings"])
        environment = "megatron" if name == MEGATRON else "shardstore"
        notes.setdefault("versions", {})[environment] = setup["versions"]
        notes.setdefault("states", {})[at] = {
            "tensors_on_rank_0": setup["tensors"],
            "bytes_written": crew.total("written_bytes"),
            "bytes_loaded": crew.total("wanted_bytes"),
        }

    def _leave(self, case: Case, world: int, name: str, reason: str) -> None:
        _say(f"{name} leaves: {reason.partition(chr(10))[0] or 'unknown'}")
        about = {"case": case.name, "world": world, "client": name, "reason": reason}
        self.results.failures.append(about)
        if name in self._names:
            self._names.remove(name)

    def _close(self) -> None:
        for crew in self._crews.values():
            crew.close()
        self._crews.clear()


def _say(text: str) -> None:
    """Tell the person who waits."""
    print(f"  {text}", file=sys.stderr, flush=True)


def _order(names: list[str], number: int) -> list[str]:
    first = number // 2 % len(names) if names else 0
    order = names[first:] + names[:first]
    return order[::-1] if number % 2 else order


def _values(found: Any) -> Iterator[tuple[float, str]]:
    for one in found if isinstance(found, list) else [found]:
        yield one if isinstance(one, tuple) else (one, "s")
