"""Commands ``ls`` and ``info``. They import neither NumPy nor rich where output is not a terminal:
ten thousand lines are printed at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from shardstore.cli import options as opt
from shardstore.cli.printing import columns, emit, fold, print_table, say
from shardstore.inspection.layout import modules, shard_counts
from shardstore.inspection.opened import array_bytes, clean, counted, human_bytes
from shardstore.storage.format.documents import ArrayMeta


def ls(
    checkpoint: opt.Checkpoint,
    keys: opt.Patterns = None,
    flat: Annotated[bool, opt.flag("--flat", "Whole keys instead of a tree.")] = False,
    depth: Annotated[int | None, opt.value("N", "Levels of the tree.", at_least=1)] = None,
    wide: opt.Wide = False,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """List the arrays: data type, shape, chunks, shards, size."""
    ckpt = opt.open_checkpoint(checkpoint, storage_option)
    arrays = {key: array.meta for key, array in opt.choose(ckpt, keys).items()}
    size = sum(map(array_bytes, arrays.values()))
    if as_json:
        listed = [_entry(arrays[key]) for key in sorted(arrays)]
        emit({"url": ckpt.url, "arrays": listed, "bytes": size})
        return
    rows = []
    for level, node in modules(arrays.values()).walk():
        is_collapsed = not flat and level + 1 == depth and bool(node.below)
        if node.array is not None and not is_collapsed:
            label = node.array.key if flat else "  " * level + node.name
            about = describe(node.array)
        elif not flat:
            label = "  " * level + node.name
            about = counted(node.arrays, "array"), "", "", "", human_bytes(node.bytes)
        else:
            continue
        if flat or depth is None or level < depth:
            rows.append((label, *about))
    print_table(rows, "<<<<<>", columns(wide))
    say(f"{counted(len(arrays), 'array')}, {human_bytes(size)}")


def describe(meta: ArrayMeta) -> tuple[str, str, str, str, str]:
    """Data type, shape, chunks, shards and size of an array, as texts."""
    counts, grid = shard_counts(meta), meta.grid
    shards = "" if counts is None else f"{'x'.join(map(str, counts))} shards"
    if counts is not None and all(count == 1 for count in counts):
        shards = "whole"
    chunk = f"{grid.size} of {list(grid.chunk_shape)}" if grid.size else "no chunk"
    return meta.dtype, str(list(meta.shape)), chunk, shards, human_bytes(array_bytes(meta))


def _entry(meta: ArrayMeta) -> dict[str, Any]:
    """An array, for JSON."""
    shards = shard_counts(meta)
    return {
        "key": meta.key,
        "node": meta.node,
        "shape": list(meta.shape),
        "dtype": meta.dtype,
        "chunk_shape": list(meta.grid.chunk_shape),
        "chunks": meta.grid.size,
        "bytes": array_bytes(meta),
        "shard_shape": None if meta.shard_shape is None else list(meta.shard_shape),
        "shards": None if shards is None else list(shards),
        "codecs": None if meta.codecs is None else list(meta.codecs),
    }


def summary(found: Mapping[str, Any]) -> dict[str, object]:
    """What :attr:`OpenCheckpoint.info` has, as texts; empty values are to be left out."""
    commit, config = found["commit"] or {}, found["backend"] or {}
    by_dtype = ", ".join(
        f"{name} {human_bytes(size)}" for name, size in found["bytes_by_dtype"].items()
    )
    backend = f"{config.get('sharded_backend')!r} {config.get('sharded_backend_version')}"
    world, writers = commit.get("world_size"), found["writers"]
    by = counted(world, "rank") if isinstance(world, int) else "ranks"
    by += f", {writers:,} of which wrote arrays" if writers and writers != world else ""
    by += f", shardstore {commit.get('shardstore')}"
    return {
        "checkpoint": found["url"],
        "layout": f"Zarr v{found['zarr_format']}" + (f", backend {backend}" if config else ""),
        "arrays": f"{found['arrays']:,} in {counted(found['chunks'], 'chunk')}, "
        f"{counted(found['elements'], 'element')}",
        "documents": not found["array_documents"] and "of the root alone, none of the arrays' own",
        "size": human_bytes(found["bytes"]) + (f" ({by_dtype})" if by_dtype else ""),
        "stored": found["stored_bytes"] is not None and human_bytes(found["stored_bytes"]),
        "saved": commit.get("created"),
        "by": commit and by,
        "took": "seconds" in commit and f"{commit['seconds']} s",
        "content": found["content_metadata"] and json.dumps(found["content_metadata"]),
        "manifest": found["manifest_damage"],
    }


def info(
    checkpoint: opt.Checkpoint, as_json: opt.Json = False, storage_option: opt.Options = None
) -> None:
    """Print what is known of a checkpoint as a whole."""
    found = opt.open_checkpoint(checkpoint, storage_option).info
    if as_json:
        emit(found)
        return
    for name, value in summary(found).items():
        if value:
            say(*fold(clean(f"{name:<12}{value}"), columns(), 12))
