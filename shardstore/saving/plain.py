"""Agree on the values that ranks hold without Megatron-Core's types.

If no rank's state has sharded tensors, sharded objects or factories of the caller, each value is
saved, whichever rank holds it, as PyTorch DCP does. If several ranks hold a value at one path, that
of the lowest rank is saved. Plain tensors become arrays if the ranks hold different ones
(:mod:`shardstore.dtensor.adoption`). Other values that the coordinator lacks are sent to it, and it
saves them with its own. Ranks that hold equal values send only a digest.

If a rank's state has such types, the coordinator's common values are saved, as in
``core.dist_checkpointing``.
"""

from __future__ import annotations

import logging
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, starmap
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from shardstore.dict_utils import Path, Position, diff, dotted, is_flat, united
from shardstore.distributed.groups import first_of
from shardstore.dtensor.layout import ClaimedTensor, are_adopted, claims, is_claimed
from shardstore.errors import AccessPatternError, StructureError
from shardstore.mapping import StateDict
from shardstore.state_dict_utils import StateSplit, is_plain
from shardstore.storage.format import dtypes
from shardstore.values import torch_dump
from shardstore.values.plain import NotPlainError
from shardstore.values.record import LIST_LENGTH, as_text
from shardstore.values.torch_dump import require_loadable

logger = logging.getLogger(__name__)

COMPARED_WHOLE, SAMPLED = 16384, 4096
"""Copies of a tensor of up to so many elements are compared whole; of a larger one, about so many
elements."""
REMEDY = (
    "Give a value that differs between ranks a key for each rank, or make it a ShardedObject; else "
    "make the copies equal"
)


class ValueReport(NamedTuple):
    """A rank's report about its values, at the beginning of a save.

    Attributes:
        has_shards: whether the caller gave sharded tensors, sharded objects or factories.
        has_arrays: whether all plain tensors became arrays; ``None`` if the rank has none.
        tensors: digest of the paths of the plain tensors.
        values: digest of all paths, and of the values if they are compared.
    """

    has_shards: bool
    has_arrays: bool | None
    tensors: bytes
    values: bytes


class Leaf(NamedTuple):
    """The value at one path on one rank.

    Attributes:
        digest: digest of the value; empty if it is not compared.
        is_array: whether it is a plain tensor that became an array.
        values: the value alone; empty for a plain tensor of another rank than the coordinator.
    """

    digest: bytes
    is_array: bool
    values: tuple[Any, ...] = ()


def must_be_arrays(reports: Sequence[ValueReport]) -> bool:
    """Return whether every rank has to make arrays of its plain tensors: some rank does, or the
    ranks hold different tensors and no sharded types."""
    kinds = {report.has_arrays for report in reports} - {None}
    if any(report.has_shards for report in reports):
        return len(kinds) > 1
    return False in kinds and (True in kinds or len({report.tensors for report in reports}) > 1)


