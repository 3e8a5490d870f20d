"""The road of a save and of a load: the steps on its page, in their order, and few walks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from testing.roads import Road, roads

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "life-of-a-save.md"


@pytest.mark.parametrize("name", ["save", "load"])
def test_a_call_takes_the_steps_of_its_page(tmp_path: Path, name: str) -> None:
    work = roads(str(tmp_path))
    if name == "load":
        work["save"]()
    road = Road(work[name])
    _, part = PAGE.read_text(encoding="utf-8").split(f"## A {name}\n", 1)
    rows = [line for line in part.split("\n## ")[0].splitlines() if line.startswith("|")]
    steps = re.findall(r"\(#(shardstore\.[\w.]+)\)", "\n".join(rows))
    assert [step for step in road.names if step in steps] == steps
    assert road.walks.total() <= 3, road.walks
