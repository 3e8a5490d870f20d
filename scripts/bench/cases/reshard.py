"""Bytes read for each byte wanted when the number of ranks changes between save and load.

The ranks are played one after the other by this process, in a world of one: on save it holds all
shards of every tensor at once, on load the shard of one rank at a time. No rank can profit from
what another one has read. Counted by the storage layer and by the kernel; the larger one counts.
"""

from __future__ import annotations

import torch

from bench import clients, io_counters
from bench.context import Context
from bench.disk_state import retire
from bench.results import Sample
from bench.workload import Entry, build, gpt

CASE = "reshard"
CHANGES = ((4, 16), (16, 4))
AXES = (0, 1)
RATIO = "bytes read / wanted"
WORST = "bytes read / wanted, worst rank"


def label(measure: str, before: int, after: int, axis: int) -> str:
    """Name of the figure for one change of the layout."""
    return f"{measure}, {before} -> {after} along axis {axis}"


def run(context: Context) -> None:
    """Both changes along both axes."""
    if clients.OURS not in context.clients:
        return
    try:
        import shardstore  # noqa: F401
        from shardstore import mapping  # noqa: F401
    except ImportError as reason:
        context.results.fail(CASE, 1, clients.OURS, f"not available: {reason}")
        return
    tensors = build(_one_layer(context.scale), 0, 1)
    for axis in AXES:
        for before, after in CHANGES:
            try:
                _change(context, tensors, axis, before, after)
            except Exception as error:
                case = f"{before} -> {after}, axis {axis}: {type(error).__name__}: {error}"
                context.say(f"  {CASE}, {case}")
                context.results.fail(CASE, 1, clients.OURS, case)


def _one_layer(scale: float) -> list[Entry]:
    """Embedding and first layer with both moments: every size of tensor that the GPT has."""
    return [
        Entry(key=e.key, dtype=e.dtype, global_shape=e.global_shape)
        for e in gpt(0, 1, scale)
        if ("layers." not in e.key or "layers.0." in e.key)
    ]


def _change(
    context: Context, tensors: dict[str, torch.Tensor], axis: int, before: int, after: int
) -> None:
    import shardstore
    from shardstore.mapping import ShardedTensor

    path = context.root / f"{CASE}-{before}-{after}-{axis}"
    state = {}
    for key, tensor in tensors.items():
        cut = min(axis, tensor.ndim - 1)
        for index, data in enumerate(tensor.chunk(before, dim=cut)):
            state[f"{key}/{index}"] = ShardedTensor.from_rank_offsets(
                key, data.contiguous(), (cut, index, before)
            )
    shardstore.save(state, str(path), durable=False)
    del state
    read = wanted = 0
    worst = 0.0
    for rank in range(after):
        expected = {
            key: tensor.chunk(after, dim=min(axis, tensor.ndim - 1))[rank]
            for key, tensor in tensors.items()
        }
        asked = {
            key: ShardedTensor.from_rank_offsets(
                key,
                torch.zeros(part.shape, dtype=part.dtype),
                (min(axis, part.ndim - 1), rank, after),
            )
            for key, part in expected.items()
        }
        mark = io_counters.snapshot()
        loaded = shardstore.load(asked, str(path), validate_access_integrity=False)
        moved = io_counters.since(mark)
        for key, part in expected.items():
            if not torch.equal(loaded[key], part):
                raise ValueError(f"rank {rank}: {key} differs from what was saved")
        want = sum(part.nbytes for part in expected.values())
        got = max(moved["bytes_read"], moved["rchar"])
        read, wanted, worst = read + got, wanted + want, max(worst, got / want)
    retire(path, context.root)
    context.say(
        f"  {CASE}, {before} -> {after} along axis {axis}: {read / wanted:.3f} bytes read for "
        f"each wanted, {worst:.3f} on the worst rank"
    )
    for measure, value in ((RATIO, read / wanted), (WORST, worst)):
        name = label(measure, before, after, axis)
        context.results.add(Sample(CASE, 1, clients.OURS, name, 0, value, "ratio"))