@dataclass
class PlainValues:
    """The values of one rank's state that are not sharded.

    Attributes:
        common: common values. The coordinator adds those of other ranks, in place.
        arrays: path -> plain tensor that became an array.
        compared: the common values that the ranks compare; ``None``: they compare none.
        has_shards: see :class:`ValueReport`.
    """

    common: StateDict
    arrays: Mapping[Path, torch.Tensor]
    compared: StateDict | None
    has_shards: bool

    @classmethod
    def of(cls, split: StateSplit, compared: StateDict | None) -> PlainValues:
        """Return the values of a state dict that was split. For ``compared`` see the attribute."""
        arrays = {
            path: value.data
            for path, value in split.shards
            if isinstance(value, ClaimedTensor) and not value.holders and value.data is not None
        }
        return cls(split.common, arrays, compared, not are_adopted(split.found))

    @cached_property
    def leaves(self) -> dict[Path, Any]:
        """The value at each path, with empty dicts and lists."""
        return {**dict(_walked(self.common)), **self.arrays}

    @cached_property
    def digests(self) -> dict[Path, bytes]:
        """The digest of each value; empty for a value that is not compared."""
        if self.compared is None:
            return dict.fromkeys(self.leaves, b"")
        compared = {**dict(_walked(self.compared)), **self.arrays}
        return {path: digest(compared[path]) if path in compared else b"" for path in self.leaves}

    def report(self) -> ValueReport:
        """Return this rank's report."""
        tensors = [path for path, value in self.leaves.items() if is_plain(value)]
        return ValueReport(
            self.has_shards,
            all(path in self.arrays for path in tensors) if tensors else None,
            digest(sorted(map(repr, tensors))),
            b"" if self.has_shards else digest(sorted(map(repr, self.digests.items()))),
        )

    def differing(self, of_coordinator: Mapping[Path, bytes]) -> bytes:
        """Return what this rank holds otherwise than the coordinator, for :meth:`unite`.

        Raises:
            CheckpointingException: a value cannot be saved.
        """
        found: dict[Path, Leaf] = {}
        for path, digest in self.digests.items():
            if of_coordinator.get(path) == digest and path in of_coordinator:
                continue
            values: tuple[Any, ...] = ()
            value = self.leaves[path]
            if not is_plain(value):
                require_loadable(value, f"the value at {dotted(path)!r}")
                values = (value,)
            found[path] = Leaf(digest, path in self.arrays, values)
        return torch_dump.pickled(found)

    def unite(self, url: str, ranks: Sequence[int], equal: bool, reports: list[bytes]) -> None:
        """Add the values that only other ranks hold to :attr:`common`. The coordinator calls it.

        Args:
            url: target of the save, for texts.
            ranks: the ranks of the save; the coordinator first.
            equal: raise an error for copies that differ; otherwise log a warning.
            reports: :meth:`differing` of each rank.

        Raises:
            AccessPatternError: the values of two ranks do not fit into one state dict, or differ.
        """
        coordinator, *others = ranks
        by_rank: dict[int, dict[Path, Leaf]]
        by_rank = dict(zip(ranks, map(pickle.loads, reports), strict=True))
        by_rank[coordinator] = {
            path: Leaf(digest, path in self.arrays, (self.leaves[path],))
            for path, digest in self.digests.items()
        }
        by_rank = _alike(by_rank)
        held = {path: (coordinator, leaf) for path, leaf in by_rank[coordinator].items()}
        structure = _nested({at: _shape(*leaf.values) for at, (_, leaf) in held.items()})
        differing: dict[Path, list[int]] = {}
        for rank in others:
            new: dict[Path, Leaf] = {}
            for path, leaf in by_rank[rank].items():
                owner, first = held.setdefault(path, (rank, leaf))
                if owner == rank:
                    new[path] = leaf
                elif leaf.is_array != first.is_array:
                    raise _conflict(url, path, rank, f"rank {owner} has a tensor or another value")
                elif leaf.digest and first.digest and not _is_same(first, leaf):
                    differing.setdefault(path, [owner]).append(rank)
            try:
                shapes = {path: _shape(*leaf.values) for path, leaf in new.items()}
                united(structure, _nested(shapes))
            except StructureError as error:
                raise _conflict(url, next(iter(new)), rank, str(error)) from error
            values = {path: leaf.values[0] for path, leaf in new.items() if not leaf.is_array}
            united(self.common, _nested(values))
        if differing:
            _tell(differing, url, equal=equal)


def _is_same(one: Leaf, other: Leaf) -> bool:
    if one.digest == other.digest or not other.values:
        return one.digest == other.digest
    if _length(one):  # as long as the other one
        return one.values == other.values
    return not any(diff([*one.values], [*other.values]))


def _length(leaf: Leaf) -> int:
    """Return the length of a list of numbers and text; 0 for all else."""
    return sum(len(value) for value in leaf.values if is_flat(value))


def _alike(by_rank: Mapping[int, Mapping[Path, Leaf]]) -> dict[int, dict[Path, Leaf]]:
    """Return the leaves of all ranks, with a leaf for each element of a list of which another rank
    has something else than such a list of the same length, as one with tensors in it."""
    lengths = defaultdict[Path, set[int]](set)
    for path, leaf in chain.from_iterable(leaves.items() for leaves in by_rank.values()):
        lengths[path].add(_length(leaf))
        for n in range(1, len(path)):
            lengths[path[:n]].add(0)

    def parts(path: Path, leaf: Leaf) -> Iterator[tuple[Path, Leaf]]:
        if len(lengths[path]) == 1 or _length(leaf) == 0:
            yield path, leaf
            return
        for number, item in enumerate(leaf.values[0]):
            hashed = digest(item) if leaf.digest else b""
            yield (*path, Position(number)), Leaf(hashed, False, (item,))

    return {
        rank: dict(chain.from_iterable(starmap(parts, leaves.items())))
        for rank, leaves in by_rank.items()
    }


def samples_of(shards: Sequence[Any], *, compares: bool) -> dict[Any, bytes]:
    """Return the identities of the shards that this rank claims, with a :func:`sample` of those of
    DTensors, if ranks compare them. Plain tensors are compared whole."""
    found: dict[Any, bytes] = {}
    for identity, shard in zip(claims(shards), filter(is_claimed, shards), strict=True):
        found[identity] = b""
        data = shard.data if compares and shard.holders else None
        if data is not None and data.numel() and dtypes.is_plain(data):
            found[identity] = sample(data)
    return found


