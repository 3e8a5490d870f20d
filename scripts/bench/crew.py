"""A crew: the processes of one interpreter that play the ranks of one client or several.

The processes stay up between samples with their state in memory, so start-up and the building of
the state are in no figure, and crews of different interpreters can be measured in turn. Knows
processes and pipes; what the commands mean is the worker's business.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.disk_state import claim_memory, no_throttling
from bench.memory import Sampler

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
        anonymous_peak_bytes: largest growth of anonymous memory on any rank; None if not sampled.
    """

    seconds: float
    ranks: list[dict[str, Any]]
    anonymous_peak_bytes: int | None = None


class Crew:
    """Ranks 0 to `world` - 1 under one interpreter; use as a context manager."""

    def __init__(self, python: str, world: int, workload: str, scale: float, names: list[str]):
        self.world = world
        self.failed = False
        self._scratch = tempfile.TemporaryDirectory(prefix="bench-crew-")
        self._log = Path(self._scratch.name, "log")
        self._replies: list[queue.Queue[str | None]] = []
        environment = dict(os.environ)
        environment["PYTHONPATH"] = str(SCRIPTS)
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        # What torchrun does too; more threads than cores only disturb one another.
        environment["LOCAL_WORLD_SIZE"] = str(world)
        if world > 1:
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // world))
        rendezvous = str(Path(self._scratch.name, "rendezvous"))
        with self._log.open("wb") as log:
            self._processes = [
                subprocess.Popen(
                    [python, "-m", "bench.worker", str(rank), str(world), rendezvous],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    text=True,
                )
                for rank in range(world)
            ]
        for process in self._processes:
            replies: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_pump, args=(process, replies), daemon=True).start()
            self._replies.append(replies)
        try:
            self.setup = self._ask(op="setup", workload=workload, scale=scale, names=names)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def absent(self) -> dict[str, str]:
        """Clients that some rank could not create, with the reason."""
        return {name: why for reply in self.setup for name, why in reply["absent"].items()}

    def change_workload(self, workload: str, scale: float) -> None:
        """Give up the state in memory for another one; the clients stay."""
        self.setup = self._ask(op="setup", workload=workload, scale=scale, names=[])

    def save(self, client: str, path: Path | str, *, sync: bool, sample: bool = False) -> Timing:
        """All ranks save to `path`."""
        self._ask(op="prepare_save", client=client)
        if isinstance(path, Path):
            written = sum(reply["written_bytes"] for reply in self.setup)
            claim_memory(path.parent, written, rest=not sync)
            # What nobody has touched for seconds a virtual machine's host may have set aside, too.
            self._ask(op="touch")
        with contextlib.nullcontext() if sync else no_throttling():
            return self._time(sample, op="save", client=client, path=str(path), sync=sync)

    def load(
        self, client: str, path: Path | str, *, sample: bool = False, cold: bool = False
    ) -> Timing:
        """All ranks load from `path`; `cold`: its files are not in the page cache."""
        self._ask(op="prepare_load", client=client)
        if cold and isinstance(path, Path):
            claim_memory(path.parent, sum(reply["wanted_bytes"] for reply in self.setup))
        return self._time(sample, op="load", client=client, path=str(path))

    def check(self) -> bool:
        """Compare the last load with the state, on all ranks; true if it was done in place."""
        replies = self._ask(op="check")
        wrong = {i: reply["wrong"] for i, reply in enumerate(replies) if reply["wrong"]}
        if wrong:
            raise ClientError(f"loaded tensors differ from what was saved, by rank: {wrong}")
        return all(reply["in_place"] for reply in replies)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            if self.failed:
                process.kill()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._scratch.cleanup()

    def _time(self, sample: bool, **command: Any) -> Timing:
        peak: int | None = None
        if sample:
            with Sampler([process.pid for process in self._processes]) as sampler:
                ranks = self._ask(**command)
            peak = max(
                max(0, high - rank["anonymous_bytes_before"])
                for high, rank in zip(sampler.peak_bytes, ranks, strict=True)
            )
        else:
            ranks = self._ask(**command)
        seconds = max(r["end"] for r in ranks) - min(r["start"] for r in ranks)
        return Timing(seconds=seconds, ranks=ranks, anonymous_peak_bytes=peak)

    def _ask(self, **command: Any) -> list[dict[str, Any]]:
        line = json.dumps(command) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                self.failed = True
                raise ClientError(f"a rank died: {self._log_tail()}") from None
        replies: list[dict[str, Any]] = []
        failure: str | None = None
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        for rank in range(self.world):
            if failure is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S / self.world)
            try:
                answer = self._replies[rank].get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                failure = failure or f"rank {rank} did not answer in {COMMAND_TIMEOUT_S:.0f} s"
                continue
            if answer is None:
                failure = failure or f"rank {rank} died: {self._log_tail()}"
                continue
            reply = json.loads(answer)
            if "error" in reply:
                failure = failure or f"rank {rank}: {reply['error']}\n{reply['traceback']}"
            replies.append(reply)
        if failure is not None:
            self.failed = True
            raise ClientError(failure)
        return replies

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


def _pump(process: subprocess.Popen[str], replies: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            replies.put(line)
    except ValueError:  # closed while reading
        pass
    replies.put(None)
