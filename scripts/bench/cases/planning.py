"""What planning a save costs one rank of a large world, computed without the other ranks.

For each tensor: node name, chunk grid, the array's document, and the names of the chunks that
this rank's shard is made of. Each rank's
shard keeps its size while the world grows, as with more tensor-parallel or data-parallel ranks.
"""

from __future__ import annotations

import time
from statistics import median

from bench import clients
from bench.context import Context
from bench.results import Sample
from bench.workload import gpt

CASE = "planning"
WORLDS = (16, 1_024, 16_384)
MEASURE = "time a tensor"


def run(context: Context) -> None:
    """One rank in the middle of each world plans the state of the GPT."""
    if clients.OURS not in context.clients:
        return
    try:
        from shardstore.storage import grid  # noqa: F401
    except ImportError as reason:
        context.results.fail(CASE, WORLDS[-1], clients.OURS, f"not available: {reason}")
        return
    shards = [
        (
            entry.key,
            str(entry.dtype).removeprefix("torch."),
            entry.global_shape,
            entry.dtype.itemsize,
            entry.axis or 0,
        )
        for entry in gpt(0, 1, context.scale)
    ]
    for repeat in range(-1, context.repeats):
        for world in WORLDS:
            taken = [_plan(*shard, rank=world // 2, world=world) for shard in shards]
            if repeat >= 0:
                value = median(taken) * 1e3
                context.results.add(Sample(CASE, world, clients.OURS, MEASURE, repeat, value, "ms"))
                worst = max(taken) * 1e3
                context.results.add(
                    Sample(CASE, world, clients.OURS, MEASURE + ", worst", repeat, worst, "ms")
                )


def _plan(
    key: str,
    dtype: str,
    shape: tuple[int, ...],
    itemsize: int,
    axis: int,
    *,
    rank: int,
    world: int,
) -> float:
    """Seconds to plan one tensor of which every rank holds a shard of the given shape."""
    from shardstore.storage.format.documents import ArrayMeta, array_document
    from shardstore.storage.format.grid import Box, chunk_shape_for, plan_grid, shard_edges
    from shardstore.storage.format.names import node_name

    whole = tuple(n * world if i == axis else n for i, n in enumerate(shape))
    fragments = tuple(world if i == axis else 1 for i in range(len(shape)))
    offset = tuple(rank * n if i == axis else 0 for i, n in enumerate(shape))
    # A plan that an earlier tensor of the same shape left behind would be no plan.
    chunk_shape_for.cache_clear()
    start = time.perf_counter()
    edges = shard_edges(whole, fragments)
    grid = plan_grid(whole, edges, itemsize)
    meta = ArrayMeta(key, node_name(key), grid, dtype, shard_shape=edges)
    array_document(meta)
    chunks = [meta.chunk_key(index) for index in grid.overlapping(Box(offset, shape))]
    taken = time.perf_counter() - start
    if not chunks:
        raise ValueError(f"rank {rank} of {world} writes no chunk of a tensor of shape {whole}")
    return taken
