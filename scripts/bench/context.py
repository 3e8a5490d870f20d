"""What every case is given: where, how often, how large, with which clients."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from bench.results import Results


@dataclass(frozen=True, kw_only=True)
class Context:
    """Settings of one run of the benchmark.

    Attributes:
        root: an empty folder on the file system that is measured.
        repeats: rounds that count; one more before them does not.
        scale: factor on the size of every state, 1 for the published figures.
        ranks: worlds to measure saves and loads in.
        megatron_python: interpreter with megatron-core, None where there is none.
        clients: names of the clients to run.
        results: where samples go.
        orbax_python: interpreter with orbax-checkpoint, None where there is none.
    """

    root: Path
    repeats: int
    scale: float
    ranks: tuple[int, ...]
    megatron_python: str | None
    clients: tuple[str, ...]
    results: Results
    orbax_python: str | None = None

    def say(self, text: str) -> None:
        """Tell the person who waits."""
        print(text, file=sys.stderr, flush=True)
