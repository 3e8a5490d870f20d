"""Safetensors files: one file, or several with an index, as Hugging Face's libraries store models.

A file is the length of the header (8 bytes, little-endian), the header (JSON: name -> ``dtype``,
``shape``, ``data_offsets``) and the tensors' bytes (safetensors documentation, "Format"). The
library safetensors reads and writes whole tensors of one process; here ranks and conversions read
and write parts.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Self, TypeAlias

import msgspec

from shardstore import errors
from shardstore.hf.urls import pinned
from shardstore.inspection.opened import array_bytes
from shardstore.storage.commit.identity import instead
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta, array_of_one_chunk
from shardstore.storage.format.names import MODEL_COMMITS
from shardstore.storage.movers.chunks import ReadDone, RegionRead
from shardstore.storage.movers.mover import Mover
from shardstore.storage.movers.ranges import FilePosition, read_bytes
from shardstore.storage.stores.location import Location

INDEX_NAME, SINGLE_NAME = MODEL_COMMITS
MAX_HEADER_BYTES = 100_000_000
START_BYTES = 256 * 1024
"""A header up to this size takes one request."""
HEADER_REQUESTS = 16
"""Concurrent requests for headers."""
METADATA = "__metadata__"
ALIGNMENT = 64
"""Size of a processor's cache line: the kernel copies data from other offsets of a file in 1.4
times the time. Headers have a multiple of this size, and so have parts of files that ranks write:
no part ends inside of an element, because the largest elements come first."""

logger = logging.getLogger(__name__)

_NAMES = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2", "C64": "complex64",
}  # fmt: skip
_CODES = {name: code for code, name in _NAMES.items()}
_PACKED = "F4"
"""Type of two numbers in a byte. Shapes in files count numbers, those of torch count bytes."""

Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """A tensor in the header of a file."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


class _Index(msgspec.Struct):
    """An index."""

    weight_map: dict[str, str]


Names: TypeAlias = Mapping[str, str] | Callable[[str], str | None] | None
"""Key in a state dict -> name in the files, as a mapping of those that differ or a function."""

_FILE_NAME = re.compile(r"(?!\.)[^\x00-\x1f/\\:?#%]{1,255}")
"""Names that stay in their folder, and set no option of a URL."""
_INDEX_NAME = re.compile(r".*\.safetensors\.index\.(.+\.)?json", re.DOTALL)
"""Names of indices, also of a variant (transformers documentation, "save_pretrained")."""

_RANK_NAME = re.compile(r"shard-(\d{5,})-.*\.safetensors", re.DOTALL)
"""Names of the files of PyTorch's ``HuggingFaceStorageWriter``, with the number of the rank."""


_WRAPPERS = re.compile(r"(?<![^.])_(?:orig_mod|checkpoint_wrapped_module)\.")
"""Parts of keys that ``torch.compile`` and checkpointed activations add."""


def names_of(
    keys: Iterable[str], names: Names, stored: Container[str] = frozenset()
) -> dict[str, str]:
    """Return the name of each key in the files, without those that have the name ``None``. A key
    that ``names`` does not change and no file has loses the parts of wrappers.

    Raises:
        ArgumentError: ``names`` is neither a mapping nor a function, or gives no text.
        KeyNameError: two keys have one name.
    """
    if not (names is None or callable(names) or isinstance(names, Mapping)):
        raise errors.ArgumentError(f"names={names!r:.100} must be a mapping or a function")
    given = {} if names is None else names
    found: dict[str, str] = {}
    keys_of: dict[str, str] = {}
    for key in keys:
        if not isinstance(given, Mapping):
            name = given(key)
        else:
            name = given.get(key, key if key in stored else _WRAPPERS.sub("", key))
        if not isinstance(name, str | None) or name == "":
            raise errors.ArgumentError(
                f"names gives key {key!r} the name {name!r}; give a text or None"
            )
        if name is not None and keys_of.setdefault(name, key) != key:
            raise errors.KeyNameError(
                f"keys {keys_of[name]!r} and {key!r} would both have the name {name!r}; change "
                "names",
                key=key,
            )
        if name is not None:
            found[key] = name
    return found


