"""Commands that read: ``ls``, ``info``, ``stats``, ``show``, ``verify`` and ``diff``.

``ls`` and ``info`` import neither NumPy nor, if lines fit, rich, so that they start quickly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardstore.cli import options as opt
from shardstore.cli.printing import answer, columns, complain, emit, print_table, say
from shardstore.inspection import opened
from shardstore.inspection.opened import array_bytes, counted, human_bytes
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.identity import node_type
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid

if TYPE_CHECKING:
    from shardstore.inspection.values import ArrayDifference, Difference
    from shardstore.inspection.verify import Finding, Verified

PRINTED = 1000
"""Largest number of elements that is printed in full; NumPy prints the ends of larger arrays."""
EDGE = 3
LINE_WIDTH = 100
"""Width of lines without a terminal."""


@dataclass
class Module:
    """A node of the tree of keys, which dots and slashes separate.

    Attributes:
        bytes, arrays: size and number of all arrays at or below it.
        array: the array of exactly this path, if there is one.
        below: part of the path -> child.
    """

    bytes: int = 0
    arrays: int = 0
    array: ArrayMeta | None = None
    below: dict[str, Module] = field(default_factory=dict)

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield name and node of each child. A node with only one child is joined with it."""
        for name, node in self.below.items():
            while len(node.below) == 1 and node.array is None:
                ((part, node),) = node.below.items()
                name += ("" if name.endswith("/") else ".") + part
            yield name, node

    def walk(self, depth: int = 0) -> Iterator[tuple[int, str, Module]]:
        """Yield depth, name and node of all nodes below, parents first."""
        for name, node in self.children():
            yield depth, name, node
            yield from node.walk(depth + 1)


def modules(arrays: Iterable[ArrayMeta]) -> Module:
    """Return the tree of arrays, sorted with numbers in natural order."""
    root = Module()
    for array in sorted(arrays, key=lambda meta: _natural(meta.key)):
        path = [root]
        for part in _parts(array.key):
            path.append(path[-1].below.setdefault(part, Module()))
        for node in path:
            node.bytes += array_bytes(array)
            node.arrays += 1
        path[-1].array = array
    return root


def _parts(key: str) -> list[str]:
    """Split a key: ``a/b.c`` -> ``a/``, ``b``, ``c``."""
    *folders, last = key.split("/")
    return [f"{folder}/" for folder in folders] + last.split(".")


def _natural(key: str) -> list[tuple[int, int, str]]:
    return [(0, int(p), "") if p.isdecimal() and p.isascii() else (1, 0, p) for p in _parts(key)]


def shard_counts(array: ArrayMeta) -> tuple[int, ...] | None:
    """Return the number of saved shards along each axis, ``None`` if unknown."""
    if array.shard_shape is None:
        return None
    return tuple(max(1, count) for count in Grid(array.shape, array.shard_shape).counts)


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
    arrays = [array.meta for array in opt.choose(ckpt, keys)]
    size = sum(map(array_bytes, arrays))
    if as_json:
        emit({"url": ckpt.url, "arrays": list(map(_entry, arrays)), "bytes": size})
        return
    rows = []
    for level, name, node in modules(arrays).walk():
        if flat:
            if node.array is not None:
                rows.append((node.array.key, *describe(node.array)))
        elif depth is None or level < depth:
            about = counted(node.arrays, "array"), "", "", "", human_bytes(node.bytes)
            if node.array is not None and (level + 1 != depth or not node.below):
                about = describe(node.array)
            rows.append(("  " * level + name, *about))
    print_table(rows, "<<<<<>", columns(wide))
    say(f"{counted(len(arrays), 'array')}, {human_bytes(size)}")


def describe(meta: ArrayMeta) -> tuple[str, str, str, str, str]:
    """Return data type, shape, chunks, shards and size of an array as texts."""
    counts, grid = shard_counts(meta), meta.grid
    shards = "" if counts is None else f"{'x'.join(map(str, counts))} shards"
    if counts is not None and all(count == 1 for count in counts):
        shards = "1 shard"
    chunk = f"{grid.size} of {list(grid.chunk_shape)}" if grid.size else "no chunk"
    if meta.constant is not None:
        chunk = "a constant"
    if meta.places is not None:
        chunk += " in a pack"
    return meta.dtype, str(list(meta.shape)), chunk, shards, human_bytes(array_bytes(meta))


