"""Writes the golden checkpoints megatron-core-0.15.3-zarr/<layout>; refuses to write them again.

Runs inside the environment that scripts/megatron_env makes; README.md says when it was run and with
what. What it writes is described by ``states.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import states

HERE = Path(__file__).parent
TARGET = HERE / "megatron-core-0.15.3-zarr"


def main() -> None:
    """One checkpoint for each layout of ``states.GOLDEN``."""
    if TARGET.exists():
        sys.exit(f"{TARGET} exists: golden checkpoints are never written again")
    for layout in states.GOLDEN:
        subprocess.run(
            [
                sys.executable,
                HERE / "megatron_ranks.py",
                str(layout),
                f"zarr={TARGET / str(layout)}",
            ],
            check=True,
        )
        for empty_folder in [p for p in TARGET.rglob("*") if p.is_dir() and not any(p.iterdir())]:
            sys.exit(f"git would lose the empty folder {empty_folder}")


if __name__ == "__main__":
    main()
