"""Size and rank numbers of a process group, and collective errors and values.

Without a process group, the functions act as for one rank. Messages use the given group.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from shardstore.errors import ArgumentError, CheckpointingException, RanksError

logger = logging.getLogger(__name__)

T = TypeVar("T")

Group = Any
"""A ``torch.distributed`` process group, or None for the default one."""

Members: TypeAlias = range | tuple[int, ...]
"""Global numbers of a group's ranks; a range, if they are evenly spaced, to send few bytes."""


@contextmanager
def raise_together(group: Group, what: str) -> Iterator[None]:
    """Raise on every rank of a group if the block raises on any of them.

    Every rank of the group enters it, and waits for the others at its end. That costs one reduction
    of a number. The error texts are gathered only after a failure.

    Args:
        group: the participating ranks; None for all.
        what: the step, for the error text.

    Raises:
        RanksError: another rank failed; the text names the failed ranks by their global numbers,
            with their errors. A failed rank raises its own error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as problem:
        error = problem
    if largest([int(error is not None)], group)[0]:
        failures = failures_on(error, group)
        raise error or RanksError(f"{what} failed on {listed(failures)}", failures=failures)


def failures_on(error: BaseException | None, group: Group = None) -> dict[int, str]:
    """Return the texts of the errors of a group's ranks, by the global numbers of the ranks that
    have one. Every rank of the group calls it and waits for all."""
    texts = gathered(None if error is None else described(error), group)
    by_rank = zip(global_ranks(group), texts, strict=True)
    return {rank: text for rank, text in by_rank if text is not None}


def described(error: BaseException) -> str:
    """Return the text of an error for other ranks."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, CheckpointingException) else f"{type(error).__name__}: {text}"


def listed(failures: Mapping[int, str]) -> str:
    """Return the failures of ranks as one text; it names at most eight."""
    return first_of(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))


def first_of(values: Iterable[object], most: int = 8, *, between: str = "; ") -> str:
    """Return values as one text. It names at most ``most`` and counts the others."""
    texts = [str(value) for value in values]
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return between.join([*texts[:most], *more])


def tell_launched(url: str) -> None:
    """Log a warning if a launcher started this process as one of several ranks, and it saves
    without a process group, to a place that does not have its number in its name or its folder's
    (``rank-3``, ``rank-3/step-100``). Rank 0 may save for all."""
    rank, names = os.environ.get("RANK", "").lstrip("0"), " ".join(url.split("/")[-2:])
    if not rank or dist.is_initialized() or rank in re.findall(r"0*(\d+)(?![0-9A-Za-z])", names):
        return
    logger.warning(
        "saving to %s: RANK=%s saves alone, as if no other rank did, because there is no process "
        "group: call torch.distributed.init_process_group() first, so that all ranks save "
        "together, or give each rank a place of its own",
        url,
        rank,
    )


def largest(numbers: list[int], group: Group = None) -> list[int]:
    """Return the largest number of any rank at each position. Every rank of the group calls it with
    as many numbers, and waits for all."""
    if group_size(group) == 1:
        return numbers
    reduced = torch.tensor(numbers, dtype=torch.int64, device=exchange_device(group))
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
    return reduced.tolist()


def gathered(value: T, group: Group = None) -> list[T]:
    """Return the values of all ranks of a group, in rank order. Every rank calls it and waits for
    all."""
    by_rank = [value] * group_size(group)
    if len(by_rank) > 1:
        dist.all_gather_object(by_rank, value, group=group)
    return by_rank


def broadcast_bytes(data: torch.Tensor, source: int, group: Group) -> None:
    """Copy a tensor of bytes from one rank to all. Every rank of the group calls it and waits.

    Args:
        data: contiguous uint8 tensor on any device, as long as on the source. It is overwritten on
            all ranks but the source.
        source: rank number within the group.
        group: the participating ranks; None for all.
    """
    wire = data.to(exchange_device(group))
    dist.broadcast(wire, group_src=source, group=group)
    if wire is not data and source != group_rank(group):
        data.copy_(wire)


def require_group(name: str, group: object) -> None:
    """Check that an argument is a process group, the placeholder of a rank outside it, or None.

    Args:
        name: name of the argument, for the error text.
        group: the argument.

    Raises:
        ArgumentError: the argument is something else.
    """
    outside: object = dist.GroupMember.NON_GROUP_MEMBER  # a number
    is_outside = type(group) is type(outside) and group == outside
    if group is None or is_outside or isinstance(group, dist.ProcessGroup):
        return
    raise ArgumentError(
        f"{name}={group!r:.200} must be a process group, as torch.distributed.new_group() and "
        "DeviceMesh.get_group() return it, or None"
    )


def group_size(group: Group) -> int:
    """Return the size of a group; 1 without a process group, or if this rank is not a member."""
    return max(1, dist.get_world_size(group)) if dist.is_initialized() else 1


def group_rank(group: Group) -> int:
    """Return this rank's number in a group; 0 without a process group, or if it is not a member."""
    return max(0, dist.get_rank(group)) if dist.is_initialized() else 0


def global_ranks(group: Group) -> Members:
    """Return the global numbers of a group's ranks, in the group's order; empty if this rank is not
    a member."""
    if group is None or not dist.is_initialized():
        return range(group_size(None))
    if dist.get_world_size(group) < 1:
        return ()
    return members_of(tuple(dist.get_process_group_ranks(group)))


def members_of(ranks: tuple[int, ...]) -> Members:
    """Return the shortest form of a group's ranks; equal for equal ranks."""
    if len(ranks) > 1 and ranks[0] < ranks[1]:
        regular = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if tuple(regular) == ranks:
            return regular
    return ranks


def exchange_device(group: Group) -> torch.device:
    """Return the device of tensors that this group can send: CUDA for NCCL, else the CPU."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