def _entry(meta: ArrayMeta) -> dict[str, Any]:
    """Return the description of an array for JSON."""
    return {
        "key": meta.key,
        "node": meta.node,
        "shape": meta.shape,
        "dtype": meta.dtype,
        "chunk_shape": meta.grid.chunk_shape,
        "chunks": meta.grid.size,
        "bytes": array_bytes(meta),
        "shard_shape": meta.shard_shape,
        "shards": shard_counts(meta),
        "codecs": meta.codecs,
        "constant": meta.constant is not None,
        "packs": [] if meta.places is None else sorted(meta.places.names()),
    }


def summary(found: Mapping[str, Any]) -> list[list[str]]:
    """Return :attr:`OpenCheckpoint.info` as rows of name and text, without empty values."""
    commit, config = found["commit"] or {}, found["backend"] or {}
    sizes = found["bytes_by_dtype"].items()
    by_dtype = ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes)
    backend = f"{config.get('sharded_backend')!r} {config.get('sharded_backend_version')}"
    world = commit.get("world_size")
    ranks = f"{counted(world, 'rank')}, " if isinstance(world, int) else ""
    texts = {
        "checkpoint": found["url"],
        "layout": f"Zarr v{found['zarr_format']}" + (f", backend {backend}" if config else ""),
        "arrays": f"{found['arrays']:,} in {counted(found['chunks'], 'chunk')}, "
        f"{counted(found['elements'], 'element')}",
        "documents": not found["array_documents"] and "only in the root document",
        "packs": found["packs"]
        and f"{counted(found['packed_arrays'], 'array')} in {counted(found['packs'], 'pack')}",
        "size": human_bytes(found["bytes"]) + (f" ({by_dtype})" if by_dtype else ""),
        "stored": found["stored_bytes"] is not None and human_bytes(found["stored_bytes"]),
        "saved": commit.get("created"),
        "by": f"{ranks}{found['written_by']}",
        "took": "seconds" in commit and f"{commit['seconds']} s",
        "content": found["content_metadata"] and json.dumps(found["content_metadata"]),
        "manifest": found["manifest_damage"],
    }
    return [[name, str(text)] for name, text in texts.items() if text]


def info(
    checkpoint: opt.Checkpoint, as_json: opt.Json = False, storage_option: opt.Options = None
) -> None:
    """Print a summary of a checkpoint: its save, size and data types."""
    found = opt.open_checkpoint(checkpoint, storage_option).info
    if as_json:
        emit(found)
        return
    print_table(summary(found), "<<", columns())


