"""Faults at named points of saves and deletions, on disk and on S3, and what is lost by them.

Each fault strikes a process of its own. On disk strace makes its system calls fail or wait, or
kills it there; on S3 a proxy does that to its requests. Afterwards every checkpoint that the
process did not touch has to be whole, the one that it touched the old or the new one, and the next
save has to succeed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import shardstore
from shardstore import CheckpointingException, CheckpointManager, ShardedTensor
from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import radosgw
from tests.helpers.deaths import Kills

LIMIT_S = 240
WRITES = "write,pwrite64,?pwritev,?pwritev2,writev,fallocate,ftruncate"
NAMES = "mkdir,rename,?renameat,?renameat2,unlink,?unlinkat,rmdir,link,?linkat"
SYNCS = "fsync,fdatasync,syncfs"
READS = "read,pread64,?preadv,?preadv2"
DISK: dict[str, Callable[[str, int], str]] = {
    "kill": lambda point, at: f"{point}:signal=KILL:when={at}",
    "power": lambda point, at: f"{point}:signal=KILL:when={at}",
    "full": lambda _, at: f"{WRITES},mkdir:error=ENOSPC:when={at}+",
    "read-only": lambda _, at: f"{NAMES},{WRITES}:error=EROFS:when={at}+",
    "EIO": lambda _, at: f"{WRITES},{SYNCS}:error=EIO:when={at}",
    "EIO, reads": lambda _, at: f"{READS}:error=EIO:when={at}",
    "slow": lambda _, at: f"{NAMES},{SYNCS},openat:delay_enter=20000:when={at}+3",
}
"""Kind -> what strace injects at a point, from a number of calls on."""
S3: dict[str, list[Fault]] = {
    "kill": [],
    "EIO": [Fault.RESET_BEFORE, Fault.RESET_IN_REQUEST, Fault.DROP_ANSWER, Fault.RESET_IN_ANSWER],
    "slow": [Fault.DELAY, Fault.SLOW_DOWN],
    "silent": [Fault.SILENCE, Fault.SILENT_ANSWER],
}


@dataclass
class Place:
    """Where checkpoints are: a folder, or a prefix of a bucket behind a proxy."""

    root: str
    options: dict[str, Any] = field(default_factory=dict)
    proxy: FaultProxy | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {"storage_options": self.options or None}

    def url(self, step: int) -> str:
        return f"{self.root}/step-{step}"


def state(value: int) -> dict[str, Any]:
    tensors = {f"w{i}": torch.full((64, 32), float(value + i)) for i in range(3)}
    sharded = {key: ShardedTensor.from_rank_offsets(key, t) for key, t in tensors.items()}
    return {**sharded, "value": value}


def save(place: Place, step: int, value: int, **options: Any) -> None:
    shardstore.save(state(value), place.url(step), overwrite=True, **place.given, **options)


def prepare(place: Place) -> None:
    manager = CheckpointManager(place.root, **place.given)
    for step in (1, 2):
        manager.save(step, state(step))
    manager.close()


def operate(place: Place, operation: str, durable: bool) -> None:
    """The work that a fault strikes, beside the steps 1 and 2."""
    manager = CheckpointManager(place.root, keep_last=1, **place.given)
    if operation == "delete":
        shardstore.delete_checkpoint(place.url(2), **place.given)
    elif operation == "retain":
        manager.save(3, state(3), durable=durable)
        manager.close()
    elif operation == "later":
        url = place.url(3)
        shardstore.async_save(state(3), url, durable=durable, **place.given).result()
    else:
        base = place.url(2) if operation == "base" else None
        save(place, 2 if operation == "overwrite" else 3, 3, durable=durable, base=base)


def found(place: Place) -> dict[int, int | str | None]:
    """Step -> the value that it has, every tensor of it compared."""
    answer: dict[int, int | str | None] = dict.fromkeys((1, 2, 3))
    for step in CheckpointManager(place.root, **place.given).steps():
        try:
            loaded = shardstore.load_plain_tensors(place.url(step), **place.given)
        except CheckpointingException as error:
            answer[step] = f"damaged: {error}"
            continue
        value = answer[step] = loaded["value"]
        for i in range(3):
            assert torch.equal(loaded[f"w{i}"], torch.full((64, 32), float(value + i)))
    return answer


def lost(before: str, done: bool, after: dict[int, Any], replaces_at_once: bool) -> str:
    """What is not as it has to be, after an operation that was done or not; empty if nothing."""
    touched: dict[int, tuple[Any, Any]] = {3: (None, 3)}
    if before == "overwrite":
        touched = {2: (2, 3)}
    elif before == "delete":
        touched = {2: (2, None)}
    elif before == "retain":
        touched.update({1: (1, None), 2: (2, None)})
    for step in (1, 2, 3):
        old, new = touched.get(step, (step, step) if step < 3 else (None, None))
        # Old steps are deleted in the background, which may fail.
        allowed = {new} if done and not (before == "retain" and step < 3) else {old, new}
        if before == "overwrite" and step == 2 and not replaces_at_once and not done:
            allowed.add(None)
        if after[step] not in allowed:
            return f"step {step} is {after[step]}, not {' or '.join(map(str, allowed))}"
    if before == "retain" and after[3] is None and None in (after[1], after[2]):
        return "old steps were deleted before the new one was there"
    return ""


def in_a_child(work: Callable[[], Any], strike: Callable[[int], Any] | None = None) -> Any:
    """Run work in a forked process; its result, ``["refused", text]``, ``["failed", text]``,
    ``["died", ""]`` or ``["hung", ""]``. ``strike`` is called with its id before it begins."""
    ready, go = os.pipe()
    answer, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        said: Any = ["failed", "?"]
        try:
            wait_for(ready)
            said = ["done", work()]
        except CheckpointingException as error:
            said = ["refused", str(error)]
        except BaseException:
            said = ["failed", traceback.format_exc()]
        finally:
            signal.alarm(2)  # strace may let the pipe fail, too
            while True:
                try:
                    os.write(tell, json.dumps(said).encode())
                    os._exit(0)
                except OSError:
                    pass
    os.close(tell)
    after = strike(pid) if strike is not None else None
    os.write(go, b"x")
    ends = time.monotonic() + LIMIT_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        time.sleep(0.01)
        if time.monotonic() > ends:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return ["hung", f"for {LIMIT_S} s"]
    with os.fdopen(answer, "rb") as stream:
        text = stream.read()
    os.close(ready)
    os.close(go)
    if after is not None:
        after()
    return json.loads(text) if text else ["died", ""]


def wait_for(ready: int) -> None:
    while True:  # strace may let this fail, too
        try:
            os.read(ready, 1)
            return
        except OSError:
            pass


def by_strace(inject: str, log: Path) -> Callable[[int], Any]:
    """Strike a process by what strace injects into its system calls."""

    def strike(pid: int) -> Callable[[], None]:
        calls = inject.partition(":")[0]
        traced = f"trace={calls},{SYNCS}" if "signal" in inject else f"trace={calls}"
        command = ["strace", "-f", "-ttt", "-y", "-o", str(log), "-p", str(pid), "-e", traced]
        strace = subprocess.Popen([*command, "-e", f"inject={inject}"], stderr=subprocess.PIPE)
        assert b"attached" in strace.stderr.readline()

        def end() -> None:
            strace.wait(20)
            strace.stderr.close()

        return end

    return strike


def cut_power(root: Path, log: Path, began: float) -> None:
    """Take away the content of all that was written since ``began`` and not synced since."""
    synced, files = began, set()
    for line in log.read_text(errors="replace").splitlines():
        stamp, call = line.split(None, 2)[1:]
        if call.startswith("syncfs(") and call.rstrip().endswith("= 0"):
            synced = float(stamp)
        elif call.startswith("fsync(") and "<" in call:
            files.add(Path(call.partition("<")[2].partition(">")[0]).name)
    for path in root.rglob("*"):
        if path.is_file() and path.stat().st_mtime > synced and path.name not in files:
            os.truncate(path, 0)


def strike_disk(kind: str, operation: str, point: str, at: int, folder: Path) -> tuple[str, str]:
    place, log = Place(str(folder / "run")), folder / "log"
    in_a_child(lambda: prepare(place))
    began, durable = time.time(), kind == "power"
    strike = by_strace(DISK[kind](point, at), log)
    outcome, text = in_a_child(lambda: operate(place, operation, durable), strike)
    if kind == "power" and outcome == "died":
        cut_power(folder / "run", log, began)
    return judged(place, operation, outcome, text)


def strike_s3(operation: str, fault: Fault | None, at: int, place: Place) -> tuple[str, str]:
    assert place.proxy is not None
    in_a_child(lambda: prepare(place))

    def strike(pid: int) -> Callable[[], None]:
        proxy = place.proxy
        assert proxy is not None
        if fault is None:
            proxy.rules.append(Kills(fault=Fault.SILENCE, pid=pid, skip=at))
        else:
            proxy.add(fault, skip=at, count=1, delay_s=0.5)
        return proxy.clear

    outcome, text = in_a_child(lambda: operate(place, operation, False), strike)
    return judged(place, operation, outcome, text)


def judged(place: Place, operation: str, outcome: str, text: str) -> tuple[str, str]:
    """The outcome, and what was lost or is wrong; empty if nothing."""
    if outcome in ("failed", "hung"):
        return outcome, f"{outcome}: {text}"
    how, after = in_a_child(lambda: found(place))
    if how != "done":
        return outcome, f"looking at what is there {how}: {after}"
    after = {int(step): value for step, value in after.items()}
    if wrong := lost(operation, outcome == "done", after, place.proxy is None):
        return outcome, wrong

    def again() -> dict[int, Any]:
        save(place, 2, 4)
        shardstore.sweep(place.root, older_than=timedelta(0), dry_run=False, **place.given)
        left = shardstore.sweep(place.root, older_than=timedelta(0), **place.given)
        assert not left, left
        return found(place)

    how, said = in_a_child(again)
    if how != "done" or said["2"] != 4:
        return outcome, f"the next save {how}: {said}"
    if place.proxy is None and (names := [n for n in os.listdir(place.root) if n[:5] != "step-"]):
        return outcome, f"left behind: {names}"
    return outcome, ""


OPERATIONS = ["first", "overwrite", "later", "base", "delete", "retain"]
POINTS = [
    "mkdir", "rename", "unlink", "rmdir", "openat", "fallocate", "pwrite64", "syncfs",
    "fsync", "getdents64",
]  # fmt: skip


def strike_all(times: str, seed: str, only: str) -> bool:
    """Strike so often, print a table and one line; return whether anything was lost.

    Args:
        times: how often.
        seed: repeats the faults of a run.
        only: ``disk`` or ``s3``; empty: every fourth fault on S3, if ``scripts/s3_server`` runs.
    """
    server = None if only == "disk" else radosgw()
    chance = random.Random(int(seed))
    table: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    problems, began = [], time.monotonic()
    proxy = None if server is None else FaultProxy(server.endpoint_url)
    bucket = "" if server is None else server.new_bucket()
    if proxy is not None:
        proxy.start()
    for number in range(int(times)):
        operation = OPERATIONS[number % len(OPERATIONS)]
        on_s3 = proxy is not None and (only == "s3" or number % 4 == 3)
        kinds = list(S3) if on_s3 else list(DISK)
        # A silent server costs 15 s each time.
        weights = [1 if kind == "silent" else 4 for kind in kinds]
        kind, at = chance.choices(kinds, weights)[0], chance.randrange(40)
        if on_s3:
            assert server is not None
            assert proxy is not None
            fault = chance.choice(S3[kind]) if S3[kind] else None
            point = fault.name if fault else "request"
            options = server.at(proxy.endpoint_url).storage_options
            place = Place(f"s3://{bucket}/{number}", options, proxy)
            outcome, wrong = strike_s3(operation, fault, at, place)
        else:
            point, at = chance.choice(POINTS), 1 + at % 8
            folder = Path(tempfile.mkdtemp(prefix="faults-"))
            outcome, wrong = strike_disk(kind, operation, point, at, folder)
            shutil.rmtree(folder)
        table["S3" if on_s3 else "disk", kind][outcome] += 1
        if wrong:
            problems.append(wrong)
            print(f"fault {number} ({kind}, {operation}, {point} {at}): {wrong}", flush=True)
    if proxy is not None:
        proxy.stop()
    outcomes = ("died", "refused", "done", "failed", "hung")
    print(f"{'place':6}{'fault':12}" + "".join(f"{name:>9}" for name in outcomes))
    for (where, kind), counts in sorted(table.items()):
        print(f"{where:6}{kind:12}" + "".join(f"{counts[name]:9}" for name in outcomes))
    seconds = time.monotonic() - began
    said = f"{len(problems)} with a loss" if problems else "nothing lost"
    print(f"{times} faults, seed {seed}, {seconds:.0f} s: {said}")
    return bool(problems)
