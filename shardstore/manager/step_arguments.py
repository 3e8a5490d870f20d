"""What a step is saved with: its number, its metrics, and the arguments that are handed on.

Pure checks of values; it saves nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal

from shardstore.errors import ArgumentError
from shardstore.manager.steps import MARK
from shardstore.mapping import CommonStateDict, StateDict
from shardstore.storage.options import StepKeywords
from shardstore.strategies.base import SaveCommonStrategy, SaveShardedStrategy

__all__ = ["AsyncSaveArguments", "SaveArguments", "metrics_of", "number_of", "without_mark"]


class SaveArguments(StepKeywords, total=False):
    """What :meth:`CheckpointManager.save` hands on; see :func:`shardstore.save`."""

    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None
    common_strategy: SaveCommonStrategy | tuple[str, int] | None
    validate_access_integrity: bool
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None
    content_metadata: dict[str, Any] | None


class AsyncSaveArguments(SaveArguments, total=False):
    """What :meth:`CheckpointManager.async_save` hands on; see :func:`shardstore.async_save`."""

    overlap_staging: bool
    staging_budget_bytes: int | None
    when_busy: Literal["wait", "refuse"]
    at_exit: Literal["wait", "abort"]


def number_of(step: object) -> int:
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"step={step!r} must be a whole number") from None
    if not 0 <= number < 10**18:
        raise ArgumentError(f"step={number} must be at least 0 and below 10**18")
    return number


def metrics_of(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    if not isinstance(metrics, Mapping | None):
        raise ArgumentError(f"metrics={metrics!r:.100} must be a dict of numbers by name")
    found = {}
    for name, value in (metrics or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ArgumentError(f"metric {name!r} is {value!r}, which is not one number") from None
    return found


def without_mark(
    preprocess: Callable[[CommonStateDict], StateDict] | None,
) -> Callable[[CommonStateDict], StateDict]:
    """Metrics may differ between ranks; rank 0's count, and nobody is told of the others'."""

    def process(common: CommonStateDict) -> StateDict:
        about = dict(common.get("content_metadata") or {})
        about.pop(MARK, None)
        common = {**common, "content_metadata": about}
        return preprocess(common) if preprocess is not None else common

    return process
