"""``ls`` and ``info``: what is in a checkpoint. Plain text put together by hand: ten thousand lines
shall not wait for a table to be laid out."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from shardstore.cli.printing import Table, cells, clean, columns, emit, fold, say
from shardstore.cli.shared import choose, counted, human_bytes
from shardstore.errors import DamagedCheckpointError
from shardstore.inspection.layout import Module, array_bytes, modules, shard_counts
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid

__all__ = ["about", "describe", "info", "ls"]

MOST_LABEL = 60
BOLD, DIM, END = "\x1b[1m", "\x1b[2m", "\x1b[0m"


def describe(meta: ArrayMeta) -> dict[str, Any]:
    """An array for JSON."""
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


def ls(
    stored: StoredCheckpoint,
    patterns: Sequence[str],
    *,
    flat: bool,
    depth: int | None,
    as_json: bool,
    wide: bool = False,
) -> None:
    """List arrays as a tree."""
    arrays = choose(stored.arrays, patterns)
    if as_json:
        emit(
            {
                "url": stored.location.url,
                "arrays": [describe(arrays[key]) for key in sorted(arrays)],
                "bytes": sum(map(array_bytes, arrays.values())),
            }
        )
        return
    tree = modules(arrays.values())
    if flat:
        rows: list[Row] = [(meta.key, meta, None) for meta in _leaves(tree)]
    else:
        rows = [_row(level, node, depth) for level, node in tree.walk() if _shown(level, depth)]
    _print_rows(rows, columns(wide))
    total = human_bytes(tree.bytes)
    say(f"{counted(len(arrays), 'array')}, {total}")


def _shown(level: int, depth: int | None) -> bool:
    return depth is None or level < depth


def _leaves(tree: Module) -> list[ArrayMeta]:
    return [node.array for _, node in tree.walk() if node.array is not None]


Columns = tuple[str, str, str, str, str]
Row = tuple[str, ArrayMeta | None, Module | None]


def _row(level: int, node: Module, depth: int | None) -> Row:
    label = "  " * level + node.name
    collapsed = depth is not None and level + 1 >= depth and bool(node.below)
    return label, None if collapsed else node.array, node if node.below else None


def _print_rows(rows: Sequence[Row], width: int | None) -> None:
    color = sys.stdout.isatty()
    texts = [(clean(label), *_columns(meta)) for label, meta, _ in rows]
    table = Table(texts, "<<<<<>", width, most_key=MOST_LABEL)
    lines: list[str] = []
    for (_, meta, module), row in zip(rows, texts, strict=True):
        if meta is not None:
            lines += table.lines(row)
            continue
        assert module is not None
        tail = f"{counted(module.arrays, 'array')}, {human_bytes(module.bytes)}"
        lines += _headline(row[0], tail if color else f"({tail})", width, color=color)
    if lines:
        print("\n".join(lines))


def _headline(label: str, tail: str, width: int | None, *, color: bool) -> list[str]:
    """A module and what is below it, in one line where there is room."""
    bold, dim, end = (BOLD, DIM, END) if color else ("", "", "")
    if width is None or cells(label) + 2 + cells(tail) <= width:
        return [f"{bold}{label}{end}  {dim}{tail}{end}"]
    below = " " * min(len(label) - len(label.lstrip(" ")) + 4, width // 2) + tail
    named = [f"{bold}{line}{end}" for line in fold(label, width)]
    return [*named, *(f"{dim}{line}{end}" for line in fold(below, width))]


def _columns(meta: ArrayMeta | None) -> Columns:
    if meta is None:
        return "", "", "", "", ""
    return _described(meta.dtype, meta.grid, meta.shard_shape)


@lru_cache(maxsize=4096)
def _described(dtype: str, grid: Grid, shard_shape: tuple[int, ...] | None) -> Columns:
    """The same for all arrays that are alike, as most are in the layers of a model."""
    meta = ArrayMeta("", "", grid, dtype, shard_shape=shard_shape)
    counts = shard_counts(meta)
    shards = "" if counts is None else f"{'x'.join(map(str, counts))} shards"
    if counts is not None and all(count == 1 for count in counts):
        shards = "whole"
    chunk = f"{grid.size} of {_shape(grid.chunk_shape)}" if grid.size else "no chunk"
    return dtype, _shape(meta.shape), chunk, shards, human_bytes(array_bytes(meta))


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def about(stored: StoredCheckpoint) -> dict[str, Any]:
    """What is known of a checkpoint as a whole, for JSON."""
    root = stored.root
    arrays = stored.arrays
    record = (root.attributes.get("shardstore") or {}) if root is not None else {}
    try:
        config = json.loads(stored.location.read("metadata.json"))
    except (OSError, ValueError):
        config = None
    try:
        manifest = stored.manifest
        damaged = None
    except DamagedCheckpointError as error:
        manifest, damaged = None, str(error)
    ranks = {} if manifest is None else Counter(int(rank) for rank in manifest.rank)
    dtypes = Counter({meta.dtype: 0 for meta in arrays.values()})
    for meta in arrays.values():
        dtypes[meta.dtype] += array_bytes(meta)
    return {
        "url": stored.location.url,
        "zarr_format": 2 if root is None else 3,
        "backend": config,
        "format_version": None if root is None else root.format_version,
        "commit": record.get("commit") if isinstance(record, dict) else None,
        "content_metadata": None if root is None else root.attributes.get("content_metadata"),
        "arrays": len(arrays),
        "elements": sum(math.prod(meta.shape) for meta in arrays.values()),
        "bytes": sum(map(array_bytes, arrays.values())),
        "bytes_by_dtype": dict(dtypes.most_common()),
        "chunks": sum(meta.grid.size for meta in arrays.values()),
        "array_documents": root is None or root.array_documents,
        "stored_bytes": None if manifest is None else int(manifest.stored.sum()),
        "writers": len(ranks) or None,
        "manifest_damage": damaged,
    }


def _writers(commit: dict[str, Any], writers: int | None) -> str:
    wrote = f", {writers} of which wrote arrays" if writers else ""
    return f"{commit.get('world_size')} rank(s){wrote}, shardstore {commit.get('shardstore')}"


def info(stored: StoredCheckpoint, *, as_json: bool) -> None:
    """Print what is known of a checkpoint as a whole."""
    found = about(stored)
    if as_json:
        emit(found)
        return
    commit = found["commit"] or {}
    config = found["backend"] or {}
    by_dtype = ", ".join(
        f"{name} {human_bytes(size)}" for name, size in found["bytes_by_dtype"].items()
    )
    lines = {
        "checkpoint": found["url"],
        "layout": f"Zarr v{found['zarr_format']}"
        + (
            f", backend {config.get('sharded_backend')!r} {config.get('sharded_backend_version')}"
            if config
            else ""
        ),
        "arrays": f"{found['arrays']} in {found['chunks']} chunks, {found['elements']:,} elements",
        "documents": ""
        if found["array_documents"]
        else "of the root alone, none of the arrays' own",
        "size": f"{human_bytes(found['bytes'])}" + (f" ({by_dtype})" if by_dtype else ""),
        "stored": None if found["stored_bytes"] is None else human_bytes(found["stored_bytes"]),
        "saved": commit.get("created"),
        "by": None if not commit else _writers(commit, found["writers"]),
        "took": None if "seconds" not in commit else f"{commit['seconds']} s",
        "content": json.dumps(found["content_metadata"]) if found["content_metadata"] else None,
        "manifest": found["manifest_damage"],
    }
    width = columns()
    for name, value in lines.items():
        if value:
            say(*fold(clean(f"{name:<11}{value}"), width, 11))
