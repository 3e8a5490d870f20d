"""The runner: cases, and rounds in which their clients take turns.

A client that fails is noted and leaves; the others of its interpreter go on in a fresh crew.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from bench.clients import MEGATRON
from bench.crew import ClientError, Crew
from bench.results import Results, Sample, Target

Figures: TypeAlias = dict[str, Any]
"""Measure -> seconds, or (value, unit), or a list of either."""
Action: TypeAlias = Callable[["Run", "Turn"], Figures]

REPOSITORY = Path(__file__).resolve().parents[2]
INTERPRETERS = {MEGATRON: "megatron"}
"""Clients that need an environment of their own, made by scripts/NAME_env."""


class Store(Protocol):
    """Where checkpoints are measured."""

    def new(self, name: str) -> Path | str:
        """A place where nothing is yet."""

    def done(self, place: Path | str) -> None:
        """Nobody needs what is at the place any more."""

    def clear(self) -> None:
        """A case is over, or a client failed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that is measured of several clients.

    Attributes:
        name: by which `--only` chooses it.
        action: measures one client once.
        clients: who takes part.
        workload: the state that the ranks hold; None: the action needs no ranks.
        worlds: numbers of ranks; None: those that the command line names.
        scale: factor on the size of the state, beside the command line's.
        warmups: rounds that do not count.
        rounds: how many at most; None: as many as the command line says.
        fresh: each client has processes of its own in every round.
        targets: bounds on the figures.
        around: entered for the length of the case.
    """

    name: str
    action: Action
    clients: Sequence[str]
    workload: str | None = "gpt"
    worlds: tuple[int, ...] | None = None
    scale: float = 1.0
    warmups: int = 1
    rounds: int | None = None
    fresh: bool = False
    targets: Sequence[Target] = ()
    around: Callable[[Run], AbstractContextManager[object]] = lambda run: nullcontext()


@dataclass(frozen=True)
class Turn:
    """One client's turn in a round."""

    client: str
    number: int
    world: int
    _crew: Crew | None

    @property
    def crew(self) -> Crew:
        """The ranks."""
        assert self._crew is not None
        return self._crew


@dataclass(kw_only=True)
class Run:
    """Settings of one run of the benchmark, and what it finds.

    Attributes:
        root: an empty folder on the file system that is measured.
        store: where checkpoints go.
        repeats: rounds that count.
        scale: factor on the size of every state, 1 for the published figures.
        ranks: worlds of the cases that name none.
        clients: names of the clients to run.
        pythons: client -> interpreter, for those that need another than this one.
        device: where tensors are, "cpu" or "cuda".
        results: samples, notes and failures.
    """

    root: Path
    store: Store
    repeats: int
    scale: float
    ranks: tuple[int, ...]
    clients: tuple[str, ...]
    pythons: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    results: Results = field(default_factory=Results)

    def say(self, text: str) -> None:
        """Tell the person who waits."""
        print(text, file=sys.stderr, flush=True)

    def case(self, case: Case) -> None:
        """Measure a case in all of its worlds, and judge it."""
        with case.around(self):
            for world in case.worlds or self.ranks:
                _Rounds(self, case, world).run()
        self.store.clear()
        self.results.judge(case.name, case.targets)

    def python(self, client: str) -> str:
        """The interpreter of a client; makes its environment where there is none yet.

        Raises:
            ClientError: it cannot be made.
        """
        if client not in INTERPRETERS:
            return sys.executable
        if client not in self.pythons:
            name = INTERPRETERS[client]
            script = REPOSITORY / "scripts" / f"{name}_env"
            made = subprocess.run(["bash", script], stdout=sys.stderr, check=False)
            if made.returncode:
                raise ClientError(f"scripts/{name}_env failed: no environment for {client}")
            self.pythons[client] = str(REPOSITORY / ".envs" / name / "bin" / "python")
        return self.pythons[client]


class _Rounds:
    """The rounds of one case in one world."""

    def __init__(self, run: Run, case: Case, world: int) -> None:
        self._run, self._case, self._world = run, case, world
        self._crews: dict[str, Crew] = {}
        self._names: list[str] = []
        for name in case.clients:
            if name not in run.clients:
                continue
            try:
                run.python(name)
                self._names.append(name)
            except ClientError as reason:
                self._leave(name, str(reason))

    def run(self) -> None:
        """Every client in every round.

        What a client leaves behind (caches, discards of freed space) may slow down the next one.
        Every other round goes backwards, and each pair of rounds begins with another client: of two
        clients each is the first as often as the other.
        """
        rounds = min(self._run.repeats, self._case.rounds or self._run.repeats)
        try:
            for number in range(-self._case.warmups, rounds):
                for name in _order(list(self._names), number):
                    if name in self._names:  # else it left with another client of its interpreter
                        self._turn(name, number)
        finally:
            self._close()

    def _turn(self, name: str, number: int) -> None:
        try:
            crew = self._crew(name)
            if name not in self._names:
                return
            figures = self._case.action(self._run, Turn(name, number, self._world, crew))
        except ClientError as reason:
            self._leave(name, str(reason))
            self._close()
            self._run.store.clear()
            return
        if self._case.fresh:
            self._close()
        told = []
        for measure, found in figures.items():
            for value, unit in _values(found):
                told.append(f"{measure} {value / 2**20 if unit == 'bytes' else value:.3f}")
                if number >= 0:
                    sample = (self._case.name, self._world, name, measure, number, value, unit)
                    self._run.results.samples.append(Sample(*sample))
        at = f"{self._case.name}, {self._world} rank(s), round {number + 1}"
        self._run.say(f"  {at}, {name}: {', '.join(told)}")

    def _crew(self, name: str) -> Crew | None:
        if self._case.workload is None:
            return None
        python = self._run.python(name)
        if python not in self._crews:
            mine = [name] if self._case.fresh else self._names
            names = [other for other in mine if self._run.python(other) == python]
            crew = self._crews[python] = Crew(python, self._world)
            scale = self._run.scale * self._case.scale
            crew.build(self._case.workload, scale, names, self._run.device)
            for other, reason in crew.absent.items():
                self._leave(other, f"not available: {reason}")
            self._note(name, crew)
        return self._crews[python]

    def _note(self, name: str, crew: Crew) -> None:
        notes, setup = self._run.results.notes, crew.setup[0]
        notes.setdefault("settings", {}).update(setup["settings"])
        interpreter = INTERPRETERS.get(name, "shardstore")
        notes.setdefault("versions", {})[interpreter] = setup["versions"]
        notes.setdefault("states", {})[f"{self._case.name}, {self._world} rank(s)"] = {
            "tensors_on_rank_0": setup["tensors"],
            "bytes_written": crew.total("written_bytes"),
            "bytes_loaded": crew.total("wanted_bytes"),
        }

    def _leave(self, name: str, reason: str) -> None:
        line = (reason.splitlines() or ["unknown"])[0]
        self._run.say(f"  {name} leaves: {line}")
        self._run.results.failures.append(
            {"case": self._case.name, "world": self._world, "client": name, "reason": reason}
        )
        if name in self._names:
            self._names.remove(name)

    def _close(self) -> None:
        for crew in self._crews.values():
            crew.close()
        self._crews.clear()


def _order(names: list[str], number: int) -> list[str]:
    first = number // 2 % len(names) if names else 0
    order = names[first:] + names[:first]
    return order[::-1] if number % 2 else order


def _values(found: Any) -> Iterator[tuple[float, str]]:
    for one in found if isinstance(found, list) else [found]:
        yield one if isinstance(one, tuple) else (one, "s")
