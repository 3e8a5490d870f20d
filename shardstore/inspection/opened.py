"""Checkpoints, and Zarr of other programs, as read-only mappings of keys to lazy arrays.

:func:`open` needs neither ranks nor torch. The commands that inspect checkpoints and the converters
use the objects that it returns. NumPy, zarr, TensorStore and torch are imported only by the methods
that need them, because a listing needs none.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import islice, product
from operator import getitem
from typing import TYPE_CHECKING, Any, cast

from shardstore import errors
from shardstore.storage.checkpoint import (
    ReplacedError,
    StoredCheckpoint,
    settled,
    unlocked_property,
)
from shardstore.storage.commit.identity import instead, is_foreign_node, node_type, warn_of_dcp
from shardstore.storage.format import documents, dtypes
from shardstore.storage.format.grid import Box
from shardstore.storage.format.names import COMMON_STATE_NAME, CONFIG_NAME, MANIFEST_NAME
from shardstore.storage.stores.location import Location, shown

if TYPE_CHECKING:
    import numpy as np
    import torch
    import zarr
    from numpy.typing import NDArray

    from shardstore.mapping import ShardedTensor
    from shardstore.storage.format.manifest import Manifest
    from shardstore.storage.movers.chunks import RegionRead

READ_TOGETHER = 8
"""Number of pieces, each at most a chunk, that a selection with steps reads at a time."""
SHOWN = 40
"""Largest number of rows in a checkpoint's table."""
SHOWN_KEY = 60
"""Characters of a key in the table. A longer key is cut in the middle."""


def open(
    place: str | os.PathLike[str] | Location, storage_options: Mapping[str, Any] | None = None
) -> OpenCheckpoint:
    """Open a checkpoint to read it. One process calls it; it needs no ranks and no torch.

    It opens checkpoints of this package and of Megatron-Core's zarr backend, and plain Zarr (v2 and
    v3, a group or a single array) of any program. It reads only the documents. Indexing an array
    reads values::

        ckpt = shardstore.open("s3://bucket/run/step-100")
        ckpt["decoder.fc1.weight"][0:8]

    Args:
        place: a folder, or a URL such as ``s3://bucket/run/step-100``.
        storage_options: options of an object store, see :func:`shardstore.save`.

    Returns:
        A mapping of keys to :class:`StoredArray`.

    Raises:
        NotACheckpointError: the place holds neither a checkpoint nor Zarr arrays; the text says
            what it holds.
        FormatVersionError, DTypeMismatchError: an array of a checkpoint has a codec, grid or data
            type that this version does not read. In Zarr of other programs, the error is raised
            when the result is indexed with the key of such an array.
        DamagedCheckpointError: the root document is missing or damaged.
        StorageError: the store failed.
    """
    return _opened(place, storage_options)


def _opened(place: Any, options: Mapping[str, Any] | None, attempt: str = "") -> OpenCheckpoint:
    """See :func:`open`. ``attempt`` is the attempt of an opened checkpoint that was pickled.

    Raises:
        ReplacedError: the checkpoint is that of another attempt.
    """
    location = settled(Location.of(place, options))
    stored = StoredCheckpoint(location)
    stored.refused = {}
    try:
        root = stored.root
    except errors.NotACheckpointError:
        if node_type(location) != "array":
            raise
        return _single(location, "zarr.json")
    if root is None:
        if location.exists(".zarray"):
            return _single(location, ".zarray")
        if not location.exists(".zgroup") or location.exists(CONFIG_NAME):
            stored.require()
            _require_zarr(location)
    if attempt and attempt != _attempt_of(root):
        raise location.error(
            " was replaced after it was opened in another process: open it again, or read a "
            "checkpoint that nobody writes over",
            ReplacedError,
        )
    warn_of_dcp(location)
    return OpenCheckpoint(stored)


def _attempt_of(root: documents.RootDocument | None) -> str:
    return "" if root is None else str(root.commit.get("attempt", ""))


