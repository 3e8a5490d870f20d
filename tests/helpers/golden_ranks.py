"""Saves and loads of the state of ``tests/golden/states.py`` on ranks of a layout."""

from __future__ import annotations

import io
from pathlib import Path

import torch

import shardstore
from shardstore import mapping
from tests.golden import states
from tests.helpers.ranks_helper import run_ranks

WHOLE = states.Layout(1, 1)
"""The layout of a world of one, which has no process group."""


def save(layout: states.Layout, backend: str, place: Path) -> None:
    """Save the state on all ranks of a layout."""
    if layout == WHOLE:
        _save(0, 1, layout, backend, place)
    else:
        run_ranks(_save, layout.world_size, layout, backend, place)


def wrong(layout: states.Layout, *places: Path) -> list[str]:
    """What the ranks of a layout read wrongly from any of the places."""
    if layout == WHOLE:
        return _wrong(0, 1, layout, places)
    found = run_ranks(_wrong, layout.world_size, layout, places)
    return [line for lines in found for line in lines]


def _save(rank: int, world_size: int, layout: states.Layout, backend: str, place: Path) -> None:
    shardstore.save(
        states.build(mapping, layout, rank),
        place,
        sharded_strategy=(backend, 1),
        content_metadata=states.CONTENT_METADATA,
    )


def _wrong(rank: int, world_size: int, layout: states.Layout, places: tuple[Path]) -> list[str]:
    found = []
    for place in places:
        with torch.serialization.safe_globals([io.BytesIO]):
            loaded = shardstore.load(states.build(mapping, layout, rank, empty=True), place)
        metadata = shardstore.load_content_metadata(preloaded_state_dict=loaded)
        loaded.pop("content_metadata")
        found += states.differences(loaded, states.expected(mapping, layout, rank))
        found += states.differences(metadata, states.CONTENT_METADATA, "content metadata")
    return found
