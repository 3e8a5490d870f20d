"""Blocks that the ranks of a host read for each other."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.hf import sharing
from shardstore.hf.sharing import is_scattered, plan_shared, wanted_by
from shardstore.storage.format.documents import array_of_one_chunk
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunks import RegionRead

START = 24


@st.composite
def wishes(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[int, list[tuple[str, Box]]]]:
    """The shape of a tensor, and the boxes of it that each of three ranks wants."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    reports: dict[int, list[tuple[str, Box]]] = {}
    for rank in range(3):
        reports[rank] = []
        for _ in range(draw(st.integers(0, 2))):
            edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
            if all(low < high for low, high in edges):
                box = Box(tuple(e[0] for e in edges), tuple(e[1] - e[0] for e in edges))
                reports[rank].append(("w", box))
    return shape, reports


@given(wishes(), st.sampled_from(["float32", "int8"]), st.integers(1, 40))
def test_every_rank_gets_its_boxes_and_no_byte_is_read_twice(
    wished: tuple[tuple[int, ...], dict[int, list[tuple[str, Box]]]], dtype: str, most: int
) -> None:
    shape, reports = wished
    meta = array_of_one_chunk("w", shape, dtype)
    whole = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    file = np.frombuffer(bytes(START) + whole.tobytes(), np.uint8)
    with patch.object(sharing, "REQUEST_BYTES", max(most, whole.itemsize)):
        wanted = wanted_by(reports).of(0)
        blocks = plan_shared(wanted, {"w": meta}, {"w": ("file", START)})
    got = {
        (rank, box): np.full(box.shape, -1, dtype)
        for boxes in wanted.values()
        for box, ranks in boxes.items()
        for rank in ranks
    }
    times = np.zeros(len(file), int)
    for block in blocks:
        assert block.size <= max(most, whole.itemsize)
        assert block.owner in {piece.rank for piece in block.pieces}
        times[block.start : block.stop] += 1
        data = file[block.start : block.stop]
        for piece in block.pieces:
            values = piece.within(data).view(dtype)
            out = got[piece.rank, piece.held][piece.box.relative_to(piece.held.offset).slices]
            assert (out == -1).all()
            out[...] = values
    assert times.max(initial=0) <= 1
    assert all(np.array_equal(out, whole[box.slices]) for (_, box), out in got.items())
    several = {rank for rank, boxes in reports.items() if boxes}
    assert bool(blocks) == (len(several) > 1)


@pytest.mark.parametrize(
    ("local", "expected"), [("2", {0: {0, 1}, 2: {2, 3}, 4: set()}), (None, {4: {0, 1, 2, 3, 4}})]
)
def test_only_ranks_of_one_host_read_for_each_other(
    monkeypatch: pytest.MonkeyPatch, local: str | None, expected: dict[int, set[int]]
) -> None:
    """A rank that is alone on its host reads its own boxes. What two hosts want alike is sent to
    the ranks once."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    reports = {rank: [("w", Box((0, rank % 2), (9, 1)))] for rank in range(5)}
    hosts = wanted_by(reports)
    for rank, others in expected.items():
        boxes = hosts.of(rank).get("w", {})
        assert {one for ranks in boxes.values() for one in ranks} == others
    if local:
        assert hosts.wanted[0] is hosts.wanted[1]


@pytest.mark.parametrize(
    ("shape", "box", "expected"),
    [
        ((4096, 4096), Box((0, 0), (4096, 512)), True),
        ((4096, 4096), Box((512, 0), (512, 4096)), False),
        ((4, 1 << 20), Box((0, 0), (4, 1024)), False),  # a request for each row
        ((64, 64), Box((0, 0), (64, 63)), False),  # little more than it wants
        ((8, 512, 512), Box((2, 0, 128), (2, 512, 128)), True),
    ],
)
def test_regions_with_many_small_gaps_are_shared(
    shape: tuple[int, ...], box: Box, expected: bool
) -> None:
    out = np.empty(box.shape, np.float32)
    region = RegionRead(array_of_one_chunk("w", shape, "float32"), box, out)
    assert is_scattered(region) == expected
