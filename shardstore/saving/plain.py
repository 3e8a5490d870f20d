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
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import xxhash

from shardstore.dict_utils import Path, diff, dotted, united
from shardstore.errors import AccessPatternError, StructureError
from shardstore.mapping import StateDict
from shardstore.storage.format import dtypes
from shardstore.values.plain import NotPlainError
from shardstore.values.record import LIST_LENGTH, as_text
from shardstore.values.torch_values import require_loadable

logger = logging.getLogger(__name__)

REMEDY = (
    "Give a value that differs between ranks a key for each rank, or make it a ShardedObject; else "
    "make the copies equal"
)


class Position(int):
    """A position in a list, as a part of a path."""


class Report(NamedTuple):
    """A rank's report about its values, at the beginning of a save.

    Attributes:
        has_shards: whether the caller gave sharded tensors, sharded objects or factories.
        adoption: whether the plain tensors became arrays, with rank 0's or the lowest rank's copy
            as main replica; ``None`` if the rank has no plain tensors.
        tensors: digest of the paths of the plain tensors.
        values: digest of all paths, and of the values if they are compared.
    """

    has_shards: bool
    adoption: Literal["no", "rank 0", "lowest"] | None
    tensors: bytes
    values: bytes


class Leaf(NamedTuple):
    """The value at one path on one rank.

    Attributes:
        digest: digest of the value; empty if it is not compared.
        is_array: whether it is a plain tensor that became an array.
        pickled: the value, unless it is a tensor or the coordinator's.
    """

    digest: bytes
    is_array: bool
    pickled: bytes = b""


def must_claim(reports: Sequence[Report]) -> bool:
    """Return whether every rank has to make arrays of its plain tensors, of which the lowest rank
    has the main replica, because the ranks hold different tensors."""
    kinds = {report.adoption for report in reports} - {None}
    if len(kinds) != 1:
        return bool(kinds)
    if kinds == {"no"} and any(report.has_shards for report in reports):
        return False
    return kinds != {"lowest"} and len({report.tensors for report in reports}) > 1


@dataclass
class PlainValues:
    """The values of one rank's state that are not sharded.

    Attributes:
        common: common values. The coordinator adds those of other ranks, in place.
        arrays: path -> plain tensor that became an array.
        compared: the common values that the ranks compare; ``None``: they compare none.
        has_shards, adoption: see :class:`Report`.
    """

    common: StateDict
    arrays: Mapping[Path, torch.Tensor]
    compared: StateDict | None
    has_shards: bool
    adoption: Literal["no", "rank 0", "lowest"]

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
        return {path: _digest(compared[path]) if path in compared else b"" for path in self.leaves}

    def report(self) -> Report:
        """Return this rank's report."""
        tensors = [path for path, value in self.leaves.items() if isinstance(value, torch.Tensor)]
        return Report(
            self.has_shards,
            self.adoption if tensors else None,
            _digest(sorted(map(repr, tensors))),
            b"" if self.has_shards else _digest(sorted(map(repr, self.digests.items()))),
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
            pickled, value = b"", self.leaves[path]
            if not isinstance(value, torch.Tensor):
                require_loadable(value, f"the value at {dotted(path)!r}")
                pickled = pickle.dumps(value)
            found[path] = Leaf(digest, path in self.arrays, pickled)
        return pickle.dumps(found)

    def unite(self, reports: Sequence[bytes], url: str, *, equal: bool) -> None:
        """Add the values that only other ranks hold to :attr:`common`. The coordinator calls it.

        Args:
            reports: :meth:`differing` of every rank, in rank order.
            url: target of the save, for texts.
            equal: raise an error for copies that differ; otherwise log a warning.

        Raises:
            AccessPatternError: the values of two ranks do not fit into one state dict, or differ.
        """
        held = {
            path: (0, Leaf(digest, path in self.arrays)) for path, digest in self.digests.items()
        }
        structure = _nested(dict.fromkeys(held))
        others: defaultdict[Path, list[int]] = defaultdict(list)
        for rank, report in enumerate(reports[1:], 1):
            new: dict[Path, Leaf] = {}
            for path, leaf in pickle.loads(report).items():
                owner, first = held.setdefault(path, (rank, leaf))
                if owner == rank:
                    new[path] = leaf
                elif leaf.is_array != first.is_array:
                    raise _conflict(url, path, rank, f"rank {owner} has a tensor or another value")
                elif leaf.digest and first.digest and not self._same(path, first, leaf):
                    others[path].append(rank)
            try:
                united(structure, _nested(dict.fromkeys(new)))
            except StructureError as error:
                raise _conflict(url, next(iter(new)), rank, str(error)) from error
            values = {path: leaf for path, leaf in new.items() if not leaf.is_array}
            united(
                self.common,
                _nested({path: pickle.loads(leaf.pickled) for path, leaf in values.items()}),
            )
        if not others:
            return
        shown = "; ".join(
            f"{dotted(path)!r} on ranks {_listed(ranks)}" for path, ranks in [*others.items()][:8]
        )
        text = (
            f"saving to {url}: {len(others)} value(s) differ between ranks, and the lowest rank's "
            f"are saved. They differ from it at {shown}. {REMEDY}"
        )
        if equal:
            path, ranks = next(iter(others.items()))
            raise AccessPatternError(
                f"replicas='equal': {text}", key=dotted(path), rank=ranks[0], url=url
            )
        logger.warning("%s; replicas='equal' makes this an error", text)

    def _same(self, path: Path, first: Leaf, other: Leaf) -> bool:
        if first.digest == other.digest:
            return True
        if not other.pickled:
            return False
        held = pickle.loads(first.pickled) if first.pickled else self.leaves[path]
        return not any(diff([held], [pickle.loads(other.pickled)]))


def _walked(x: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value of nested dicts and lists, and every empty dict and list, with its path."""
    is_list = isinstance(x, list) or LIST_LENGTH in x
    for name, value in x.items() if isinstance(x, dict) else enumerate(x):
        if name == LIST_LENGTH:
            continue
        here = (*path, Position(name) if is_list else name)
        if isinstance(value, dict | list) and value:
            yield from _walked(value, here)
        else:
            yield here, value


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


def _digest(value: Any) -> bytes:
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
            return xxhash.xxh3_128_digest(pickle.dumps(value))
    return b"?"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _conflict(url: str, path: Path, rank: int, why: str) -> AccessPatternError:
    return AccessPatternError(
        f"saving to {url}: the value at {dotted(path)!r} on rank {rank} does not fit into the "
        f"state dict of the lower ranks: {why}. Give it another key on one of the ranks",
        key=dotted(path),
        rank=rank,
        url=url,
    )
