"""What the reports of all ranks have to agree in before a save begins, and before it commits.

Called by the coordinator. Each raises :class:`AccessPatternError`, with the ranks and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardstore.errors import AccessPatternError
from shardstore.storage.merging import Merged

__all__ = ["check_common", "check_kinds", "check_objects", "same_target"]


def same_target(reports: list[dict[str, Any]]) -> None:
    """All ranks save to one place, upon one base; by what each told at the beginning."""
    first = reports[0]["target"]
    for rank, report in enumerate(reports):
        if report["target"] != first:
            raise AccessPatternError(
                f"rank 0 saves to {first} but rank {rank} to {report['target']}; give every rank "
                "the same place",
                rank=rank,
            )
        if report["base"] != reports[0]["base"]:
            raise AccessPatternError(
                f"rank 0 saves with base={reports[0]['base']} but rank {rank} with "
                f"base={report['base']}; give every rank the same",
                rank=rank,
            )


def check_kinds(merged: Merged) -> None:
    """No key is both a tensor's and an object's: loading could not tell which is meant."""
    objects = {unique_key.rpartition("/shard_")[0] for unique_key in merged.objects}
    for meta in merged.arrays:
        if meta.key in objects:
            raise AccessPatternError(
                f"Invalid access pattern: key {meta.key!r} is both a tensor's and a sharded "
                "object's; rename one of them",
                key=meta.key,
            )


def check_objects(objects: Mapping[str, list[int]]) -> None:
    """Each sharded object written once, and each grid of objects complete."""
    grids: dict[tuple[str, str], int] = {}
    for unique_key, ranks in objects.items():
        if len(ranks) > 1:
            raise AccessPatternError(
                f"Invalid access pattern: object {unique_key!r} was written by ranks "
                f"{sorted(ranks)}; only one may hold it as main "
                "replica",
                key=unique_key,
            )
        key, _, shard = unique_key.rpartition("/shard_")
        shape = shard.rpartition("_")[2]
        grids[key, shape] = grids.get((key, shape), 0) + 1
    for (key, shape), count in grids.items():
        wanted = 1
        for n in shape.split("."):
            wanted *= int(n) if n else 1
        if count != wanted:
            raise AccessPatternError(
                f"Invalid access pattern: {count} of the {wanted} objects of key {key!r} (global "
                f"shape {shape.replace('.', ' x ')}) "
                "were written; every part needs one main replica",
                key=key,
            )


def check_common(merged: Merged, common_keys: frozenset[str], rank: int | None) -> None:
    """Nothing is both an array and common state: it could not be loaded.

    Args:
        merged: what was written.
        common_keys: keys of plain tensors that the coordinator keeps in the common state.
        rank: one whose state has DTensors, so that its plain tensors are arrays.
    """
    both = sorted({meta.key for meta in merged.arrays} & common_keys)
    if both:
        raise AccessPatternError(
            f"the plain tensor {both[0]!r} is common state on rank 0, whose state has no DTensors, "
            f"and an array on rank {rank}, whose state has some ({len(both)} such tensor(s)); "
            "leave it out of the state of the one or the other, or make it a ShardedTensor on "
            "every rank that has it",
            key=both[0],
            rank=rank,
        )
