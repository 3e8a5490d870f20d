"""The common (non-sharded) state of two ranks, compared: rank 0's is what is saved.

Answers for what is compared, for its way to the other ranks as bytes, and for the words in which a
rank logs a difference. Knows nothing of files or process groups.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import cast

from shardstore.dict_utils import dict_list_map_outplace, diff
from shardstore.errors import CheckpointingException
from shardstore.mapping import CommonStateDict, StateDict

__all__ = ["comparable", "compare_common", "log_differences", "pickled"]

logger = logging.getLogger(__name__)


def comparable(
    common: StateDict, preprocess: Callable[[CommonStateDict], StateDict] | None
) -> StateDict:
    """What of the common state is compared: a copy of it, processed if that was asked for."""
    copied = cast(StateDict, dict_list_map_outplace(lambda value: value, common))
    return preprocess(copied) if preprocess is not None else copied


def pickled(common: StateDict) -> bytes:
    """The common state on its way to the other ranks.

    Raises:
        CheckpointingException: a value can not be pickled.
    """
    try:
        return pickle.dumps(common)
    except Exception as error:
        raise CheckpointingException(
            f"the common (non-sharded) state can not be pickled: {type(error).__name__}: "
            f"{error}; keep such values out with LocalNonpersistentObject"
        ) from error


def compare_common(mine: StateDict, of_coordinator: bytes, rank: int) -> None:
    """Log where this rank's common state differs from the coordinator's, given as bytes."""
    try:
        log_differences(pickle.loads(of_coordinator), mine, rank)
    except Exception as error:
        logger.warning(
            "Rank %d common state dict could not be compared with rank 0's: %s", rank, error
        )


def log_differences(of_rank_0: StateDict, mine: StateDict, rank: int) -> None:
    """Log where this rank's common state differs from that of rank 0, if it does."""
    only_on_0, only_here, mismatched = diff(of_rank_0, mine)
    if only_on_0 or only_here or mismatched:
        logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. "
            "Keys only on rank 0: %s, Keys only on %d: %s, Mismatched keys: %s",
            rank,
            only_on_0,
            rank,
            only_here,
            mismatched,
        )
