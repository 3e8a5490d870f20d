"""The table of what each rank did, from records as saves write them and from ones that are not."""

from __future__ import annotations

import json

import pytest

from shardstore.cli.pictures import rank_table
from shardstore.storage.format.merge import MAX_COLUMNS_RANKS, rank_record


def record(world: int) -> object:
    seconds = {rank: {"plan": 0.5, "write": rank + 0.5} for rank in range(world)}
    sizes = [(rank + 1) << 20 for rank in range(world)]
    return json.loads(json.dumps(rank_record(seconds, sizes, range(1, world + 1))))


def test_the_table_has_a_row_for_each_rank() -> None:
    table = rank_table(record(3))
    assert table is not None
    assert table[0] == ["rank", "bytes", "chunks", "plan s", "write s", "total s", "rate"]
    assert table[1] == ["0", "1.0 MiB", "1", "0.500", "0.500", "1.000", "1.0 MiB/s"]
    assert table[3] == ["2", "3.0 MiB", "3", "0.500", "2.500", "3.000", "1.0 MiB/s"]


def test_many_ranks_are_summed_up() -> None:
    table = rank_table(record(MAX_COLUMNS_RANKS + 1))
    assert table is not None
    assert [row[0] for row in table] == ["ranks", "min", "median", "max"]
    assert table[3][1] == "257.0 MiB"
    assert len({len(row) for row in table}) == 1


def test_a_rank_without_time_has_no_rate() -> None:
    table = rank_table(rank_record({0: {"write": 0.0}}, [5], [1]))
    assert table is not None
    assert table[1][-1] == ""


WRONG: list[object] = [None, [], {}, {"bytes": "x"}, {"bytes": [1], "chunks": [1, 2]}]
WRONG += [{"bytes": [1], "chunks": ["1"]}, {"bytes": [1], "chunks": {"min": 1}}]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_damaged_record_has_no_table(wrong: object) -> None:
    assert rank_table(wrong) is None
