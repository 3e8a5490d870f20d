"""Megatron-Core and this package answer alike: constructors, nested structures, checks, modes.

What Megatron-Core 0.15.3 answered is kept under tests/golden; before a release, it and later ones
are asked again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.megatron_releases import ROOT, run
from tests.helpers.same_answers import answers

GOLDEN = ROOT / "tests" / "golden" / "megatron-core-0.15.3-answers.json"
pytestmark = pytest.mark.filterwarnings("ignore")


def test_answers_are_those_of_megatron() -> None:
    wanted = json.loads(GOLDEN.read_text())
    given = answers("shardstore")
    assert list(given) == list(wanted)
    differing = {}
    for question, answer in wanted.items():
        kinds = answer.split()
        if kinds[0] == "raises":  # ours is that kind of error, or a narrower one
            same = {"raises", kinds[1]} <= set(given[question].split())
        else:
            same = given[question] == answer
        if not same:
            differing[question] = (answer, given[question])
    assert not differing


@pytest.mark.long
@pytest.mark.megatron
@pytest.mark.parametrize("version", ["0.15.3", "0.17.1", "0.19.2"])
def test_megatron_still_answers_so(tmp_path: Path, version: str) -> None:
    told = tmp_path / "answers.json"
    program = ROOT / "tests" / "helpers" / "same_answers.py"
    run(version, program, "megatron.core.dist_checkpointing", told, alone=True)
    given, wanted = json.loads(told.read_text()), json.loads(GOLDEN.read_text())
    if version != "0.15.3":  # it has no flattened ranges
        gone = {name for name in wanted if name.startswith(("range", "flat "))}
        assert {given.pop(name) for name in gone} == {"raises AttributeError"}
        wanted = {name: answer for name, answer in wanted.items() if name not in gone}
    assert given == wanted
