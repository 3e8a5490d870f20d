"""Cases of `benchmark async` about what is not moved twice: saves upon a base, shared loads.

The store of the shared loads is a local folder whose chunks come out of one tap of a fixed
bandwidth, which all ranks of the run share: what an object store's network would be.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.disk_state import claim_memory
from bench.results import Results, Sample, Verdict
from bench.targets import at_least, at_most

WHOLE, UPON, SENT = "whole save", "save upon a base", "bytes sent"
EACH, SHARED, READ = "every rank reads", "replicas share", "bytes read"
RANKS = 4
ROWS, ROW_BYTES = 20, 8 * 2**20
BASE_TENSORS, REPLICA_TENSORS = 12, 3
BANDWIDTH = 250 * 10**6
"""Bytes a second of the tap: of 2 Gbit/s, a small share of an object store."""


def _tensors(count: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.randn(ROWS, ROW_BYTES // 4) for i in range(count)}


def _save(tensors: dict[str, torch.Tensor], place: Path, **options: Any) -> None:
    import shardstore
    from shardstore.strategies.zarr import ZarrSaveShardedStrategy

    state = {k: shardstore.ShardedTensor.from_rank_offsets(k, t) for k, t in tensors.items()}
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=ROW_BYTES)
    shardstore.save(state, place, strategy, **options)


def base(results: Results, root: Path, scale: float, number: int) -> None:
    """One row in twenty changed since the base: time and bytes beside those of a whole save."""
    from shardstore.storage.movers.counters import counters

    tensors = _tensors(max(1, round(BASE_TENSORS * scale)))
    _save(tensors, root / "warm")
    shutil.rmtree(root / "warm")
    for case, options in ((WHOLE, {}), (UPON, {"base": root / WHOLE})):
        # Pages that the machine gave back to its host take longer than the save upon the base.
        claim_memory(root, sum(tensor.nbytes for tensor in tensors.values()), rest=True)
        counters.reset()
        begin = time.perf_counter()
        _save(tensors, root / case, **options)
        seconds = time.perf_counter() - begin
        results.add(Sample("base", 1, case, "seconds", number, seconds))
        sent = float(counters.bytes_written)
        results.add(Sample("base", 1, case, SENT, number, sent, "bytes"))
        for tensor in tensors.values():
            tensor[number % ROWS] += 1
    for case in (WHOLE, UPON):
        shutil.rmtree(root / case)


def replicas(results: Results, root: Path, scale: float, number: int) -> None:
    """Four replicas load the same state out of one tap."""
    place = root / "replicated"
    _save(_tensors(max(1, round(REPLICA_TENSORS * scale))), place)
    context = multiprocessing.get_context("spawn")
    tap, answers = context.Lock(), context.Queue()
    with tempfile.TemporaryDirectory() as rendezvous:
        ranks = [
            context.Process(target=_rank, args=(rank, str(place), rendezvous, tap, answers))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        found = [answer_of(answers, ranks) for _ in ranks]
        for process in ranks:
            process.join()
    shutil.rmtree(place)
    for case in (EACH, SHARED):
        seconds = max(answer[case][0] for answer in found)
        read = float(sum(answer[case][1] for answer in found))
        results.add(Sample("replicas", RANKS, case, "seconds", number, seconds))
        results.add(Sample("replicas", RANKS, case, READ, number, read, "bytes"))
    stored = float(found[0]["stored"])
    results.add(Sample("replicas", RANKS, "stored", READ, number, stored, "bytes"))


def answer_of(answers: Any, ranks: Sequence[Any]) -> dict[str, Any]:
    """The next rank's answer; raises once a rank has died without one."""
    while True:
        try:
            answer: dict[str, Any] = answers.get(timeout=5)
        except queue.Empty:
            if any(process.exitcode for process in ranks):
                raise RuntimeError("a rank of the shared load failed; see above") from None
        else:
            return answer


def _rank(rank: int, place: str, rendezvous: str, tap: Any, answers: Any) -> None:
    import shardstore
    from shardstore.loading import context as opened
    from shardstore.storage.checkpoint import StoredCheckpoint
    from shardstore.storage.movers.chunks import RegionRead, chunk_parts
    from shardstore.storage.movers.counters import counters

    class Tapped(StoredCheckpoint):
        """Reads chunk by chunk, each when it has come out of the tap."""

        def read(self, reads: Sequence[RegionRead], *more: Any) -> None:
            for read in reads:
                chunks = sum(1 for _ in chunk_parts(read))
                with tap:
                    time.sleep(chunks * read.array.chunk_bytes / BANDWIDTH)
            super().read(reads, *more)

    opened.StoredCheckpoint = Tapped  # type: ignore[misc]
    torch.set_num_threads(1)
    os.environ["SHARDSTORE_DEADLINE_S"] = "300"
    method = f"file://{rendezvous}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    metadata = shardstore.load_tensors_metadata(place)
    answer: dict[str, Any] = {}
    for case, share in ((EACH, "never"), (SHARED, "always")):
        dist.barrier()
        counters.reset()
        begin = time.perf_counter()
        shardstore.load(
            dict(metadata),
            place,
            validate_access_integrity=False,
            replica_group=dist.group.WORLD,
            share_replicas=share,
        )
        answer[case] = (time.perf_counter() - begin, counters.bytes_read)
    answer["stored"] = sum(meta.stat().st_size for meta in Path(place).glob("*/c.*"))
    answers.put(answer)
    dist.barrier()
    dist.destroy_process_group()


def verdicts(results: Results, cases: Sequence[str]) -> Iterator[Verdict]:
    """The targets of both cases."""

    def ratio(case: str, world: int, one: str, other: str, measure: str) -> float | None:
        a = results.median(case, world, one, measure)
        b = results.median(case, world, other, measure)
        return None if a is None or b is None else a / b

    if "base" in cases:
        text = "5 % of the chunks changed: at most 6 % of the bytes"
        yield at_most("base", text, ratio("base", 1, UPON, WHOLE, SENT), 0.06)
        text = "5 % of the chunks changed: at most a quarter of the time"
        yield at_most("base", text, ratio("base", 1, UPON, WHOLE, "seconds"), 0.25)
    if "replicas" in cases:
        text = "four replicas read each byte once"
        yield at_most("replicas", text, ratio("replicas", RANKS, SHARED, "stored", READ), 1.0)
        text = "at least 1.5 times as fast as four loads"
        found = ratio("replicas", RANKS, EACH, SHARED, "seconds")
        yield at_least("replicas", text, found, 1.5)
