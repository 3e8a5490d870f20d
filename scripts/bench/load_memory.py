"""`benchmark async --only loads`: what a load takes beside the tensors that it fills.

Two ranks, each load in fresh processes of its own; the growth of a rank's anonymous memory while
it loads, and of all its resident memory as the kernel counts it, pages of mapped files included.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.memory import Sampler, peak_rss_bytes, reset_peak
from bench.results import Results, Sample, Verdict
from bench.sharing import answer_of
from bench.targets import at_most

CASE = "loads"
RANKS = 2
TENSORS, SIDE = 8, 4096
BUDGET_BYTES = 64 * 2**20
FIXED_BYTES = 44 * 2**20
"""What may be added that grows neither with the state nor with the budget."""
PEAK, RESIDENT = "anonymous memory above the tensors", "all resident memory above the tensors"
SHARED = ("replicas in rounds", "cast, replicas in rounds")
CUTS = {
    "as saved": "rows",
    "resharded": "columns",
    "flattened ranges": "flat",
    "replicas in rounds": "whole",
    "cast": "rows",
    "cast, resharded": "columns",
    "cast, flattened ranges": "flat",
    "cast, replicas in rounds": "whole",
}


def run(results: Results, root: Path, scale: float, number: int) -> None:
    """Every kind of load of a state of 512 MiB at full scale."""
    place, tensors = root / "loads", max(1, round(TENSORS * scale))
    for name in ("save", *CUTS):
        of_ranks = _on_ranks(name, str(place), tensors)
        for measure, values in zip((PEAK, RESIDENT), zip(*of_ranks, strict=True), strict=False):
            results.add(Sample(CASE, RANKS, name, measure, number, float(max(values)), "bytes"))
    shutil.rmtree(place)


def _on_ranks(name: str, place: str, tensors: int) -> list[tuple[int, int]]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as rendezvous:
        ranks = [
            context.Process(target=_rank, args=(rank, name, place, tensors, rendezvous, answers))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        found = [answer_of(answers, ranks) for _ in ranks]
        for process in ranks:
            process.join()
    return [] if name == "save" else [answer["grown"] for answer in found]


def _rank(rank: int, name: str, place: str, tensors: int, rendezvous: str, answers: Any) -> None:
    import shardstore

    torch.set_num_threads(1)
    method = f"file://{rendezvous}/store"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    options: dict[str, Any] = {"exchange_budget_bytes": BUDGET_BYTES}
    if name in SHARED:
        options |= {"replica_group": dist.group.WORLD, "share_replicas": "always"}
    if name == "save":
        shardstore.save(_shards(rank, "rows", tensors, torch.float32), place, durable=False)
        answers.put({})
    else:
        casts = name.startswith("cast")
        # One tensor before, so that imports and connections do not count.
        shardstore.load(_shards(rank, CUTS[name], 1, torch.float32), place, **options)
        dtype = torch.bfloat16 if casts else torch.float32
        state = _shards(rank, CUTS[name], tensors, dtype)
        before = reset_peak()
        with Sampler([os.getpid()]) as sampler:
            shardstore.load(state, place, cast=casts, **options)
        resident = peak_rss_bytes() - before.rss_bytes
        answers.put({"grown": (max(0, sampler.peak_bytes[0] - before.anonymous_bytes), resident)})
    dist.barrier()
    dist.destroy_process_group()


def _shards(rank: int, cut: str, tensors: int, dtype: torch.dtype) -> dict[str, Any]:
    """A rank's part of each tensor, all of its memory touched."""
    from shardstore import ShardedTensor

    state: dict[str, Any] = {}
    part = SIDE // RANKS
    for key in map(str, range(tensors)):
        if cut == "rows":
            data = torch.ones(part, SIDE, dtype=dtype)
            state[key] = ShardedTensor.from_rank_offsets(key, data, (0, rank, RANKS))
        elif cut == "columns":
            data = torch.ones(SIDE, part, dtype=dtype)
            state[key] = ShardedTensor.from_rank_offsets(key, data, (1, rank, RANKS))
        elif cut == "flat":
            data = torch.ones(part * SIDE, dtype=dtype)
            bounds = slice(rank * part * SIDE, (rank + 1) * part * SIDE)
            state[key] = ShardedTensor.from_rank_offsets_flat(
                key, data, (SIDE, SIDE), flattened_range=bounds
            )
        else:
            data = torch.ones(SIDE, SIDE, dtype=dtype)
            state[key] = ShardedTensor.from_rank_offsets(key, data, replica_id=rank)
    return state


def verdicts(results: Results, cases: Sequence[str]) -> Iterator[Verdict]:
    """No second copy, and no more under way than the budget."""
    if CASE not in cases:
        return
    for name in CUTS:
        budget = BUDGET_BYTES if name in SHARED or name.startswith("cast") else 0
        most = budget + FIXED_BYTES
        text = f"{name}: at most {most >> 20} MiB above the tensors"
        yield at_most(CASE, text, results.median(CASE, RANKS, name, PEAK), most)
