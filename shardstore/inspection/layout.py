"""How an array is cut over chunks and ranks, as rectangles to draw; sizes by module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from shardstore.inspection.opened import array_bytes
from shardstore.storage.format.documents import ArrayMeta

if TYPE_CHECKING:
    from shardstore.storage.format.manifest import Manifest

__all__ = ["Cell", "Module", "cells", "drawn_axes", "modules", "shard_counts"]

MAX_CELLS = 4096


@dataclass(frozen=True, slots=True)
class Cell:
    """A chunk as a rectangle, in elements of the two axes that are drawn.

    Attributes:
        index: index of the chunk.
        top, left, height, width: its place; a row of height 1 for arrays of one axis or none.
        rank: the rank that wrote it, if known.
    """

    index: tuple[int, ...]
    top: int
    left: int
    height: int
    width: int
    rank: int | None


def shard_counts(array: ArrayMeta) -> tuple[int, ...] | None:
    """Number of shards along each axis that it was saved from, if known."""
    if array.shard_shape is None or len(array.shard_shape) != len(array.shape):
        return None
    pairs = zip(array.shape, array.shard_shape, strict=True)
    return tuple(max(1, -(-n // max(1, edge))) for n, edge in pairs)


def drawn_axes(array: ArrayMeta) -> tuple[int | None, int | None]:
    """The vertical and the horizontal axis of a picture: those with the most chunks, else the last
    two; ``None`` for an axis that the array lacks."""
    axes = len(array.shape)
    if axes < 2:
        return None, 0 if axes else None
    counts = array.grid.counts
    best = sorted(range(axes), key=lambda axis: (-counts[axis], -axis))[:2]
    return min(best), max(best)


def cells(array: ArrayMeta, manifest: Manifest | None) -> list[Cell]:
    """The chunks of an array as rectangles, those at index 0 of the axes that are not drawn.

    At most :data:`MAX_CELLS`: a picture of more would show nothing.
    """
    if array.grid.size == 0:
        return []
    axes = drawn_axes(array)
    high, wide = (1 if axis is None else array.grid.counts[axis] for axis in axes)
    high = min(high, MAX_CELLS)
    out = []
    for place in product(range(high), range(min(wide, MAX_CELLS // high))):
        where = dict(zip(axes, place, strict=True))
        index = tuple(where.get(axis, 0) for axis in range(len(array.shape)))
        box = array.grid.box(index)
        (top, height), (left, width) = (
            (0, 1) if axis is None else (box.offset[axis], box.shape[axis]) for axis in axes
        )
        rank = None if manifest is None else manifest.writer(array, index)
        out.append(Cell(index, top, left, height, width, rank))
    return out


@dataclass
class Module:
    """A node of the tree that the dots and slashes in keys make.

    Attributes:
        name: last part of its path; several parts, if each of them has one child alone.
        bytes, arrays: size and number of all arrays at or below it.
        array: the array of exactly this path, if there is one.
        below: its children by name.
    """

    name: str
    bytes: int = 0
    arrays: int = 0
    array: ArrayMeta | None = None
    below: dict[str, Module] = field(default_factory=dict)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Module]]:
        """All nodes below, parents first, with their depths."""
        for child in self.below.values():
            yield depth, child
            yield from child.walk(depth + 1)


def modules(arrays: Iterable[ArrayMeta]) -> Module:
    """The tree of some arrays, numbers in natural order, chains of only children made one node."""
    root = Module("")
    for array in sorted(arrays, key=lambda meta: _natural(meta.key)):
        size = array_bytes(array)
        node = root
        node.bytes += size
        node.arrays += 1
        for part in _parts(array.key):
            node = node.below.setdefault(part, Module(part))
            node.bytes += size
            node.arrays += 1
        node.array = array
    for child in list(root.below.values()):
        _join_chains(child)
    return root


def _join_chains(module: Module) -> None:
    while len(module.below) == 1 and module.array is None:
        (child,) = module.below.values()
        module.name += ("" if module.name.endswith("/") else ".") + child.name
        module.array, module.below = child.array, child.below
    for child in module.below.values():
        _join_chains(child)


def _parts(key: str) -> list[str]:
    """``a/b.c`` -> ``a/``, ``b``, ``c``."""
    *folders, last = key.split("/")
    return [f"{folder}/" for folder in folders] + last.split(".")


def _natural(key: str) -> list[tuple[int, int, str]]:
    return [(0, int(p), "") if p.isdecimal() and p.isascii() else (1, 0, p) for p in _parts(key)]
