"""Everything that a run measures: samples, medians, and targets met or missed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any

_PLACES = ("--json", "--dir")


@dataclass(frozen=True)
class Sample:
    """One measured value.

    Attributes:
        case: name of the case.
        world: number of ranks.
        client: who did it.
        measure: what was measured.
        repeat: number of the round; the clients of a round run one after the other.
        value: in the unit.
        unit: "s", "bytes", "ratio" or "count".
    """

    case: str
    world: int
    client: str
    measure: str
    repeat: int
    value: float
    unit: str = "s"


@dataclass(frozen=True)
class Target:
    """A bound that the project set itself.

    With peers the value is a ratio of medians: with `most` the client's figure over that of the
    best peer, with `least` the best peer's over the client's (how many times as fast). Without
    peers it is the client's worst sample.
    """

    case: str
    measure: str
    client: str
    peers: tuple[str, ...] = ()
    most: float | None = None
    least: float | None = None

    def text(self) -> str:
        """The target in words."""
        bound = f"at least {self.least:g}" if self.most is None else f"at most {amount(self.most)}"
        if not self.peers:
            return f"{self.measure}, {self.client}: {bound}"
        relation = "times as fast as" if self.most is None else "times"
        return f"{self.measure}, {self.client}: {bound} {relation} {' or '.join(self.peers)}"


def amount(value: float) -> str:
    """The value of a target: a ratio, a count or seconds, or else bytes, which are many."""
    return f"{value / 2**20:,.4g} MiB" if value >= 2**15 else f"{value:.4g}"


@dataclass(frozen=True)
class Verdict:
    """The value measured for a target; `ok` is None if it was not measured."""

    case: str
    target: str
    value: float | None
    ok: bool | None


@dataclass
class Results:
    """Samples, notes on how they were taken, and what failed."""

    samples: list[Sample] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Verdict] = field(default_factory=list)

    def values(self, case: str, world: int, client: str, measure: str) -> list[float]:
        """All samples of one figure, in the order taken."""
        figure = (case, world, client, measure)
        return [s.value for s in self.samples if (s.case, s.world, s.client, s.measure) == figure]

    def best(self, case: str, world: int, clients: Iterable[str], measure: str) -> float | None:
        """The lowest median among clients; None where none of them has a sample."""
        found = [self.values(case, world, client, measure) for client in clients]
        return min((median(values) for values in found if values), default=None)

    def judge(self, targets: Iterable[Target]) -> None:
        """Add a verdict for every target in every world that its case was measured in."""
        for target in targets:
            worlds = sorted({s.world for s in self.samples if s.case == target.case})
            for world in worlds:
                value, ok = self._value(world, target), None
                if value is not None:
                    ok = target.most is None or value <= target.most
                    ok = ok and (target.least is None or value >= target.least)
                at = f"{world} ranks: " if len(worlds) > 1 else ""
                self.targets.append(Verdict(target.case, at + target.text(), value, ok))

    def _value(self, world: int, target: Target) -> float | None:
        case = target.case
        if not target.peers:
            values = self.values(case, world, target.client, target.measure)
            worst = max if target.least is None else min
            return worst(values, default=None)
        ours = self.best(case, world, [target.client], target.measure)
        peers = self.best(case, world, target.peers, target.measure)
        if not ours or not peers:
            return None
        return ours / peers if target.least is None else peers / ours

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Results:
        """The results that `as_dict` gave."""
        return cls(
            [Sample(**sample) for sample in data["samples"]],
            data["notes"],
            data["failures"],
            [Verdict(**verdict) for verdict in data["targets"]],
        )


def command_and_date() -> dict[str, str]:
    """The command line without options that name places of this machine, and the day in UTC."""
    words, given = ["scripts/benchmark"], iter(sys.argv[1:])
    for word in given:
        if word in _PLACES:
            next(given, None)
        elif word.partition("=")[0] not in _PLACES:
            words.append(word)
    return {"command": shlex.join(words), "date": datetime.now(UTC).date().isoformat()}
