"""Everything that was measured, and the medians and ratios that are drawn from it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any

_PLACES = ("--json", "--markdown", "--plot", "--dir", "--megatron-python", "--orbax-python")

SAVE_SYNC = "save + one sync"
SAVE = "save, no sync"
LOAD_WARM = "load, warm cache"
LOAD_COLD = "load, cold cache"


@dataclass(frozen=True)
class Sample:
    """One measured value.

    Attributes:
        case: name of the case.
        world: number of ranks.
        client: who did it.
        measure: what was measured.
        repeat: number of the round; all clients of one round ran one after the other.
        value: in the unit.
        unit: "s", "bytes", "ratio", "count" or "ms".
    """

    case: str
    world: int
    client: str
    measure: str
    repeat: int
    value: float
    unit: str = "s"


@dataclass(frozen=True)
class Verdict:
    """A figure beside the target that the project set itself; `ok` is None if not measured."""

    case: str
    target: str
    value: float | None
    ok: bool | None


def command() -> str:
    """The command line of this run, without options that name places of this machine."""
    words, given = ["scripts/benchmark"], iter(sys.argv[1:])
    for word in given:
        if word in _PLACES:
            next(given, None)
        elif word.partition("=")[0] not in _PLACES:
            words.append(word)
    return shlex.join(words)


def today() -> str:
    """The day, in UTC."""
    return datetime.now(UTC).date().isoformat()


@dataclass
class Results:
    """Samples, notes on how they were taken, and what failed."""

    samples: list[Sample] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=lambda: {"command": command(), "date": today()})
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        """Keep a sample."""
        self.samples.append(sample)

    def fail(self, case: str, world: int, client: str, reason: str) -> None:
        """Keep the reason why a client gave no figure."""
        self.failures.append({"case": case, "world": world, "client": client, "reason": reason})

    def values(self, case: str, world: int, client: str, measure: str) -> list[float]:
        """All samples of one figure, in the order taken."""
        return [
            s.value
            for s in self.samples
            if (s.case, s.world, s.client, s.measure) == (case, world, client, measure)
        ]

    def median(self, case: str, world: int, client: str, measure: str) -> float | None:
        """Median of one figure; None where there is no sample."""
        values = self.values(case, world, client, measure)
        return median(values) if values else None

    def fastest(self, case: str, world: int, clients: Iterable[str], measure: str) -> float | None:
        """The lowest median among several clients, such as raw I/O with one and two threads."""
        found = [self.median(case, world, client, measure) for client in clients]
        return min((value for value in found if value is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "notes": self.notes,
            "samples": [asdict(sample) for sample in self.samples],
            "failures": self.failures,
        }
