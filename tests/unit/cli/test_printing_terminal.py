"""The bars that commands draw where standard error is a terminal, and that they draw none else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.cli_checkpoints import flip
from tests.helpers.terminal import plain, run_in_terminal


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("verify", "verify step-7 done"),
        ("stats", "read step-7 done"),
        ("diff", "compare step-7 done"),
        ("convert", "verify"),
    ],
)
def test_a_bar_is_drawn(pristine: Path, tmp_path: Path, command: str, word: str) -> None:
    more = {"diff": [pristine], "convert": [tmp_path / "copy"]}.get(command, [])
    code, drawn = run_in_terminal("stderr", command, pristine, *more)
    assert code == 0, drawn
    assert word in drawn
    assert not re.search(r"(^|\r|\n) *\u2501", plain(drawn))  # the first frame has a name too
    if command != "convert":  # for which the target is taken by now
        assert run_in_terminal("stderr", command, pristine, *more, "--json") == (0, "")


def test_findings_go_to_standard_output(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bar is on standard error: a pipe gets what is found."""
    flip(place / "counts" / "c.0")
    code, drawn = run_in_terminal("stderr", "verify", place)
    assert (code, capsys.readouterr().out.count("chunk-crc")) == (1, 1)
    assert "verify step-7 failed" in drawn
    assert "chunk-crc" not in drawn
