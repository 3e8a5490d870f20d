"""A crew: the processes of one interpreter that play the ranks of one client or several.

The processes stay up between samples with their state in memory: start-up and the building of the
state are in no figure, and crews of different interpreters can be measured in turn.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from testing.machine import claim_memory, no_throttling
from testing.memory import Sampler

SCRIPTS = Path(__file__).resolve().parent.parent
COMMAND_TIMEOUT_S = 1800.0
# Once one rank has failed, the others may wait in a collective for ever.
GRACE_S = 20.0


class ClientError(Exception):
    """A client failed on some rank; the text is that rank's own."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One operation of all ranks.

    Attributes:
        seconds: from the first rank's start to the last rank's end.
        ranks: the replies of the ranks, in order.
        grown_bytes: largest growth of anonymous memory on any rank; 0 if not sampled.
    """

    seconds: float
    ranks: list[dict[str, Any]]
    grown_bytes: int = 0


class Crew:
    """Ranks 0 to `world` - 1 under one interpreter."""

    def __init__(self, python: str, world: int) -> None:
        self.world = world
        self.setup: list[dict[str, Any]] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="bench-crew-")
        self._log = Path(self._scratch.name, "log")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)]),
            "GLOO_SOCKET_IFNAME": "lo",
            "LOCAL_WORLD_SIZE": str(world),
        }
        if world > 1:  # as torchrun does; more threads than cores disturb one another
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // world))
        rendezvous = str(Path(self._scratch.name, "rendezvous"))
        self._pipes, self._processes = [], []
        with self._log.open("wb") as log:
            for rank in range(world):
                ours, theirs = Pipe()
                self._pipes.append(ours)
                arguments = (rank, world, rendezvous, theirs.fileno())
                command = [python, "-m", "bench.worker", *map(str, arguments)]
                streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                shared = [theirs.fileno()]
                process = subprocess.Popen(command, env=environment, pass_fds=shared, **streams)
                self._processes.append(process)
                theirs.close()

    def build(self, workload: str, scale: float, names: list[str], device: str = "cpu") -> None:
        """Give the ranks a state, in place of the one before, and clients."""
        self.setup = self.call("setup", workload=workload, scale=scale, names=names, device=device)

    @property
    def absent(self) -> dict[str, str]:
        """Clients that some rank could not create, with the reason."""
        return {name: why for reply in self.setup for name, why in reply["absent"].items()}

    def total(self, name: str) -> int:
        """Sum over ranks of a number that `setup` gave."""
        return sum(reply[name] for reply in self.setup)

    def save(
        self, client: str, path: Path | str, *, sync: bool = True, sample: bool = False
    ) -> Timing:
        """All ranks save to `path`."""
        self.call("prepare", client=client, load=False)
        if isinstance(path, Path):
            claim_memory(path.parent, self.total("written_bytes"), rest=not sync)
            # The host of a virtual machine may have set aside what nobody has touched for seconds.
            self.call("touch")
        with contextlib.nullcontext() if sync else no_throttling():
            return self._time(sample, "save", client=client, path=str(path), sync=sync)

    def load(
        self, client: str, path: Path | str, *, sample: bool = False, cold: bool = False
    ) -> Timing:
        """All ranks load from `path`; `cold`: its files are not in the page cache."""
        self.call("prepare", client=client, load=True)
        if cold and isinstance(path, Path):
            claim_memory(path.parent, self.total("wanted_bytes"))
        return self._time(sample, "load", client=client, path=str(path))

    def check(self) -> None:
        """Compare the last load with the state, on all ranks."""
        wrong = {rank: keys for rank, keys in enumerate(self.call("check")) if keys}
        if wrong:
            raise ClientError(f"loaded tensors differ from what was saved, by rank: {wrong}")

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._scratch.cleanup()

    def call(self, name: str, **arguments: Any) -> list[Any]:
        """Run a command of `Rank`, or "module:function" with the rank first, on all ranks."""
        values: list[Any] = []
        failure: str | None = None
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # the answer says that the rank died
                pipe.send((name, arguments))
        for rank, pipe in enumerate(self._pipes):
            if failure is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S / self.world)
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    value, error = pipe.recv()
                    values.append(value)
                else:
                    error = f"no answer in {COMMAND_TIMEOUT_S:.0f} s"
            except (EOFError, ConnectionResetError):
                error = f"died: {self._log.read_text(errors='replace')[-2000:]}"
            if error is not None and failure is None:
                failure = f"rank {rank}: {error}"
        if failure is not None:
            raise ClientError(failure)
        return values

    def _time(self, sample: bool, name: str, **arguments: Any) -> Timing:
        sampler = Sampler([process.pid for process in self._processes])
        with sampler if sample else contextlib.nullcontext():
            ranks = self.call(name, **arguments)
        seconds = max(r["end"] for r in ranks) - min(r["start"] for r in ranks)
        return Timing(seconds=seconds, ranks=ranks, grown_bytes=max(sampler.grown_bytes))
