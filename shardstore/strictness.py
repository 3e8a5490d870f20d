"""Keys that a state dict and a checkpoint do not have in common, and what to do about them.

Answers for the eight modes, for which keys are missing or unexpected, and for leaving out, logging
or raising. Knows nothing of ranks, files or strategies; public as :mod:`shardstore.validation`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeAlias

from shardstore.dict_utils import extract_matching_values
from shardstore.errors import ArgumentError, CheckpointingException, MissingKeyError
from shardstore.mapping import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensor

__all__ = [
    "CkptShardedMetadata",
    "GlobalMetadata",
    "LocalMetadata",
    "StrictHandling",
    "adjust_non_strict_load",
    "maybe_report_missing_and_unexpected_keys",
    "missing_and_unexpected_keys",
    "parse_strict_flag",
]

logger = logging.getLogger(__name__)

CkptShardedMetadata: TypeAlias = dict[str, Any]
LocalMetadata: TypeAlias = list[ShardedTensor | ShardedObject]
GlobalMetadata: TypeAlias = list[LocalMetadata]


class StrictHandling(Enum):
    """What to do about keys that the state dict and the checkpoint do not have in common.

    An *unexpected* key is asked for by this rank and not in the checkpoint. A *missing* key is in
    the checkpoint and asked for by no rank.
    """

    __module__ = "shardstore.validation"  # the name that programs and their pickles know it by

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Compare nothing; an unexpected key fails when it is read."""
    LOG_UNEXPECTED = "log_unexpected"
    """Log unexpected keys and leave them out."""
    LOG_ALL = "log_all"
    """Log unexpected and missing keys and leave the unexpected ones out."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Raise if there are unexpected keys."""
    RAISE_ALL = "raise_all"
    """Raise if there are unexpected or missing keys."""
    RETURN_UNEXPECTED = "return_unexpected"
    """Leave unexpected keys out and return them."""
    RETURN_ALL = "return_all"
    """Leave unexpected keys out, and return them and the missing ones."""
    IGNORE_ALL = "ignore_all"
    """Leave unexpected keys out and say nothing."""

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Whether the checkpoint's keys have to be known before loading."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Whether all ranks' keys have to be known before loading."""
        return val in (
            StrictHandling.IGNORE_ALL,
            StrictHandling.LOG_ALL,
            StrictHandling.RAISE_ALL,
            StrictHandling.RETURN_ALL,
        )

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Whether loading returns the two sets of keys beside the state dict."""
        return val in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Turn a mode or its value into the mode.

    Args:
        strict: a :class:`StrictHandling` or the value of one, such as ``"raise_all"``.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(strict, StrictHandling):
        return strict
    try:
        return StrictHandling(strict)
    except ValueError:
        modes = ", ".join(mode.value for mode in StrictHandling)
        raise ArgumentError(f"Invalid strict flag: {strict!r}; it is one of {modes}") from None


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: Iterable[str]
) -> ShardedStateDict:
    """Leave the shards of some keys out of a state dict.

    Args:
        sharded_state_dict: state dict; it is left as it is.
        sharded_keys_to_remove: keys of ShardedTensors and ShardedObjects.

    Returns:
        A state dict without them, and without containers that held nothing else.
    """
    keys = set(sharded_keys_to_remove)
    if not keys:
        return sharded_state_dict
    _, kept = extract_matching_values(
        sharded_state_dict, lambda value: isinstance(value, ShardedBase) and value.key in keys
    )
    return dict(kept)


def missing_and_unexpected_keys(
    ckpt_sharded_metadata: CkptShardedMetadata,
    local_metadata: LocalMetadata,
    global_metadata: GlobalMetadata | None = None,
) -> tuple[set[str], set[str]]:
    """Keys stored that no rank asks for (if all are known), and asked for here but not stored."""
    stored = {item.key for item in ckpt_sharded_metadata.values()}
    wanted_here = {item.key for item in local_metadata}
    missing: set[str] = set()
    if global_metadata is not None:
        missing = stored - {item.key for one_rank in global_metadata for item in one_rank}
    return missing, wanted_here - stored


def maybe_report_missing_and_unexpected_keys(
    missing_keys: set[str], unexpected_keys: set[str], raise_error: bool = True
) -> None:
    """Raise or log if there are keys that do not match.

    Args:
        missing_keys: in the checkpoint, asked for by no rank.
        unexpected_keys: asked for by this rank, not in the checkpoint.
        raise_error: raise; otherwise log a warning.

    Raises:
        CheckpointingException: there are such keys; a :class:`MissingKeyError` if some are
            unexpected.
    """
    if not missing_keys and not unexpected_keys:
        return
    sentences = []
    if missing_keys:
        sentences.append(
            f"Missing keys (in the checkpoint, asked for by no rank): {sorted(missing_keys)}."
        )
    if unexpected_keys:
        sentences.append(
            f"Unexpected keys (asked for by this rank, not in the checkpoint): "
            f"{sorted(unexpected_keys)}."
        )
    text = " ".join(sentences)
    if not raise_error:
        logger.warning("%s", text)
        return
    text += " Another `strict` mode logs, returns or ignores them."
    if unexpected_keys:
        raise MissingKeyError(text, key=min(unexpected_keys))
    raise CheckpointingException(text)
