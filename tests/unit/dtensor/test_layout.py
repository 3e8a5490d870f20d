"""Layouts on meshes, against torch's own splitting of real tensors."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardstore.dtensor.layout import AxisCut, _Part, _shards, fragments, held

CUT = st.builds(AxisCut, st.integers(1, 4), st.sampled_from([1, 1, 2, 3]))
CUTS = st.lists(CUT, max_size=3).map(tuple)
FEWER = st.lists(CUT, max_size=2).map(tuple)


def torch_part(length: int, cuts: tuple[AxisCut, ...], indices: tuple[int, ...]) -> list[int]:
    part = torch.arange(length)
    for cut, index in zip(cuts, indices, strict=True):
        strided = _StridedShard(0, split_factor=cut.split_factor)
        placement: Any = Shard(0) if cut.split_factor == 1 else strided
        pieces = placement._split_tensor(part, cut.parts, with_padding=False, contiguous=False)[0]
        part = pieces[index]
    return part.tolist()


def coordinates(cuts: tuple[AxisCut, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(cut.parts) for cut in cuts)))


@given(length=st.integers(0, 40), cuts=CUTS)
def test_every_coordinate_holds_what_torch_gives_it(length: int, cuts: tuple[AxisCut, ...]) -> None:
    for indices in coordinates(cuts):
        runs = held(length, cuts, indices)
        found = [i for start, n in runs for i in range(start, start + n)]
        assert found == torch_part(length, cuts, indices)
        assert all(n > 0 for _, n in runs)


@given(length=st.integers(0, 40), cuts=CUTS)
def test_the_fragments_hold_for_every_coordinate(length: int, cuts: tuple[AxisCut, ...]) -> None:
    number = fragments(length, cuts)
    pieces = [held(length, cuts, indices) for indices in coordinates(cuts)]
    if number is not None and length:
        assert number == len(pieces)
        assert set(pieces) == {
            ((i * length // len(pieces), length // len(pieces)),) for i in range(len(pieces))
        }


@given(rows=st.integers(1, 12), columns=st.integers(1, 12), a=CUTS, b=FEWER)
def test_parts_make_up_the_local_tensor(
    rows: int, columns: int, a: tuple[AxisCut, ...], b: tuple[AxisCut, ...]
) -> None:
    full = torch.arange(rows * columns).reshape(rows, columns)
    seen = torch.zeros(rows, columns, dtype=torch.int64)
    for i, j in itertools.product(coordinates(a), coordinates(b)):
        local = full[torch_part(rows, a, i)][:, torch_part(columns, b, j)]
        runs = [held(rows, a, i), held(columns, b, j)]
        if not all(runs):
            continue
        shape = (rows, columns)
        for part in _shards("k", local, shape, _Part.of(shape, (a, b), runs), False):
            assert part.data is not None
            assert torch.equal(part.data, full[part.global_slice()])
            seen[part.global_slice()] += 1
    assert bool((seen == 1).all())


def test_a_scalar_has_one_part() -> None:
    (part,) = _shards("k", torch.zeros(()), (), _Part.of((), (), []), True)
    assert part.local_shape == ()
