"""The cases of `benchmark async`: saves in the background, saves upon a base, and shared loads."""

from __future__ import annotations

import fcntl
import io
import shutil
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsspec import register_implementation  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from bench.clients import BUDGET, COPY, DCP, DCP_REUSED, OURS, OVERLAP, PLAIN
from bench.runs import Case, Figures, Run, Turn
from bench.worker import Rank
from testing.machine import claim_memory
from testing.memory import Sampler

MIB = 2**20
STALL, FIRST, STAGED, DURABLE = "stall", "stall, first call", "until staged", "until durable"
LOST, RATE = "training lost", "rate of training during the save"
PEAK, DEVICE_PEAK = "memory above the state", "device memory above the state"
SAVES_A_PROCESS = 3
RATE_S = 3.0
WHOLE, UPON = "whole save", "save upon a base"
SENT, TIME = "bytes sent / of a whole save", "time / of a whole save"
SHARES = {"never": "every rank reads", "always": "replicas share"}
READ, FASTER = "bytes read / stored", "every rank reads / replicas share"
BANDWIDTH = 250 * 10**6
"""Bytes a second that all ranks share: 2 Gbit/s, a small share of an object store."""


def saves(mode: str, run: Run, turn: Turn) -> Figures:
    """Several saves in one process. Mode "stall": what the caller waits for; "train": what a
    training loop loses meanwhile; "memory": peak of anonymous memory from the very first save."""
    target = run.store.new(turn.client)
    Path(target).mkdir()
    arguments = {"client": turn.client, "path": str(target), "mode": mode}
    (rows,) = turn.crew.call("bench.background:save_often", **arguments)
    Path(target).rmdir()
    found: Figures = {DURABLE: [row[DURABLE] for row in rows[1:]]}
    if mode == "stall":
        found[FIRST] = rows[0][STALL]
        found[STAGED] = [row[STAGED] for row in rows[1:]]
    if mode == "memory":
        found[PEAK] = (max(row[PEAK] for row in rows), "bytes")
    else:
        found[STALL] = [row[STALL] for row in rows[1:]]
    if mode == "train":
        found[LOST] = [row[LOST] for row in rows[1:]]
        found[RATE] = [(row[RATE], "ratio") for row in rows[1:]]
    if run.options.device == "cuda":
        found[DEVICE_PEAK] = (max(row[DEVICE_PEAK] for row in rows), "bytes")
    return found


def save_often(rank: Rank, client: str, path: str, mode: str) -> list[dict[str, float]]:
    """The figures of each save.

    Before a save is measured the machine is made to own the memory that the page cache is going to
    take: faults in the host of a virtual machine would slow the steps (0.6 s lost or 2.2, for the
    same plain write).
    """
    saver: Any = rank.client(client)
    prepared = saver.prepare(rank.source)
    size = sum(tensor.nbytes for tensor in rank.source.tensors.values())
    on_device = any(tensor.is_cuda for tensor in rank.source.tensors.values())
    training = _Training("cuda" if on_device else "cpu")
    rows = []
    for number in range(SAVES_A_PROCESS + 1):
        place = Path(path, f"{number}")
        before = training.rate() if mode == "train" else 0.0
        if mode == "train" or number == 0:
            claim_memory(Path(path), 2 * size, rest=True)
        row, held = dict[str, float](), torch.cuda.memory_allocated() if on_device else 0
        if on_device:
            torch.cuda.reset_peak_memory_stats()
        with Sampler() if mode == "memory" else nullcontext() as sampler:
            begin, steps = time.perf_counter(), 0
            saving = saver.start(prepared, place)
            row[STALL] = time.perf_counter() - begin
            if mode == "train":
                steps = training.run_until(saving.done)
            elif wait_staged := getattr(saving, "wait_staged", None):
                wait_staged()
            row[STAGED] = time.perf_counter() - begin
            saving.result()
            row[DURABLE] = took = time.perf_counter() - begin
        if on_device:
            row[DEVICE_PEAK] = torch.cuda.max_memory_allocated() - held
        if sampler is not None:
            row[PEAK] = sampler.grown_bytes[0]
        if mode == "train":
            rate = (before + training.rate()) / 2
            row[LOST], row[RATE] = took - steps / rate, steps / took / rate
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        rows.append(row)
    return rows


