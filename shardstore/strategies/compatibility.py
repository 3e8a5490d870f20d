"""Whether a strategy can read what a checkpoint was written by, and the words of the refusal."""

from __future__ import annotations

from shardstore.errors import FormatVersionError, NotACheckpointError

__all__ = ["require_backend", "require_version"]


def require_backend(what: str, written_by: str, own: str, argument: str) -> None:
    """Raise unless something was written by the strategy's own backend.

    Args:
        what: what was written, for the text.
        written_by: the backend that wrote it.
        own: the backend that the strategy reads.
        argument: the argument of :func:`shardstore.load` that chose the strategy.

    Raises:
        NotACheckpointError: it was another one.
    """
    if written_by != own:
        raise NotACheckpointError(
            f"{what} was written by backend {written_by!r}, this strategy reads {own!r}; "
            f"leave {argument} out to have the right one chosen"
        )


def require_version(what: str, written_by: int, backend: str, *known: int) -> None:
    """Raise unless something was written by a version that the strategy reads.

    Args:
        what: what was written, for the text.
        written_by: the version that wrote it.
        backend: the backend that it is a version of.
        known: the versions that the strategy reads.

    Raises:
        FormatVersionError: it is none of them.
    """
    if written_by not in known:
        raise FormatVersionError(
            f"{what} has version {written_by!r} of the {backend!r} backend, this version of "
            f"shardstore reads {' and '.join(map(str, known))}: upgrade shardstore to load it"
        )
