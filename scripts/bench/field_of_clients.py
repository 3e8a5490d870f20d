"""The clients that take part in a case, each in a crew of its own interpreter.

A client that fails is noted and leaves; the others of its crew go on in a fresh one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from bench.clients import MEGATRON, ORBAX
from bench.context import Context
from bench.crew import ClientError, Crew
from bench.disk_state import ATTIC, retire

Action = Callable[[Context, Crew, str, int], None]


class Field:
    """Crews with one workload in memory; use as a context manager."""

    def __init__(
        self,
        context: Context,
        case: str,
        world: int,
        workload: str,
        scale: float,
        names: Iterable[str],
    ) -> None:
        self._context = context
        self._case = case
        self._world = world
        self._workload = workload
        self._scale = scale
        self._crews: dict[str, Crew] = {}
        self.names: list[str] = [name for name in names if name in context.clients]
        if MEGATRON in self.names and context.megatron_python is None:
            self._leave(MEGATRON, "no interpreter with megatron-core")
        if ORBAX in self.names and context.orbax_python is None:
            self._leave(ORBAX, "no interpreter with Orbax: scripts/orbax_env makes one")
        elif ORBAX in self.names and world != 1:
            self._leave(ORBAX, "one rank only: JAX starts its processes itself")

    def __enter__(self) -> Field:
        for python in {self._python(name): None for name in self.names}:
            self._start(python)
        return self

    def __exit__(self, *_: object) -> None:
        for crew in self._crews.values():
            crew.close()

    def rounds(self, action: Action, rounds: Iterable[int]) -> None:
        """Run `action` for one client after the other, in every round.

        What a client leaves behind (caches, discards of freed space) may slow down the next one.
        Every other round goes backwards, and each pair of rounds begins with another client: of two
        clients each is the first as often as the other.

        Args:
            action: called with the context, the client's crew and name, and the number of the
                round; a ClientError makes the client leave the field.
            rounds: numbers of the rounds.
        """
        for number in rounds:
            for name in _order(list(self.names), number):
                # It may have left with another client of its interpreter.
                if name in self.names:
                    self._attempt(action, name, number)

    def _attempt(self, action: Action, name: str, number: int) -> None:
        python = self._python(name)
        try:
            action(self._context, self._crews[python], name, number)
        except ClientError as error:
            self._leave(name, str(error))
            self._crews.pop(python).close()
            for path in list(self._context.root.iterdir()):
                if path.name != ATTIC:
                    retire(path, self._context.root)
            self._start(python)

    def _python(self, name: str) -> str:
        if name == MEGATRON:
            assert self._context.megatron_python is not None
            return self._context.megatron_python
        if name == ORBAX:
            assert self._context.orbax_python is not None
            return self._context.orbax_python
        return sys.executable

    def _start(self, python: str) -> None:
        names = [name for name in self.names if self._python(name) == python]
        if not names:
            return
        try:
            crew = Crew(python, self._world, self._workload, self._scale, names)
        except ClientError as error:
            for name in names:
                self._leave(name, str(error))
            return
        self._crews[python] = crew
        for name, reason in crew.absent.items():
            self._leave(name, f"not available: {reason}")
        notes = self._context.results.notes
        notes.setdefault("settings", {}).update(crew.setup[0]["settings"])
        interpreter = {self._context.megatron_python: "megatron", sys.executable: "shardstore"}.get(
            python, "orbax"
        )
        notes.setdefault("versions", {})[interpreter] = crew.setup[0]["versions"]
        notes.setdefault("states", {})[f"{self._case}, {self._world} rank(s)"] = {
            "tensors_on_rank_0": crew.setup[0]["tensors"],
            "bytes_written": sum(reply["written_bytes"] for reply in crew.setup),
            "bytes_loaded": sum(reply["wanted_bytes"] for reply in crew.setup),
        }

    def _leave(self, name: str, reason: str) -> None:
        self._context.say(f"  {name} leaves: {reason.splitlines()[0] if reason else 'unknown'}")
        self._context.results.fail(self._case, self._world, name, reason)
        self.names.remove(name)


def _order(names: list[str], number: int) -> list[str]:
    first = number // 2 % len(names) if names else 0
    order = names[first:] + names[:first]
    return order[::-1] if number % 2 else order
