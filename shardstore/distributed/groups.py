"""A process group as seen by one of its ranks: its size, its numbers, and errors met together.

Questions about a group that may be absent (then there is one rank). Messages go over the group
that is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from shardstore.errors import ArgumentError, RanksError

T = TypeVar("T")

Group = Any
"""A ``torch.distributed`` process group, or None for the default one."""


@contextmanager
def raise_together(group: Group, what: str) -> Iterator[None]:
    """Raise on every rank of a group if any of them raises within.

    Every rank of the group enters it, and waits for the others at its end: one reduction of a
    number; only after a failure are the texts gathered.

    Args:
        group: ranks that take part; None for all.
        what: what is being done, for the text.

    Raises:
        RanksError: naming each rank (globally numbered) that failed and how; on the rank itself its
            own error is raised.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as problem:
        error = problem
    if any_rank(error is not None, group):
        texts = gathered(None if error is None else f"{type(error).__name__}: {error}", group)
        failures = {global_rank(group, r): t for r, t in enumerate(texts) if t is not None}
        if error is None:
            listed = "; ".join(f"rank {r}: {t}" for r, t in sorted(failures.items()))
            raise RanksError(f"{what} failed on {listed}", failures=failures)
    if error is not None:
        raise error


def any_rank(flag: bool, group: Group = None) -> bool:
    """Return whether any rank of a group says so. Every rank calls it and waits for all."""
    if group_size(group) == 1:
        return flag
    said = torch.tensor([int(flag)], device=exchange_device(group))
    torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MAX, group=group)
    return bool(said.item())


def gathered(value: T, group: Group = None) -> list[T]:
    """Return what each rank of a group gives, by rank. Every rank calls it and waits for all."""
    by_rank = [value] * group_size(group)
    if len(by_rank) > 1:
        torch.distributed.all_gather_object(by_rank, value, group=group)
    return by_rank


def broadcast_bytes(data: torch.Tensor, source: int, group: Group) -> None:
    """Fill a tensor of bytes on every rank with that of one of them. Every rank calls it.

    Args:
        data: of type uint8, contiguous, on any device, as long as on the source.
        source: rank in the group.
        group: ranks that take part; None for all.
    """
    wire = data.to(exchange_device(group))
    torch.distributed.broadcast(wire, src=global_rank(group, source), group=group)
    if wire is not data and source != group_rank(group):
        data.copy_(wire)


def require_group(name: str, group: object) -> None:
    """Raise :class:`ArgumentError` unless an argument is a process group, what a rank that is no
    member of it has in its place, or None.

    Args:
        name: of the argument.
        group: what was given.
    """
    if group is None:
        return
    if torch.distributed.is_available():
        from torch.distributed.distributed_c10d import GroupMember

        outside = GroupMember.NON_GROUP_MEMBER
        if isinstance(group, torch.distributed.ProcessGroup) or group is outside:
            return
        if type(outside) is type(group) and outside == group:
            return
    raise ArgumentError(
        f"{name}={group!r:.200} must be a process group, as torch.distributed.new_group() and "
        "DeviceMesh.get_group() return it, or None"
    )


def has_ranks() -> bool:
    """Return whether there is a default process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def group_size(group: Group) -> int:
    """Return the size of a group; 1 without a process group, or if this rank is not a member."""
    return max(1, torch.distributed.get_world_size(group)) if has_ranks() else 1


def group_rank(group: Group) -> int:
    """This rank's number in a group; 0 without a process group, or where it is not a member."""
    return max(0, torch.distributed.get_rank(group)) if has_ranks() else 0


def global_rank(group: Group, rank: int) -> int:
    """Return the global number of a rank that is numbered within a group."""
    if group is None or not has_ranks():
        return rank
    return torch.distributed.get_global_rank(group, rank)


def global_ranks(group: Group) -> tuple[int, ...]:
    """Return the global numbers of a group's ranks, in its order; none where this rank is no
    member."""
    if not has_ranks():
        return (0,)
    if torch.distributed.get_world_size(group) < 1:
        return ()
    return tuple(torch.distributed.get_process_group_ranks(group))


def exchange_device(group: Group) -> torch.device:
    """Return the device on which tensors must be for this group to move them."""
    if has_ranks() and "nccl" in torch.distributed.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
