"""Structured records of what is verified and converted, and the list of all of them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from shardstore.convert import convert
from shardstore.inspection.verify import verify
from shardstore.progress import EVENTS
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location
from tests.helpers.cli_checkpoints import flip, values

ROOT = Path(__file__).parents[3]
TOLD = re.compile(r'(?:log_event\(\s*\w+,|(?:steps|self)\.log\()\s*"(\w+)"')


def events(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if hasattr(record, "event")]


def test_events_are_listed() -> None:
    sources = (file.read_text() for file in (ROOT / "shardstore").rglob("*.py"))
    told = {event for source in sources for event in TOLD.findall(source)}
    assert told == set(EVENTS)


def test_a_verification_is_logged(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(place / "counts" / "c.0")
    caplog.set_level(logging.INFO, "shardstore")
    result = verify(StoredCheckpoint(Location.of(place)), lambda finding: None)
    begin, end = events(caplog)
    assert (begin.event, begin.url) == ("verify_begin", str(place))
    assert (end.event, end.url, end.damage, end.notes) == ("verify", str(place), 1, 0)
    assert (end.arrays, end.chunks, end.bytes) == (result.arrays, result.chunks, result.bytes)
    assert end.seconds >= 0
    assert end.bytes_per_second > 0


def test_a_conversion_is_logged(
    pristine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shardstore")
    target = tmp_path / "m.safetensors"
    convert(pristine, target)
    begin, end = events(caplog)
    assert (begin.event, end.event) == ("convert_begin", "convert")
    for record in (begin, end):
        assert (record.url, record.source) == (str(target), str(pristine))
        assert (record.source_format, record.target_format) == ("shardstore", "safetensors")
    size = sum(value.nbytes for value in values().values())
    assert (end.tensors, end.bytes, end.resumed_bytes) == (len(values()), size, 0)
    assert end.verified is True
