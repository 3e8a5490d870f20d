"""Checkpoints exchanged with the real Megatron-Core in both of its formats, to the bit.

megatron-core 0.15.3 and the present one run in an environment of their own. Each start of theirs
loads everything that was written here for it, and saves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import states
from tests.helpers.golden_ranks import save, wrong
from tests.helpers.megatron_releases import ROOT, run

PROGRAM = ROOT / "tests" / "golden" / "megatron_ranks.py"
pytestmark = [pytest.mark.long, pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, written by 1, 2 and 4 ranks."""
    folder = tmp_path_factory.mktemp("ours")
    for name in ("tp1dp1", "tp2dp1", "tp2dp2", "tp1dp4"):
        save(states.Layout.parse(name), "zarr", folder / name)
    save(states.Layout(2, 2), "torch_dist", folder / "torch_dist")
    save(states.Layout(2, 2, flat=False), "torch_dist", folder / "whole")
    return folder


@pytest.mark.parametrize("layout", ["tp1dp2", "tp2dp1"])
def test_megatron_and_we_read_each_others_checkpoints(
    tmp_path: Path, ours: Path, layout: str
) -> None:
    read = [f"load={place}" for place in ours.iterdir() if place.name != "whole"]
    backends = ("zarr", "torch_dist")
    theirs = [tmp_path / backend for backend in backends]
    written = [f"{place.name}={place}" for place in theirs]
    run("0.15.3", PROGRAM, layout, *read, *written, alone=True)
    for wanted in (states.Layout(1, 1), states.Layout(2, 1)):
        assert wrong(wanted, *theirs) == []


def test_the_present_one_and_we_read_what_the_other_wrote(tmp_path: Path, ours: Path) -> None:
    """The present one has no flattened ranges and no zarr any more."""
    theirs = tmp_path / "theirs"
    actions = [f"load={ours / 'whole'}", f"torch_dist={theirs}"]
    run("0.19.2", PROGRAM, "tp2dp1-whole", *actions, alone=True)
    for layout in (states.Layout(1, 1, flat=False), states.Layout(1, 2, flat=False)):
        assert wrong(layout, theirs) == []