class _Training:
    """A loop of matrix products; each waits for the one before, as a trainer reads its loss."""

    def __init__(self, device: str) -> None:
        side, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
        self._a = torch.randn(side, side, device=device).to(dtype)

    def run_until(self, over: Any) -> int:
        """The number of steps until `over` returns true."""
        steps = 0
        while not over():
            torch.matmul(self._a, self._a)
            if self._a.is_cuda:
                torch.cuda.current_stream().synchronize()
            steps += 1
        return steps

    def rate(self) -> float:
        """Steps a second while nothing else runs."""
        begin = time.perf_counter()
        steps = self.run_until(lambda: time.perf_counter() > begin + RATE_S)
        return steps / (time.perf_counter() - begin)


def base(run: Run, turn: Turn) -> Figures:
    """A save upon a base of which about one chunk in twenty has changed, beside a whole save."""
    target = run.store.new("base")
    (found,) = turn.crew.call("bench.background:save_upon", path=str(target))
    run.store.done(target)
    whole, upon = found[WHOLE], found[UPON]
    ratios = {TIME: (upon[0] / whole[0], "ratio"), SENT: (upon[1] / whole[1], "ratio")}
    return {WHOLE: whole[0], UPON: upon[0], **ratios}


def save_upon(rank: Rank, path: str) -> dict[str, tuple[float, int]]:
    """Seconds, and bytes of the files that are not linked, of either save."""
    import shardstore

    state = rank.client(OURS).prepare(rank.source)
    size = sum(tensor.nbytes for tensor in rank.source.tensors.values())
    root = Path(path)
    shardstore.save(state, root / "warm-up")
    shutil.rmtree(root / "warm-up")
    found = {}
    for name, upon in ((WHOLE, None), (UPON, root / WHOLE)):
        # Pages that the machine gave back to its host take longer than the save upon the base.
        claim_memory(root, size, rest=True)
        begin = time.perf_counter()
        shardstore.save(state, root / name, base=upon)
        seconds = time.perf_counter() - begin
        files = [file.stat() for file in (root / name).rglob("*") if file.is_file()]
        found[name] = (seconds, sum(file.st_size for file in files if file.st_nlink == 1))
        changed = list(rank.source.tensors.values())
        for tensor in changed[: max(1, len(changed) // 20)]:
            tensor += 1
    return found


def replicas(run: Run, turn: Turn) -> Figures:
    """Four replicas load the same state out of a store whose bandwidth they share."""
    target = run.store.new("replicas")
    answers = turn.crew.call("bench.background:load_shared", path=str(target))
    run.store.done(target)
    found: Figures = {
        what: max(answer[how][0] for answer in answers) for how, what in SHARES.items()
    }
    read = sum(answer["always"][1] for answer in answers) / answers[0]["stored"]
    faster = found[SHARES["never"]] / found[SHARES["always"]]
    return found | {READ: (read, "ratio"), FASTER: (faster, "ratio")}


class Tap(LocalFileSystem):  # type: ignore[misc]
    """Local files whose bytes come out of one tap of a fixed bandwidth, shared by all processes."""

    protocol = "tap"
    read_bytes = 0
    lock = Path()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            return super()._open(path, mode, **options)
        with super()._open(path, mode, **options) as file:
            data = file.read()
        Tap.read_bytes += len(data)
        with Tap.lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(len(data) / BANDWIDTH)
        return io.BytesIO(data)


def load_shared(rank: Rank, path: str) -> dict[str, Any]:
    """Seconds and bytes of a load with and without sharing, and the bytes that are stored."""
    import shardstore

    register_implementation("tap", Tap, clobber=True)
    Tap.lock = Path(f"{path}.lock")
    client = rank.client(OURS)
    client.save(client.prepare(rank.source), Path(path), True)
    found: dict[str, Any] = {}
    for how in SHARES:
        state = client.prepare(rank.target)
        dist.barrier()
        Tap.read_bytes, begin = 0, time.perf_counter()
        shardstore.load(state, f"tap://{path}", replica_group=dist.group.WORLD, share_replicas=how)
        found[how] = (time.perf_counter() - begin, Tap.read_bytes)
    files = [file for file in Path(path).rglob("*") if file.is_file()]
    return found | {"stored": sum(file.stat().st_size for file in files)}


_alone = partial(Case, warmups=0, fresh=True)
_ALL = (PLAIN, OURS, OVERLAP, DCP, DCP_REUSED)
ASYNC = (
    _alone("stall", partial(saves, "stall"), (COPY, *_ALL)),
    _alone("train", partial(saves, "train"), _ALL),
    _alone("budget", partial(saves, "memory"), (OURS, BUDGET)),
    _alone("base", base, (OURS,), "chunks"),
    _alone("replicas", replicas, (OURS,), "replicas", worlds=(4,)),
)