def damaged(path: str, what: object) -> errors.DamagedCheckpointError:
    """Return an error that says what is wrong with a file."""
    text = f"{path} is not a complete safetensors file ({what}); download it again"
    return errors.DamagedCheckpointError(text, url=path)


class WeightFiles:
    """Safetensors files of one folder.

    Args:
        folder: folder or prefix of the files.
        names: names of the files.
        weight_map: key -> name of the file, from the index; ``None``: all tensors of the files.

    Attributes:
        location: the folder.
        roots: names of the files.
        arrays: key -> tensor, as an array of one chunk.
        places: key -> name of the tensor's file, and its offset in bytes.
        metadata: the metadata of all files.
        left_out: keys of tensors in the files that the index leaves out.

    Raises:
        DamagedCheckpointError: a file is truncated or not a safetensors file.
        DTypeMismatchError: a tensor has a data type that cannot be stored.
        FileNotFoundError: a file is missing.
    """

    def __init__(
        self, folder: Location, names: Sequence[str], weight_map: Mapping[str, str] | None = None
    ) -> None:
        self.location, self.roots = folder, sorted(names)
        self.arrays: dict[str, ArrayMeta] = {}
        self.places: dict[str, FilePosition] = {}
        self.metadata: dict[str, str] = {}
        self.left_out: list[str] = []
        with ThreadPoolExecutor(HEADER_REQUESTS, thread_name_prefix="shardstore-io") as readers:
            headers = list(readers.map(partial(_header_of, folder), names))
        self._stamps = {name: stamp for name, (stamp, _) in zip(names, headers, strict=True)}
        for name, (stamp, text) in zip(names, headers, strict=True):
            self._add(name, stamp[0], text, weight_map)

    def _add(self, name: str, size: int, text: bytes, weight_map: Mapping[str, str] | None) -> None:
        """Add the tensors and the metadata of a file of ``size`` bytes with a header ``text``."""
        path, length = f"{self.location.url}/{name}", len(text)
        try:
            header = msgspec.convert(json.loads(text, object_pairs_hook=_unique), dict[str, Any])
            self.metadata |= (
                msgspec.convert(header.pop(METADATA, None), dict[str, str] | None) or {}
            )
            entries = msgspec.convert(header, dict[str, _Entry])
        except (msgspec.ValidationError, RecursionError, ValueError) as error:
            raise damaged(path, error) from error
        position = 0
        for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            if entry.data_offsets[0] != position:
                raise damaged(path, f"{key!r} begins at {entry.data_offsets[0]}, not {position}")
            position = entry.data_offsets[1]
        if 8 + length + position != size:
            raise damaged(path, f"{size - 8 - length} bytes for tensors of {position}")
        for key, entry in entries.items():
            shape, is_packed = entry.shape, entry.dtype == _PACKED
            if entry.dtype not in _NAMES or (is_packed and (not shape or shape[-1] % 2)):
                raise errors.DTypeMismatchError(
                    f"key {key!r} of {path} has data type {entry.dtype!r} and shape {shape}, which "
                    f"cannot be stored as a Zarr array; known: {', '.join(_NAMES)} (of {_PACKED}, "
                    "an even number on the last axis)",
                    key=key,
                    url=path,
                )
            if is_packed:
                shape = (*shape[:-1], shape[-1] // 2)
            array = array_of_one_chunk(key, shape, _NAMES[entry.dtype])
            start, stop = (8 + length + offset for offset in entry.data_offsets)
            if stop - start != array_bytes(array):
                raise damaged(path, f"{key!r} of shape {entry.shape} in bytes {start} to {stop}")
            if weight_map is None or weight_map.get(key) == name:
                self.arrays[key], self.places[key] = array, (name, start)
            elif key not in weight_map:
                self.left_out.append(key)

    @classmethod
    def open(cls, place: Location) -> Self:
        """Open a file, an index and its files, or a folder with either. In a folder, an index none
        of whose files exists is passed over for ``model.safetensors``.

        Raises:
            NotACheckpointError: there is no such file.
            DamagedCheckpointError: a file is damaged or does not match the index.
        """
        folder, name = _named(place := pinned(place))
        path = f"{folder.url}/{name}"
        try:
            if not _INDEX_NAME.fullmatch(name):
                return cls(folder, [name])
            document = folder.read(name, MAX_HEADER_BYTES)
        except FileNotFoundError:
            why = "does not exist;"
            if folder is place and has_listing(folder):
                why = "was removed, or is a link to no file; load it again, or"
            text = f"{path} {why} give the path of another file or index"
            raise errors.NotACheckpointError(text, url=path) from None
        try:
            index = msgspec.convert(json.loads(document, object_pairs_hook=_unique), _Index)
        except (msgspec.ValidationError, RecursionError, ValueError) as error:
            raise damaged(path, error) from error
        weight_map = index.weight_map
        names = list(dict.fromkeys(weight_map.values()))
        outside = [name for name in names if not _FILE_NAME.fullmatch(name)]
        listed = folder.listing() if has_listing(folder) else names
        has_both = folder is place and SINGLE_NAME in listed and SINGLE_NAME not in names
        if has_both and not set(names).intersection(listed):
            return cls(folder, [SINGLE_NAME])  # transformers leaves the index of a larger model
        if lost := outside or sorted(set(names).difference(listed)):
            what = f"it names {lost[0]!r}, which is not a file in the same folder"
            if SINGLE_NAME in listed and SINGLE_NAME not in names:
                what += f"; if it is of an older model, give the path of {SINGLE_NAME}"
            raise damaged(path, what)
        try:
            found = cls(folder, names, weight_map)
        except FileNotFoundError as error:
            raise damaged(path, f"it names {error}, which does not exist") from None
        if missing := sorted(set(weight_map) - set(found.arrays)):
            what = f"{missing[:4]} are not in the files that it names: if the model lacks them"
            raise damaged(path, f"{what}, take them out of it")
        if has_both:
            text = "%s also holds %s, which from_pretrained loads; to load it, give its path"
            logger.warning(f"{text} (loaded: the files of %s)", folder.url, SINGLE_NAME, name)
        return found

    def read(self, reads: Sequence[RegionRead], done: ReadDone = lambda *_: None) -> None:
        """Read regions, those of neighbouring tensors with one request.

        Raises:
            DamagedCheckpointError: a file is missing or truncated.
            StorageError: the store failed.
        """
        placed = [(self.places[read.array.key], read) for read in reads]
        try:
            Mover.of(self.location).read_boxes(placed, done)
        except (FileNotFoundError, EOFError) as error:
            raise self._changed(error) from error

    def read_range(self, name: str, start: int, stop: int) -> bytes | memoryview:
        """Return bytes of a file. Raise the errors of :meth:`read`."""
        try:
            return Mover.of(self.location).read_range(name, start, stop)
        except (FileNotFoundError, EOFError) as error:
            raise self._changed(error) from error

    def require_unchanged(self) -> None:
        """Raise :class:`DamagedCheckpointError` if a file was replaced after its header was read.
        Web servers are not asked, because their tags may differ between servers of one name."""
        if not has_listing(self.location):
            return
        with ThreadPoolExecutor(HEADER_REQUESTS, thread_name_prefix="shardstore-io") as readers:
            found = readers.map(self.location.stamp, self._stamps)
            for (name, stamp), now in zip(self._stamps.items(), found, strict=True):
                if _lasting(now) != _lasting(stamp):
                    raise self._changed(f"{name} was replaced")

    def _changed(self, error: object) -> errors.DamagedCheckpointError:
        text = f"{self.location.url} changed while it was read: {error}; load it again"
        return errors.DamagedCheckpointError(text, url=self.location.url)


def _lasting(stamp: tuple[int, object] | None) -> object:
    """Return the part of a stamp that a mount of a bucket keeps: without numbers of inodes."""
    return stamp and (stamp[0], stamp[1][-1] if isinstance(stamp[1], tuple) else stamp[1])


def _header_of(folder: Location, name: str) -> tuple[tuple[int, object], bytes]:
    """Return the stamp of a file, see :meth:`Location.stamp`, and its header.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedCheckpointError: the header is longer than the file, or than the library reads.
    """
    size, _ = stamp = folder.stamp(name) or (0, None)
    start = read_bytes(folder, name, 0, START_BYTES)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        path = f"{folder.url}/{name}"
        if start.startswith(b"version https://git-lfs"):
            text = f"{path} is a pointer of Git LFS to the file; run `git lfs pull` in its folder"
            raise errors.DamagedCheckpointError(text, url=path)
        raise damaged(path, f"a header of {length} bytes in a file of {size}")
    more = read_bytes(folder, name, len(start), 8 + length) if len(start) < 8 + length else b""
    return stamp, (start + more)[8 : 8 + length]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object. Raise :class:`ValueError` if a name is there twice."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"{len(pairs) - len(found)} key(s) are there twice")
    return found


def has_listing(place: Location) -> bool:
    """Return whether the names at a place can be listed. Web servers list none."""
    return not place.url.startswith(("http://", "https://"))


def _named(place: Location) -> tuple[Location, str]:
    """Return the folder, and the name of the file or index to open.

    Raises:
        NotACheckpointError: the place holds no safetensors file, or more than one without an index.
    """
    if is_file_name(place.name) and not place.is_dir():
        folder = place.parent() or place
        if _RANK_NAME.match(place.name):
            _require_all_of(folder, folder.listing() if has_listing(folder) else [place.name])
        return folder, place.name
    if not has_listing(place):
        return place, INDEX_NAME if place.read_range(INDEX_NAME, 0, 1) else SINGLE_NAME
    names = place.listing()
    indices = [name for name in names if _INDEX_NAME.fullmatch(name)]
    files = [name for name in names if name.endswith(".safetensors")]
    index, single = ([name] if name in names else [] for name in MODEL_COMMITS)
    if not (indices or single):
        _require_all_of(place, files)
    for some in (index, single, indices, files):
        if len(some) == 1 and not re.search(r"-\d+-of-(?!0*1\.)\d+\.", some[0]):  # not a part
            return place, some[0]
    if place.is_missing():
        hub = "; a model of the Hub has the URL hf://ORG/MODEL" if place.is_local else ""
        raise place.error(f" does not exist{hub}", errors.NotACheckpointError)
    found = instead(place)
    if place.is_file():
        ends = "its name ends in neither .safetensors nor .safetensors.index.json"
        text = f" is a file, but not a safetensors file: {found or ends}"
    elif indices or files:
        text = (
            f" holds {len(indices)} safetensors indices and {len(files)} files; give the path of "
        )
        text += "one" if indices else f"one, or add the index of the parts ({INDEX_NAME})"
    else:
        other = "shardstore.load reads checkpoints. Convert other models, such as "
        text = f" holds no safetensors file; {found or other + 'pytorch_model.bin, first'}"
    raise place.error(text, errors.NotACheckpointError)


def _require_all_of(folder: Location, names: Sequence[str]) -> None:
    """Raise :class:`NotACheckpointError` if the files of a folder hold the parts of tensors that
    several ranks saved: a file alone would be taken for whole tensors."""
    if {found[1] for found in map(_RANK_NAME.match, names) if found} - {"00001"}:
        raise folder.error(
            " holds the files in which each rank saved its parts of the tensors, with PyTorch's "
            "HuggingFaceStorageWriter: save with enable_consolidation=True, or consolidate them "
            "with torch.distributed.checkpoint._consolidate_hf_safetensors, first",
            errors.NotACheckpointError,
        )


def is_file_name(name: str) -> bool:
    """Return whether a name is that of a safetensors file or index."""
    return name.endswith(".safetensors") or _INDEX_NAME.fullmatch(name) is not None


def by_alignment(array: ArrayMeta) -> int:
    """Return a sort key that aligns tensors in a file, as the library safetensors does: programs
    that map files copy all others, or fail."""
    return -dtypes.itemsize(array.dtype)


@dataclass(frozen=True)
class FileLayout:
    """The files that tensors are written to.

    Attributes:
        heads: name of each file -> its header, with the length before it. The tensors follow in
            their order.
        sizes: name of each file -> its size in bytes.
        places: key -> name of the tensor's file, and its offset in bytes.
    """

    heads: dict[str, bytes]
    sizes: dict[str, int]
    places: dict[str, FilePosition]

    @classmethod
    def of(
        cls,
        arrays: Sequence[ArrayMeta],
        file_bytes: int,
        metadata: Mapping[str, str],
        single: str | None = None,
    ) -> FileLayout:
        """Lay tensors out in files, in the given order, and :func:`by_alignment` within a file. A
        pure function.

        Args:
            arrays: the tensors.
            file_bytes: largest size of the tensors of a file, if it holds more than one.
            metadata: further metadata of the first file.
            single: name of the file if there is one alone; default: that of a numbered file.

        Raises:
            DTypeMismatchError: the format lacks the data type of a tensor.
            ArgumentError: a header is too large.
        """
        groups, left = [list[ArrayMeta]()], file_bytes
        for meta in arrays:
            left -= array_bytes(meta)
            if left < 0 and groups[-1]:
                groups.append([])
                left = file_bytes - array_bytes(meta)
            groups[-1].append(meta)
        layout = cls({}, {}, {})
        for number, group in enumerate(groups, 1):
            name = f"model-{number:05}-of-{len(groups):05}.safetensors"
            if single is not None and len(groups) == 1:
                name = single
            group.sort(key=by_alignment)
            layout._add(name, group, {**(metadata if number == 1 else {}), "format": "pt"})
        return layout

    def _add(self, name: str, arrays: Sequence[ArrayMeta], metadata: Mapping[str, str]) -> None:
        """Add a file. Raise the errors of :meth:`of`."""
        header: dict[str, Any] = {METADATA: metadata}
        stop = 0
        for meta in arrays:
            is_text = meta.key.isascii() or not any("\ud800" <= c <= "\udfff" for c in meta.key)
            if meta.key == METADATA or not is_text:
                raise errors.KeyNameError(
                    f"safetensors takes no tensor of the name {meta.key!r}; rename it", key=meta.key
                )
            code, shape = _CODES.get(meta.dtype), meta.shape
            if code is None or (code == _PACKED and not shape):
                raise errors.DTypeMismatchError(
                    f"key {meta.key!r} has data type {meta.dtype} and shape {shape}, which "
                    "safetensors lacks; convert it first",
                    key=meta.key,
                )
            if code == _PACKED:
                shape = (*shape[:-1], 2 * shape[-1])
            start, stop = stop, stop + array_bytes(meta)
            header[meta.key] = _Entry(code, shape, (start, stop))
        text = msgspec.json.encode(header)
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        if len(text) > MAX_HEADER_BYTES:
            raise errors.ArgumentError(
                f"the header of {name} would have {len(text)} bytes, more than the "
                f"{MAX_HEADER_BYTES} that safetensors reads; nothing was written. It names "
                f"{len(arrays)} tensors and has {sum(map(len, metadata.values()))} bytes of "
                "metadata: write several files (file_bytes)"
            )
        head = self.heads[name] = len(text).to_bytes(8, "little") + text
        self.sizes[name] = len(head) + stop
        for meta in arrays:
            self.places[meta.key] = name, len(head) + header[meta.key].data_offsets[0]

    def index(self) -> bytes:
        """Return the document that names the file of each tensor (Hugging Face Hub
        documentation, "Sharded safetensors index")."""
        total = sum(self.sizes[name] - len(head) for name, head in self.heads.items())
        weight_map = {key: name for key, (name, _) in self.places.items()}
        about = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return json.dumps(about, indent=2).encode()
