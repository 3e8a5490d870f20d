"""The benchmark lifts the kernel's limit of dirty pages for a sample, and puts it back."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing import machine

NAMES = ("dirty_bytes", "dirty_ratio", "dirty_background_bytes", "dirty_background_ratio")


class Limits:
    """The kernel's four files: one of bytes and ratio counts, the other one reads 0."""

    def __init__(self, folder: Path, **values: int) -> None:
        self.folder = folder
        for name in NAMES:
            (folder / name).write_text(str(values.get(name, 0)))

    def read(self) -> dict[str, int]:
        return {name: int((self.folder / name).read_text()) for name in NAMES}


@pytest.mark.parametrize(
    "before",
    [
        {"dirty_ratio": 20, "dirty_background_ratio": 10},
        {"dirty_bytes": 5 << 20, "dirty_background_bytes": 1 << 20},
    ],
)
def test_limits_are_restored_after_a_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, int]
) -> None:
    limits = Limits(tmp_path, **before)
    monkeypatch.setattr(machine, "_LIMITS", tmp_path)
    with machine.no_throttling():
        assert limits.read()["dirty_bytes"] == machine.DIRTY_BYTES
        # The kernel itself makes the ratios 0 then.
        for name in ("dirty_ratio", "dirty_background_ratio"):
            (tmp_path / name).write_text("0")
    found = limits.read()
    assert {name: found[name] for name in before} == before


def test_without_the_right_to_set_limits_a_benchmark_still_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_LIMITS", tmp_path / "none")
    with machine.no_throttling():
        assert not machine.may_set_limits()