def stats(
    checkpoint: opt.Checkpoint,
    keys: opt.Patterns = None,
    memory: opt.Memory = "256MiB",
    wide: opt.Wide = False,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Print norm, mean, range, zeros, NaNs and infinities of arrays, read in one pass."""
    from shardstore.inspection.values import measure

    ckpt = opt.open_checkpoint(checkpoint, storage_option)
    budget = opt.parse_size(memory)
    arrays = opt.readable(opt.choose(ckpt, keys))
    found, damage = measure(arrays, budget_bytes=budget, progress=opt.bar(as_json))
    entries = []
    for array in arrays:
        about = {"key": array.key, "dtype": array.meta.dtype, "shape": array.shape}
        entries.append({**about, **asdict(found[array.key]), "damage": damage.get(array.key, [])})
    if as_json:
        emit({"url": ckpt.url, "arrays": entries})
    else:
        names = ("key", "dtype", "count", "norm", "mean", "min", "max", "zeros", "nan", "inf")
        rows = [[*names[:-2], "NaN", "Inf"]]
        rows += [[_shown(entry[name]) for name in names] for entry in entries]
        print_table(rows, "<<" + ">" * 8, columns(wide))
    for key in sorted(damage):
        for text in damage[key]:
            complain(text)
    raise typer.Exit(opt.DAMAGE if damage else 0)


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str("-" if value is None else value)


def show(
    checkpoint: opt.Checkpoint,
    key: Annotated[str, opt.argument("KEY[SLICE]", "Such as 'w[0, :5]'.")],
    limit: Annotated[int, opt.value("N", "Largest number of --json values.", at_least=1)] = 100_000,
    wide: opt.Wide = False,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Print the values of an array, or of a slice of it."""
    import numpy as np

    ckpt = opt.open_checkpoint(checkpoint, storage_option)
    name, inside = split_key(key, ckpt)
    array = ckpt[name]
    chosen = array.positions(parse_selection(inside, name))
    shape = [len(found) for (found,), single in chosen if not single]
    size = math.prod(shape)
    if as_json and size > limit:
        raise opt.UsageProblem(
            f"{size} values are more than --limit {limit}; choose a slice, such as '{name}[0, :10]'"
        )
    is_cut = not as_json and size > PRINTED
    for ranges, _ in chosen if is_cut else ():
        if len(ranges[0]) > 2 * EDGE + 1:  # only the ends of each axis are printed and read
            ranges[:] = ranges[0][: EDGE + 1], ranges[0][-EDGE:]
    values = array.select(chosen)
    values = dtypes.numbers(values)
    if as_json:
        if values.dtype.kind == "c":
            values = np.stack([values.real, values.imag], axis=-1)
        emit({"key": name, "dtype": array.meta.dtype, "shape": shape, "values": values.tolist()})
        return
    width = columns(wide)
    where = f"[{inside}]" if inside else ""
    print_table([[f"{name}{where}  {array.meta.dtype} {shape}"]], "<", width)
    threshold, line = 0 if is_cut else size, width or LINE_WIDTH
    text = np.array2string(values, threshold=threshold, edgeitems=EDGE, max_line_width=line)
    say(*text.split("\n"))


def split_key(text: str, known: Collection[str]) -> tuple[str, str]:
    """Split ``KEY[0, :5]`` into ``KEY`` and ``0, :5``; a known key with brackets is not split."""
    if text in known or not text.endswith("]") or "[" not in text:
        return text, ""
    key, _, inside = text[:-1].rpartition("[")
    return key, inside


def parse_selection(text: str, key: str) -> tuple[Any, ...]:
    """Parse a basic NumPy index: integers, slices and ellipses.

    Raises:
        UsageProblem: the text is not such an index.
    """
    parts = map(str.strip, text.rstrip(" ,").split(",")) if text.strip() else ()
    try:
        return tuple(... if part == "..." else _index(part) for part in parts)
    except (ValueError, TypeError):
        raise opt.UsageProblem(
            f"[{text}] is not an index: give integers and slices as in NumPy, such as "
            f"'{key}[0, 2:10, ::2]'"
        ) from None


def _index(text: str) -> int | slice:
    ends = [int(end) if end.strip() else None for end in text.split(":")]
    return slice(*ends) if ":" in text else int(text)


def verify(
    checkpoint: opt.Checkpoint,
    keys: opt.Patterns = None,
    hashes: Annotated[bool, opt.flag("--hashes", "128-bit hashes too, not only crc32c.")] = False,
    strict: Annotated[bool, opt.flag("--strict", "Exit with 1 for notes too.")] = False,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Verify every checksum, document and file. Exit code 1: damage was found."""
    from shardstore.inspection import verify as verification

    (location,) = opt.locate(storage_option, checkpoint)
    is_array = not location.exists("metadata.json") and node_type(location) == "array"
    is_open = is_array or not location.exists("zarr.json")  # a damaged one cannot be opened
    stored = opened.open(location).stored if is_open else StoredCheckpoint(location)
    findings: list[Finding] = []

    def found(finding: Finding) -> None:
        findings.append(finding)
        line = f"{finding.severity.upper():<7}{finding.kind:<18}{finding.message}"
        if not (as_json or say(line)) and finding.severity == "damage":
            raise typer.Exit(opt.DAMAGE)  # nobody reads the other findings

    wanted, progress = keys or (), opt.bar(as_json)
    result = verification.verify(stored, found, keys=wanted, hashes=hashes, progress=progress)
    if keys and not result.arrays and not result.objects:
        raise opt.UsageProblem(f"no key matches {', '.join(keys)}; `shardstore ls` lists all keys")
    about = {"url": location.url, "ok": result.ok, **asdict(result)}
    answer(as_json, {**about, "findings": list(map(asdict, findings))}, verdict(result))
    raise typer.Exit(0 if result.ok and not (strict and findings) else opt.DAMAGE)


def verdict(result: Verified) -> str:
    """Return the result of a verification in one line."""
    rate = result.bytes / max(result.seconds, 1e-9)
    state = "OK:" if result.ok else f"DAMAGED: {counted(result.damage, 'finding')} in"
    unchecked = f", {result.unchecked:,} without checksums" if result.unchecked else ""
    notes = f", {counted(result.notes, 'note')}" if result.notes else ""
    chunks = counted(result.chunks, "chunk") + unchecked
    return (
        f"{state} {counted(result.arrays, 'array')}, {chunks}, "
        f"{counted(result.objects, 'object')}{notes}; {human_bytes(result.bytes)} in "
        f"{result.seconds:.2f} s ({human_bytes(rate)}/s)"
    )


def diff(
    a: Annotated[str, opt.argument("A", "Path or URL of a checkpoint.")],
    b: Annotated[str, opt.argument("B", "Path or URL of another one.")],
    keys: opt.Patterns = None,
    files: Annotated[bool, typer.Option(help="Compare common.pt and sharded objects too.")] = True,
    memory: opt.Memory = "256MiB",
    wide: opt.Wide = False,
    as_json: opt.Json = False,
    storage_option: opt.Options = None,
) -> None:
    """Compare two checkpoints, by hashes first. Exit code 1: they differ."""
    from shardstore.inspection.values import compare

    left, right = map(opened.open, opt.locate(storage_option, a, b))
    budget = opt.parse_size(memory)
    wants = opened.matcher(keys)
    if keys and not any(map(wants, [*left, *right])):
        raise opt.UsageProblem(f"neither side has a key that matches {', '.join(keys)}")
    files, progress = files and not keys, opt.bar(as_json)
    found = compare(left, right, wants, files=files, budget_bytes=budget, progress=progress)
    if as_json:
        emit({"a": left.url, "b": right.url, "same": found.same, **asdict(found)})
    else:
        _print(found, columns(wide))
    raise typer.Exit(0 if found.same else opt.DAMAGE)


def _print(found: Difference, width: int | None) -> None:
    rows = [("only in A", key, "") for key in found.only_a]
    rows += [("only in B", key, "") for key in found.only_b]
    for key, parts in found.described.items():
        text = ", ".join(f"{name} {a} -> {b}" for name, (a, b) in parts.items())
        rows.append(("described", key, text))
    for key, difference in found.values.items():
        rows.append(("differs  ", key, _values(difference)))
        rows += [("damaged", key, damage) for damage in difference.damage]
    rows += [("not read", key, text) for key, text in found.unread.items()]
    rows += [("file", name, how) for name, how in found.files.items()]
    print_table(rows, "<<<", width)
    print_table([[_summary(found)]], "<", width)


def _summary(found: Difference) -> str:
    compared = found.equal + len(found.values) + len(found.described) + len(found.unread)
    if not compared and (found.only_a or found.only_b):
        return (
            f"no keys in common: {counted(len(found.only_a), 'array')} only in A, "
            f"{counted(len(found.only_b), 'array')} only in B"
        )
    how = f" ({found.hashed} by hashes)" if found.hashed else ""
    read = f", {human_bytes(found.bytes_read)} of values read" if found.bytes_read else ""
    unread = f", {len(found.unread)} not read" if found.unread else ""
    return f"{found.equal} equal{how}, {len(found.values)} with other values{unread}{read}"


def _values(found: ArrayDifference) -> str:
    relative = f" ({found.norm / found.norm_a:.3g} of |A|)" if found.norm_a else ""
    nonfinite = f", {found.nonfinite} not finite" if found.nonfinite else ""
    return (
        f"max abs {found.max_abs:.6g}, norm {found.norm:.6g}{relative}, {found.elements} of "
        f"{found.of} elements in {found.chunks} of {found.chunks_of} chunks{nonfinite}"
    )


def references(
    checkpoint: opt.Checkpoint,
    file: Annotated[str, opt.argument("FILE", "Path or URL outside of the checkpoint.")],
    storage_option: opt.Options = None,
) -> None:
    """Write references to all arrays, packed ones too, for zarr through fsspec (kerchunk)."""
    ckpt = opt.open_checkpoint(checkpoint, storage_option)
    (target,) = opt.locate(storage_option, file)
    place = ckpt.stored.location
    if target.is_within(place) or (parent := target.parent()) is None:
        raise opt.UsageProblem(f"{target.url} is inside of {place.url}; give a file outside of it")
    if parent.exists(target.name):
        raise opt.UsageProblem(f"{target.url} exists; remove it, or give another name")
    found = ckpt.references()
    parent.write(target.name, json.dumps(found).encode())
    say(f"{target.url}: {counted(len(found['refs']), 'reference')} to {ckpt.url}")


COMMANDS = (ls, info, verify, diff, stats, show, references)