_NAMED = ("endpoint_url", "region_name", "profile", "addressing_style", "anon", "requester_pays")
"""Storage options that say where a store is. Others may hold secrets, and are not pickled."""
_NESTED = ("client_kwargs", "config_kwargs", "s3")


def _named_options(options: Mapping[str, Any], url: str, above: str = "") -> dict[str, Any]:
    """Return the options to pickle.

    Raises:
        ArgumentError: there are other options, or the URL or an option has a user in it.
    """
    named: dict[str, Any] = {}
    wrong = " has a user in its URL" if _USER.search(url) else None
    for name, value in options.items():
        if name in _NESTED and isinstance(value, Mapping):
            named[name] = _named_options(value, url, f"{above}{name}.")
        elif name in _NAMED and not _USER.search(str(value)):
            named[name] = value
        elif value is not None:
            wrong = wrong or f" was opened with the storage option {above}{name}"
    if wrong:
        raise errors.ArgumentError(
            f"{shown(url)}{wrong}, which may hold a secret, so the opened checkpoint and its "
            "arrays cannot be pickled: give credentials as AWS_* variables or a profile, which the "
            "other process has too, or open it in the other process",
            url=shown(url),
        )
    return named


_USER = re.compile(r"(?s)://([^/]*|[^/]*:.*)@")


def _single(location: Location, name: str) -> OpenCheckpoint:
    """Open a single array of another program; its key is the name of its folder."""
    text = location.read(name)
    if name == "zarr.json" and not is_foreign_node(text):
        what = f" is not a checkpoint: {instead(location)}"
        raise location.error(what, errors.NotACheckpointError)
    node = location.name
    parse = documents.parse_array if name == "zarr.json" else documents.parse_v2_array
    array = parse(node, text, f"{location.url}/{name}")
    assert array is not None
    nothing = dict.fromkeys(("zarr.json", CONFIG_NAME, MANIFEST_NAME, COMMON_STATE_NAME))
    stored = StoredCheckpoint(location.parent() or location, documents=nothing)
    stored.arrays, stored.only = {array.key: array}, node
    return OpenCheckpoint(stored, location)


