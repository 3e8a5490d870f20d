"""``convert``: from one checkpoint format to another.

Answers for what is printed; formats, resuming and verification are :mod:`shardstore.convert`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from shardstore.cli.printing import emit, say
from shardstore.cli.shared import counted, human_bytes, progress_bar
from shardstore.convert import DEFAULT_FILE_BYTES, Progress, convert

__all__ = ["run_convert"]


def run_convert(
    source: str,
    target: str,
    *,
    source_format: str | None,
    target_format: str | None,
    memory_budget: int,
    overwrite: bool,
    resume: bool,
    check: bool,
    file_bytes: int | None,
    as_json: bool,
    source_options: Mapping[str, Any],
    target_options: Mapping[str, Any],
) -> None:
    """Convert and print what was done."""
    with ExitStack() as bars:
        progress = _Bars(bars, quiet=as_json)
        done = convert(
            source,
            target,
            source_format=source_format,
            target_format=target_format,
            memory_budget=memory_budget,
            overwrite=overwrite,
            resume=resume,
            verify=check,
            file_bytes=file_bytes or DEFAULT_FILE_BYTES,
            progress=progress,
            source_options=source_options,
            target_options=target_options,
        )
    if as_json:
        emit({"source": source, "target": target, **asdict(done)})
        return
    resumed = f", {human_bytes(done.resumed_bytes)} of it before" if done.resumed_bytes else ""
    outcome = "verified" if done.verified else "not verified"
    say(
        f"{done.source_format} -> {done.target_format}: {counted(done.tensors, 'tensor')}, "
        f"{human_bytes(done.total_bytes)}{resumed}; {outcome}"
    )


class _Bars:
    """One bar a stage; each ends where the next begins."""

    def __init__(self, bars: ExitStack, *, quiet: bool) -> None:
        self._bars, self._quiet = bars, quiet
        self._stage = ""
        self._last = 0

    def __call__(self, event: Progress) -> None:
        if event.stage != self._stage:
            self._bars.close()
            self._stage, self._last = event.stage, 0
            bar = progress_bar(event.stage, event.total_bytes, quiet=self._quiet)
            self._advance = self._bars.enter_context(bar)
        self._advance(event.done_bytes - self._last)
        self._last = event.done_bytes