def sample(tensor: torch.Tensor) -> bytes:
    """Return a digest by which ranks compare their copies of a tensor: that of all elements, or of
    elements that are spread evenly over a large one, the last one included."""
    if tensor.numel() > COMPARED_WHOLE:
        most = int(SAMPLED ** (1 / tensor.ndim))
        steps = [-(-n // most) for n in tensor.shape]
        starts = [(n - 1) % step for n, step in zip(tensor.shape, steps, strict=True)]
        tensor = tensor[tuple(slice(*one) for one in zip(starts, tensor.shape, steps, strict=True))]
    return digest(tensor)


def compare_samples(by_rank: Mapping[int, Mapping[Any, bytes]], url: str, *, equal: bool) -> None:
    """Log a warning of shards that several ranks hold with other elements, so that the values of
    some ranks are not saved; raise the error if they must be ``equal``."""
    first: dict[Any, tuple[int, bytes]] = {}
    differing: dict[Path, list[int]] = {}
    for rank, samples in by_rank.items():
        for identity, sample in samples.items():
            owner, expected = first.setdefault(identity, (rank, sample))
            if sample and expected and sample != expected:
                ranks = differing.setdefault((identity[0],), [owner])
                ranks += [rank] * (rank not in ranks)
    if differing:
        _tell(differing, url, equal=equal)


def _tell(differing: Mapping[Path, Sequence[int]], url: str, *, equal: bool) -> None:
    """Log that copies differ, or raise the error if they must be ``equal``.

    Args:
        differing: path -> the rank whose copy is saved, and the ranks whose copies differ.
        url: target of the save.
    """
    shown = "; ".join(
        f"{dotted(path)!r} on ranks {first_of(ranks, between=', ')} (that of rank {first} is saved)"
        for path, (first, *ranks) in [*differing.items()][:8]
    )
    text = f"saving to {url}: {len(differing)} value(s) differ between ranks: {shown}. {REMEDY}"
    if equal:
        path, ranks = next(iter(differing.items()))
        raise AccessPatternError(
            f"replicas='equal': {text}", key=dotted(path), rank=ranks[1], url=url
        )
    logger.warning("%s; replicas='equal' makes this an error", text)


def _walked(x: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value of nested dicts and lists, and every list of numbers and text and empty
    dict and list, with its path."""
    is_list = isinstance(x, list) or LIST_LENGTH in x
    for name, value in x.items() if isinstance(x, dict) else enumerate(x):
        if name == LIST_LENGTH:
            continue
        here = (*path, Position(name) if is_list else name)
        if isinstance(value, dict | list) and value and not is_flat(value):
            yield from _walked(value, here)
        else:
            yield here, value


def _shape(value: Any = None) -> Any:
    """Return what stands for a value, to see whether the values of ranks fit into one state dict:
    an empty dict or list fits with one that has values."""
    return {} if isinstance(value, dict) else [] if isinstance(value, list) else "a value"


def _nested(values: Mapping[Path, Any]) -> dict[Any, Any]:
    """Return nested dicts with values at their paths; a dict with positions stands for a list."""
    top: dict[Any, Any] = {}
    for path, value in values.items():
        place = top
        for name, inner in pairwise(path):
            place = place.setdefault(int(name) if isinstance(name, Position) else name, {})
            if isinstance(inner, Position):
                place[LIST_LENGTH] = max(place.get(LIST_LENGTH, 0), inner + 1)
        last = path[-1]
        place[int(last) if isinstance(last, Position) else last] = value
    return top


def digest(value: Any) -> bytes:
    """Return a digest that is the same for equal values of the same type."""
    if isinstance(value, torch.Tensor):
        with suppress(Exception):  # the fallback handles what is not dense memory
            data = dtypes.as_numpy(value.detach().cpu().contiguous()).reshape(-1)
            digest = xxhash.xxh3_128(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(data.view(np.uint8).data)
            return digest.digest()
    try:
        return xxhash.xxh3_128_digest(as_text(value)[1].encode())
    except NotPlainError:
        with suppress(Exception):  # the save refuses it by name
            return xxhash.xxh3_128_digest(torch_dump.pickled(value))
    return b"?"


def _conflict(url: str, path: Path, rank: int, why: str) -> AccessPatternError:
    return AccessPatternError(
        f"saving to {url}: the value at {dotted(path)!r} on rank {rank} does not fit into the "
        f"state dict of the lower ranks: {why}. Give it another key on one of the ranks",
        key=dotted(path),
        rank=rank,
        url=url,
    )