def _require_zarr(location: Location) -> None:
    try:
        backend = json.loads(location.read(CONFIG_NAME))["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError):
        wrong = f"/{CONFIG_NAME} is damaged: it names no backend"
        raise location.error(wrong, errors.NotACheckpointError) from None
    if backend != "zarr":
        raise errors.NotACheckpointError(
            f"{location.url} was written by the backend {backend!r}, not as Zarr arrays; "
            f"convert it first, `shardstore convert {location.url} TARGET`"
        )


def plain_tensors(common: Mapping[Any, Any]) -> dict[tuple[Any, ...], ShardedTensor]:
    """Return the dense tensors in dicts and lists of the common values, by path. Their keys are
    their paths, joined by dots.

    Raises:
        KeyNameError: two tensors have the same key.
    """
    if not common:  # nothing imports torch
        return {}
    from shardstore.dict_utils import leaves
    from shardstore.dtensor.adoption import shard
    from shardstore.mapping import ShardedTensor

    return {path: one for path, one in leaves(shard({**common})) if isinstance(one, ShardedTensor)}


class OpenCheckpoint(Mapping[str, "StoredArray"]):
    """An open checkpoint, returned by :func:`open`: key -> array, in the order of the documents.

    It can be pickled, and so can its arrays: as place, named storage options, and the attempt that
    wrote the checkpoint. Unpickling opens it again. It raises an error if another save replaced it.

    Attributes:
        url: URL of the checkpoint.
        stored: its documents and chunks, for the tools of this package.
        metas: key -> description of the array.
        refused: key -> error of each array that this version cannot read, in Zarr of other
            programs. Iteration leaves them out.
    """

    def __init__(self, stored: StoredCheckpoint, place: Location | None = None) -> None:
        self.url = stored.location.url
        self._place = place or stored.location
        self.stored = stored
        self.metas = stored.arrays
        self.refused = stored.refused or {}
        self._written: dict[str, documents.ArrayMeta] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        url, root = self._place.url, self.stored.root
        return _opened, (url, _named_options(self._place.options, url), _attempt_of(root))

    def __getitem__(self, key: str) -> StoredArray:
        """Return an array without reading its values.

        Raises:
            MissingKeyError: there is no such key; the text names the nearest keys.
            FormatVersionError, DTypeMismatchError: this version cannot read the array.
        """
        if key in self.refused:
            raise self.refused[key]
        if key not in self.metas:
            raise self.missing(key)
        return StoredArray(self, self.metas[key])

    def missing(self, key: str) -> errors.MissingKeyError:
        """Return the error for a key of no array."""
        what = f"a key in {self.url} ({len(self)} keys)"
        return missing(key, self, what if self.metas else f"{what}: {errors.NO_ARRAYS}")

    def __contains__(self, key: object) -> bool:
        return key in self.metas

    def __iter__(self) -> Iterator[str]:
        return iter(self.metas)

    def __len__(self) -> int:
        return len(self.metas)

    @property
    def nbytes(self) -> int:
        """Bytes of all values, without padding and checksums."""
        return sum(map(array_bytes, self.metas.values()))

    @unlocked_property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the root group."""
        if self.stored.root is not None:
            return self.stored.root.attributes
        return _loads_if_there(self.stored, ".zattrs")

    @unlocked_property
    def common(self) -> dict[str, Any]:
        """The common values, which rank 0 saved; empty for Zarr of other programs.

        Loading a ``common.pt`` imports torch. Common values in JSON need no torch.

        Raises:
            NotACheckpointError, DamagedCheckpointError: the file is missing or damaged.
            UnsafeObjectError: a pickled class is not allowed.
        """
        from shardstore.values.record import StateRecord

        record = StateRecord.from_root(self.attrs, self.url)
        if record is not None:
            objects = {key: self.objects[f"{key}/shard_0_1"] for key in record.files}
            return record.nested(self.url, objects)
        if self.is_foreign and not self.stored.has_file(COMMON_STATE_NAME):
            return {}
        from shardstore.loading.read import LoadContext
        from shardstore.serialization import load_common_state_dict

        return load_common_state_dict(cast(Any, LoadContext(stored=self.stored)))

    @unlocked_property
    def objects(self) -> StoredObjects:
        """Unique key (``rng/shard_0_4``) -> sharded object, loaded on access."""
        return StoredObjects(self.stored)

    @property
    def content_metadata(self) -> Any:
        """The JSON-serialisable part of ``content_metadata``; ``None`` if the save had none."""
        return self.attrs.get("content_metadata")

    @unlocked_property
    def info(self) -> dict[str, Any]:
        """A summary of the checkpoint as JSON: format, writer, sizes, metadata."""
        stored, root, metas = self.stored, self.stored.root, self.metas.values()
        manifest, damaged = self.manifest_or_damage()
        by_dtype = Counter[str]()
        for meta in metas:
            by_dtype[meta.dtype] += array_bytes(meta)
        commit = {} if root is None else root.commit
        writer = "another program" if self.is_foreign else "Megatron-Core"
        if "shardstore" in commit:
            writer = f"shardstore {commit['shardstore']}"
        return {
            "url": self.url,
            "written_by": writer,
            "created": commit.get("created"),
            "zarr_format": 2 if any(meta.zarr_format == 2 for meta in metas) else 3,
            "backend": _loads_if_there(stored, CONFIG_NAME) or None,
            "format_version": None if root is None else root.format_version,
            "commit": commit or None,
            "content_metadata": self.content_metadata,
            "arrays": len(metas),
            "elements": sum(math.prod(meta.shape) for meta in metas),
            "bytes": self.nbytes,
            "bytes_by_dtype": dict(by_dtype.most_common()),
            "chunks": sum(meta.grid.size for meta in metas),
            "array_documents": root is None or root.array_documents,
            "packs": len(root.packs or ()) if root is not None else 0,
            "packed_arrays": len(root.packed) if root is not None else 0,
            "stored_bytes": None if manifest is None else int(manifest.stored.sum()),
            "writers": None if manifest is None else len(set(manifest.rank.tolist())) or None,
            "manifest_damage": damaged,
        }

    def manifest_or_damage(self) -> tuple[Manifest | None, str | None]:
        """Return the manifest or a text that describes its damage; both ``None`` if there is no
        manifest."""
        try:
            return self.stored.manifest, None
        except errors.DamagedCheckpointError as error:
            return None, str(error)

    @property
    def is_foreign(self) -> bool:
        """See :attr:`~shardstore.storage.checkpoint.StoredCheckpoint.is_foreign`."""
        return self.stored.is_foreign

    def references(self) -> dict[str, Any]:
        """Return references to all arrays in the format of kerchunk: a document, as JSON in a file
        or as it is, that ``fsspec.filesystem("reference", fo=...)`` takes, and so zarr. It shows
        packed and plain arrays together. The readers need the options of the store.

        Raises:
            FormatVersionError: an array has another layout than those that this package saves.
        """
        from shardstore.inspection.kerchunk import references

        for meta in self.metas.values():
            if meta.zarr_format != 3 or meta.codecs is None:
                raise errors.FormatVersionError(
                    f"{self.url}: key {meta.key!r} is no array that this package saves, and its "
                    "chunks may have other names; read it with zarr",
                    key=meta.key,
                    url=self.url,
                )
        return references(self.stored.location, self.metas.values())

    def document(self, meta: documents.ArrayMeta) -> bytes:
        """Return the document of an array."""
        root = self.stored.root
        if meta.places is not None:
            return documents.array_document(meta).encode()
        if root is not None and meta.node in root.texts:
            return root.texts[meta.node]
        return self.stored.location.read(f"{meta.node}/{meta.document_name}")

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions into their destinations and verify every byte that has a checksum.

        Raises:
            ChunkMissingError, ChunkCorruptError: a chunk is missing or damaged; the text names key,
                chunk and writer.
        """
        if not self.is_foreign:
            self.stored.read(reads)
            return
        from shardstore.storage.movers.tensorstore_reader import read_decoded

        for read in reads:
            read.array = self._as_written(read.array)
        read_decoded(self.stored.location, reads, fill_missing=True)

    def _as_written(self, meta: documents.ArrayMeta) -> documents.ArrayMeta:
        """Return the description of an array with the fill value from its own document.

        Raises:
            DamagedCheckpointError: the group lists an array that is not there, whose chunks would
                read as fill values, or that was rewritten.
        """
        if meta.key not in self._written:
            url = f"{self.stored.location.url}/{meta.node}/{meta.document_name}"
            text = self.stored.location.read_if_there(f"{meta.node}/{meta.document_name}")
            parse = documents.parse_array if meta.zarr_format == 3 else documents.parse_v2_array
            if text is None or parse(meta.node, text, url) != meta:
                what = "is missing" if text is None else "differs from the copy in the group"
                raise errors.DamagedCheckpointError(
                    f"{url} {what}: the consolidated metadata of the group is old; renew it with "
                    "zarr.consolidate_metadata, or put the array back",
                    key=meta.key,
                    url=url,
                )
            self._written[meta.key] = replace(meta, codecs=None, document=text)
        return self._written[meta.key]

    def __repr__(self) -> str:
        rows = [("key", "shape", "dtype", "bytes")]
        for key, meta in islice(self.metas.items(), SHOWN):
            size = human_bytes(array_bytes(meta))
            rows.append((_shortened(clean(key)), str(meta.shape), meta.dtype, size))
        lines = aligned(rows, "<<<>")
        if len(self) > SHOWN:
            lines.append(f"... {len(self) - SHOWN:,} more")
        refused = islice(self.refused.values(), SHOWN)
        lines += [f"not readable: {clean(str(error))}" for error in refused]
        total = f"{counted(len(self), 'array')}, {human_bytes(self.nbytes)}"
        lines += [] if self.metas or self.refused else [errors.NO_ARRAYS]
        return "\n".join([f"{clean(self.url)}: {total}", *lines])


class StoredArray:
    """An array of an open checkpoint. Only indexing and :meth:`torch` read values.

    Attributes:
        checkpoint: the open checkpoint.
        key: key of the array.
        meta: description of the array, for the tools of this package.
        shape: global shape.
        ndim: number of axes.
        size: number of elements.
        nbytes: bytes of all values, without padding and checksums.
        chunks: shape of a chunk.
    """

    def __init__(self, checkpoint: OpenCheckpoint, meta: documents.ArrayMeta) -> None:
        self.checkpoint = checkpoint
        self.key = meta.key
        self.meta = meta
        self.shape, self.chunks = meta.grid
        self.ndim = len(self.shape)
        self.size = math.prod(self.shape)
        self.nbytes = array_bytes(meta)

    def __reduce__(self) -> tuple[Any, ...]:
        return getitem, (self.checkpoint, self.key)

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy data type; bfloat16 and the 8-bit floats are those of ``ml_dtypes``.
        ``float4_e2m1fn_x2`` is a structured type with one field of this name: the bytes."""
        return dtypes.numpy_dtype(self.meta.dtype)

    @unlocked_property
    def attrs(self) -> dict[str, Any]:
        """Attributes of the array."""
        if self.meta.zarr_format == 2:
            return _loads_if_there(self.checkpoint.stored, f"{self.meta.node}/.zattrs")
        return dict(json.loads(self.checkpoint.document(self.meta)).get("attributes") or {})

    @property
    def tensorstore(self) -> Any:
        """The array as ``tensorstore.TensorStore``, opened for reading.

        Raises:
            StorageError: TensorStore has no driver for the store; or several packs hold the array.
        """
        from shardstore.storage.movers.tensorstore_reader import open_array

        location, is_foreign = self.checkpoint.stored.location, self.checkpoint.is_foreign
        meta = self.checkpoint._as_written(self.meta) if is_foreign else self.meta
        return open_array(location, meta, write=False, fill_missing=is_foreign)

    @property
    def zarr(self) -> zarr.Array[Any]:
        """The array as ``zarr.Array``, opened for reading."""
        from shardstore.inspection.kerchunk import open_references
        from shardstore.storage.movers.tensorstore_reader import open_zarr

        is_plain = self.meta.places is None and self.meta.constant is None
        opener: Callable[..., Any] = open_zarr if is_plain else open_references
        return cast("zarr.Array[Any]", opener(self.checkpoint.stored.location, self.meta))

    def torch(self) -> torch.Tensor:
        """Read the whole array as a tensor on the CPU."""
        return dtypes.as_tensor(self[...])

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.key!r} is a scalar and has no length")
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            text = f"the values of {self.key!r} are in a store and must be copied; omit copy=False"
            raise ValueError(text)
        values: NDArray[Any] = self[...]
        return values if dtype is None else values.astype(dtype, copy=False)

    def __getitem__(self, selection: Any) -> Any:
        """Read a part of the array, selected by NumPy's basic indexing.

        It reads only the chunks that overlap the selection, and verifies their checksums.

        Args:
            selection: integers, slices with any steps, and at most one ellipsis.

        Returns:
            A NumPy array; a scalar if all axes have an integer.

        Raises:
            IndexRangeError: an integer is out of range, or there are more indices than axes.
            ArgumentError: an index is of another kind, such as a list of positions.
            ChunkMissingError, ChunkCorruptError: a chunk is missing or damaged; the text names key,
                chunk and writer.
        """
        parts = selection if isinstance(selection, tuple) else (selection,)
        values = self.select(self.positions(parts))
        return values if any(part is Ellipsis for part in parts) else values[()]

    def positions(self, parts: Sequence[Any]) -> list[tuple[list[range], bool]]:
        """Return for each axis the range of selected positions, in a list, and whether an integer
        selects it. Raises the errors of indexing."""
        shown = f"{clean(self.key)!r} of shape {self.shape}"
        at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
        before, after = parts[:at], parts[at + 1 :]
        count = len(before) + len(after)
        if count > self.ndim:
            raise errors.IndexRangeError(f"{count} indices are too many for {shown}", key=self.key)
        full = [slice(None)] * (self.ndim - count)
        out = []
        for axis, part in enumerate([*before, *full, *after]):
            try:
                # For torch, each tensor of one element is an integer.
                if getattr(part, "ndim", 0) or "bool" in str(getattr(part, "dtype", type(part))):
                    raise TypeError
                found = range(self.shape[axis])[part]
            except IndexError:
                raise errors.IndexRangeError(
                    f"index {part} is out of range for axis {axis} of {shown}, "
                    f"whose length is {self.shape[axis]}",
                    key=self.key,
                ) from None
            except (TypeError, ValueError):
                raise errors.ArgumentError(
                    f"{part!r:.60} is not an index of {shown}: give integers, slices and at most "
                    "one ellipsis, and use other indices on the NumPy array that this returns",
                    key=self.key,
                ) from None
            is_single = isinstance(found, int)
            out.append(([range(found, found + 1) if is_single else found], is_single))
        return out

    def select(self, chosen: Sequence[tuple[Sequence[range], bool]]) -> NDArray[Any]:
        """Return the values at the outer product of positions.

        Args:
            chosen: for each axis, the ranges of positions to read, which the result holds one
                after the other, and whether to drop the axis from the result.
        """
        import numpy as np

        from shardstore.storage.movers.chunks import RegionRead
        from shardstore.storage.runtime.parallel import run_batched

        axes = [ranges for ranges, _ in chosen]
        out = np.empty([sum(map(len, ranges)) for ranges in axes], self.dtype)

        def work(batch: Sequence[tuple[tuple[range, slice], ...]]) -> None:
            for piece in batch:
                low = tuple(min(found[0], found[-1]) for found, _ in piece)
                shape = tuple(abs(found[-1] - found[0]) + 1 for found, _ in piece)
                within: Any = (..., *(where for _, where in piece))
                steps: Any = (..., *(slice(None, None, found.step) for found, _ in piece))
                by_one = all(found.step == 1 for found, _ in piece)
                values = out[within] if by_one else np.empty(shape, out.dtype)
                self.checkpoint.read([RegionRead(self.meta, Box(low, shape), values)])
                if not by_one:
                    out[within] = values[steps]

        pieces = list(product(*map(_pieces, axes, self.chunks)))
        run_batched(pieces, work, threads=READ_TOGETHER)
        return out.squeeze(tuple(axis for axis, (_, single) in enumerate(chosen) if single))

    def __repr__(self) -> str:
        size = human_bytes(self.nbytes)
        return f"<stored array {clean(self.key)!r} {self.shape} {self.meta.dtype}, {size}>"


def _pieces(ranges: Sequence[range], edge: int) -> Iterator[tuple[range, slice]]:
    """Cut ranges with steps at chunk borders; yield each part with its slice of the result."""
    start = 0
    for rest in ranges:
        while rest:
            count = len(rest)
            if rest.step != 1:
                low = rest[0] // edge * edge
                border = low + edge - 1 if rest.step > 0 else low
                count = min(count, (border - rest[0]) // rest.step + 1)
            part, rest = rest[:count], rest[count:]
            yield part, slice(start, start + count)
            start += count


class StoredObjects(Mapping[str, Any]):
    """The sharded objects of a checkpoint by unique key.

    Attributes:
        names: unique key -> name of the file below the checkpoint.
    """

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored
        with stored.unless_replaced():
            self.names = stored.object_files()

    def __getitem__(self, key: str) -> Any:
        place = self._stored.location.url
        if key not in self.names:
            raise missing(key, self, f"an object in {place} ({len(self)} objects)")
        from shardstore.strategies.common import load_file

        name = self.names[key]
        url = f"{place}/{name}"
        with self._stored.unless_replaced():
            if (data := self._stored.document(name)) is None:
                text = f"{url}: the name is listed but is not a file"
                raise errors.DamagedCheckpointError(text, key=key)
            self._stored.check_file(name, data)
        return load_file(name, data, url, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"<sharded objects: {', '.join(map(clean, islice(self, SHOWN)))}>"


def _loads_if_there(stored: StoredCheckpoint, name: str) -> dict[str, Any]:
    try:
        found = json.loads(stored.document(name) or b"{}")
    except (errors.DamagedCheckpointError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _shortened(text: str) -> str:
    half = (SHOWN_KEY - 3) // 2
    return text if len(text) <= SHOWN_KEY else f"{text[:half]}...{text[-half:]}"


def array_bytes(meta: documents.ArrayMeta) -> int:
    """Return the bytes of the values of an array, without padding and checksums."""
    return math.prod(meta.shape) * dtypes.itemsize(meta.dtype)


def codec_error(location: Location, meta: documents.ArrayMeta) -> errors.FormatVersionError | None:
    """Return the error if nothing here decodes the codecs of an array."""
    if meta.codecs is None:
        # Imported here: TensorStore is needed only for arrays of other programs.
        from shardstore.storage.movers.tensorstore_reader import open_decoded

        try:
            open_decoded(location, meta)
        except errors.FormatVersionError as error:
            return error
    return None


def missing(key: str, known: Iterable[str], what: str) -> errors.MissingKeyError:
    """Return the error for a missing key. Its text names similar keys.

    Args:
        key: the missing key.
        known: all keys.
        what: the place of the keys, such as ``a key in /run/step-100 (7 keys)``.
    """
    names = list(known)
    near = get_close_matches(str(key), names, n=3, cutoff=0.5)
    near = near or [name for name in names if str(key).lower() in name.lower()][:3]
    hint = f"did you mean {', '.join(map(clean, near))}?" if near else "`shardstore ls` lists all"
    return errors.MissingKeyError(f"{key!r} is not {what}; {hint}", key=key)


def matcher(patterns: Sequence[str] | None) -> Callable[[str], bool]:
    """Return a function that tells whether a key matches a pattern: a key, a prefix up to a dot or
    slash, or a shell pattern. Without patterns, all keys match."""

    def wanted(key: str) -> bool:
        return not patterns or any(
            key == pattern
            or key.startswith((f"{pattern}.", f"{pattern}/"))
            or fnmatchcase(key, pattern)
            for pattern in patterns
        )

    return wanted


def clean(text: str) -> str:
    """Escape all unprintable characters of a text: ESC becomes ``\\x1b``, a newline ``\\n``."""
    if text.isprintable():
        return text
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return "".join(shown)


def cells(text: str) -> int:
    """Return the columns that a text needs on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def aligned(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Return rows as lines whose cells are aligned in columns.

    Args:
        rows: rows with the same number of cells.
        align: ``<`` or ``>`` for each column.
    """
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        # The length of a text with wide characters differs from the columns that it needs.
        padded = (
            f"{text:{side}{width + len(text) - cells(text)}}"
            for text, side, width in zip(row, align, widths, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    return lines


def counted(count: int, what: str) -> str:
    """Return a count with its noun: ``1 chunk``, ``2 chunks``."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def human_bytes(size: float) -> str:
    """Return a size as text: ``1.5 GiB``."""
    power = min(4, max(0, (int(size).bit_length() - 1) // 10))
    return f"{size / 1024**power:.1f} {' KMGT'[power]}iB" if power else f"{int(size)} B"
