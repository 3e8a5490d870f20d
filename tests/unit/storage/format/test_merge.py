"""What a commit costs grows with the chunks and no faster: in calls made and in memory taken, which
no clock and no neighbour changes."""

from __future__ import annotations

import gc
import itertools
import pickle
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import AccessPatternError, DamagedCheckpointError
from shardstore.storage.commit import folder as commit
from shardstore.storage.commit.publish import RootContent, publish
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid, inner_blocks
from shardstore.storage.format.manifest import ChunkRecord, RankManifest
from shardstore.storage.format.merge import joined, merge
from shardstore.storage.options import SaveOptions
from shardstore.storage.runtime.checksums import crc32c
from shardstore.storage.stores.location import Location

SIDE = 128


def join(reports: list[bytes]) -> bytes:
    return joined(reports).to_bytes()


def reports_of(ranks: int, arrays: int, each: int) -> list[bytes]:
    """Arrays of `each` chunks, dealt out to the ranks one by one."""
    grid = Grid((each * SIDE, SIDE), (SIDE, SIDE))
    metas = [ArrayMeta(f"w{i}", f"w{i}", grid, "float32") for i in range(arrays)]
    record = ChunkRecord(4, 5, bytes(16), list(range(inner_blocks(metas[0].chunk_bytes))))
    found = []
    for rank in range(ranks):
        manifest = RankManifest(rank)
        for place in range(rank, arrays * each, ranks):
            number, index = divmod(place, each)
            manifest.add_array(metas[number], created=index == 0)
            manifest.add_chunk(metas[number], (index, 0), record)
        found.append(manifest.to_bytes())
    return found


def committed(place: Path, reports: list[bytes]) -> Callable[[], None]:
    """The whole commit of these reports."""
    attempt = commit.begin(Location.of(place), SaveOptions())
    about = RootContent(common_backend=("torch", 1), world_size=len(reports))
    return lambda: publish(attempt, SaveOptions(durable=False), reports, about)


def calls_of(work: Callable[[], None]) -> int:
    """Calls of functions, those written in C too, in all threads: which thread does which part
    depends on the machine."""
    number = itertools.count()

    def counting(_: Any, event: str, __: Any) -> None:
        if event in ("call", "c_call"):
            next(number)

    threading.setprofile(counting)  # of threads that start from now on
    sys.setprofile(counting)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return next(number)


def peak_of(work: Callable[[], None]) -> int:
    """Most memory held at a time, in bytes; NumPy's too."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


GROWTH = {
    "more arrays": [(8, 40 * n, 10) for n in (1, 2, 4)],
    "more chunks an array": [(8, 4, 100 * n) for n in (1, 2, 4)],
    "more ranks": [(16 * n, 4, 100 * n) for n in (1, 2, 4)],
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Collections would look at all that other tests left."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("what", GROWTH)
def test_the_commit_is_linear(tmp_path: Path, what: str) -> None:
    """Twice as much more takes at most twice as many more calls, and twice as much at most twice
    the memory (and a tenth)."""
    reports_of_all = [reports_of(*sizes) for sizes in GROWTH[what]]
    # Caches of names know all of them, whatever ran before in this process.
    committed(tmp_path / "warm", reports_of_all[-1])()
    found: dict[str, list[int]] = {"calls": [], "peaks": []}
    for number, reports in enumerate(reports_of_all):
        found["calls"].append(calls_of(committed(tmp_path / f"calls-{number}", reports)))
        found["peaks"].append(peak_of(committed(tmp_path / f"peaks-{number}", reports)))
    few, more, most = found["calls"]
    assert most - more <= 2.2 * (more - few) + 500, found
    for half, whole in itertools.pairwise(found["peaks"]):
        assert whole <= 2.2 * half, found


@pytest.mark.usefixtures("no_collector")
def test_no_work_in_python_a_chunk(tmp_path: Path) -> None:
    """Four times the chunks of as many arrays and ranks: not a tenth more calls."""
    few, many = (
        calls_of(committed(tmp_path / f"{each}", reports_of(4, 10, each))) for each in (50, 200)
    )
    assert many <= 1.1 * few


def test_a_report_that_is_cut_or_of_another_kind() -> None:
    (whole,) = reports_of(1, 2, 3)
    assert list(RankManifest.from_bytes(whole).arrays) == ["w0", "w1"]
    other = zlib.compress(pickle.dumps({"rank": 7}))
    for wrong in (b"", whole[:10], whole[:-1], whole[:-400], other):
        with pytest.raises(DamagedCheckpointError, match="same version"):
            RankManifest.from_bytes(wrong)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 5),
            st.sampled_from([1, 2000]),
            st.sampled_from([("zstd", "crc32c"), ("crc32c",), None]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_a_merge_in_parts_is_the_merge(
    arrays: list[tuple[int, int, Any]], blocks: list[list[int]], random: Any
) -> None:
    """Whichever neighbours are joined first, however many of them know of an array, and whichever
    were not sent, as that of the coordinator."""
    metas = [
        ArrayMeta(f"w{i}", f"w{i}", Grid((count * size,), (size,)), "float32", codecs)
        for i, (count, size, codecs) in enumerate(arrays)
    ]
    manifests = [RankManifest(rank) for rank in range(sum(map(sum, blocks)))]
    for number, meta in enumerate(metas):
        for index in range(meta.grid.size):
            manifest = random.choice(manifests)
            manifest.add_array(meta, created=index == 0)
            running = [random.randrange(9) for _ in range(inner_blocks(meta.chunk_bytes))]
            record = ChunkRecord(4 + number, 2**32 - 1 - index, bytes([index] * 16), running)
            manifest.add_chunk(meta, (index,), record)
    for manifest in manifests:
        manifest.objects = [f"o{random.randrange(3)}"]
        manifest.files = {f"f{manifest.rank}": (crc32c(b"x", 0), manifest.rank)}
        manifest.copies = ["c"] * random.randrange(2)
        manifest.reused_bytes, manifest.seconds = manifest.rank, {"write": manifest.rank / 2}
    reports = [manifest.to_bytes() for manifest in manifests]
    left, parts = iter(reports), []
    for block in blocks:
        parts.append(join([join([next(left) for _ in range(size)]) for size in block]))
    at_once = merge(reports)
    for given_ in (parts, [manifests[0], *reports[1:]], manifests):
        merged = merge(given_)
        assert merged.manifest.to_bytes() == at_once.manifest.to_bytes()
        for name in at_once.__dataclass_fields__.keys() - {"manifest"}:
            assert getattr(merged, name) == getattr(at_once, name), name


def test_an_error_that_a_merge_in_parts_finds_names_the_rank_itself() -> None:
    one, other = (ArrayMeta("w", "w", Grid((4,), (2,)), dtype) for dtype in ("float32", "int32"))
    record = ChunkRecord(4, 5, bytes(16), ())
    manifests = [RankManifest(rank) for rank in range(6)]
    for rank, meta, index in ((1, one, 0), (4, other, 1), (5, other, 1)):
        manifests[rank].add_array(meta, created=rank == 1)
        manifests[rank].add_chunk(meta, (index,), record)
    reports = [manifest.to_bytes() for manifest in manifests]
    with pytest.raises(ValueError, match="w"):
        join(reports)
    for parts in (reports, [join(reports[:3]), join(reports[3:])]):
        with pytest.raises(AccessPatternError, match=r"rank 4 has .*int32.*rank 1 has .*float32"):
            merge(parts)
    with pytest.raises(AccessPatternError, match="rank 4 wrote a part of key 'w', but no rank"):
        merge([join(reports[2:])])
