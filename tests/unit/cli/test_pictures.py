"""The report, as a real browser shows it, and the plots: what is drawn of arrays and ranks."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore.cli.pictures import MAX_CELLS, MAX_PICTURED, cells, drawn_axes, rank_table
from shardstore.inspection.opened import StoredArray
from shardstore.inspection.values import histogram, measure
from shardstore.mapping import ShardedTensor
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid
from shardstore.storage.format.merge import MAX_COLUMNS_RANKS, rank_record
from shardstore.storage.stores.location import Location
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.cli_checkpoints import CUT, WORLD, Cli, flip, values
from tests.helpers.processes import run_to_end

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Page(HTMLParser):
    """Elements of a page, and that each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def keys(self) -> list[str | None]:
        return [attributes["data-key"] for _, attributes in self.found if "data-key" in attributes]


def check_page(page: Page, place: Path) -> None:
    assert sorted(map(str, page.keys())) == sorted(values())
    assert "<b>small & odd</b>" in page.text  # was escaped, not taken for markup
    assert "norm " in page.text
    assert sum(tag == "figure" for tag, _ in page.found) >= len(values())
    assert "written by ranks 0, 1" in page.text
    # What each rank did is a table with the columns named, not the record's JSON.
    table = rank_table(shardstore.open(place).info["commit"]["ranks"])
    assert table is not None
    assert [row[0] for row in table] == ["rank", "0", "1"]
    assert "".join(map("".join, table)) in page.text
    assert '"slowest"' not in page.text
    assert re.search("Rank [01] took longest", page.text)


def test_report_is_one_file_that_asks_for_nothing(pristine: Path, tmp_path: Path, cli: Cli) -> None:
    target = tmp_path / "report.html"
    outcome = cli("report", pristine, "-o", target)
    assert (outcome.code, outcome.out.strip()) == (0, str(target))
    text = target.read_text()
    page = Page(text)
    check_page(page, pristine)
    assert "OK: 7 arrays" in page.text
    tags = {tag for tag, _ in page.found}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed"}
    assert not re.search(r"(src|href|url\(|@import)", text)


class Pictures(HTMLParser):
    """The rectangles of the layouts by key: title, and place in elements of the SVG."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: dict[str, list[tuple[str, list[float]]]] = {}
        self.key, self.figure, self.titled = "", "", False
        self.place: list[float] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.key = given.get("data-key") or self.key
        if tag == "figure":
            self.figure = str(given["class"])
        elif tag == "rect" and self.figure == "layout":
            self.place = [float(str(given[name])) for name in ("y", "x", "height", "width")]
        self.titled = tag == "title" and self.figure == "layout"

    def handle_data(self, data: str) -> None:
        if self.titled:
            self.found.setdefault(self.key, []).append((data, self.place))
            self.titled = False


def test_layouts_are_what_the_manifest_says(pristine: Path, tmp_path: Path, cli: Cli) -> None:
    """Each rectangle names the chunk that lies there, and the rank that wrote it."""
    target = tmp_path / "report.html"
    assert cli("report", pristine, "-o", target).code == 0
    pictures = Pictures(target.read_text()).found
    stored = StoredCheckpoint(Location.of(pristine))
    assert set(pictures) == {key for key, meta in stored.arrays.items() if meta.grid.size}
    for key, shown in pictures.items():
        meta = stored.arrays[key]
        wanted = cells(meta, stored.manifest)
        assert [title for title, _ in shown] == [
            f"chunk [{', '.join(map(str, index))}], rank {rank}" for index, _, rank in wanted
        ]
        rows, columns = ([1, 1, *meta.shape])[-2:]
        # The whole picture, from its own rectangles: they fill it.
        high = max(y + h for _, (y, _, h, _) in shown) / rows
        wide = max(x + w for _, (_, x, _, w) in shown) / columns
        for (_, (y, x, h, w)), (index, box, rank) in zip(shown, wanted, strict=True):
            place = [y / high, x / wide, h / high, w / wide]
            assert place == pytest.approx([*box.offset, *box.shape], abs=0.05 * max(rows, columns))
            if key in CUT:  # and as it was saved
                axis = CUT[key]
                assert rank == (meta.grid.box(index).offset[axis] >= meta.shape[axis] // WORLD)
    assert {title[-1] for title, _ in pictures["layers.1.weight"]} == {"0", "1"}


def test_report_of_damage(place: Path, tmp_path: Path, cli: Cli) -> None:
    flip(place / "layers.0.weight" / "c.1.0")
    target = tmp_path / "report.html"
    outcome = cli("report", place, "-o", target, "--json")
    assert (outcome.code, outcome.json["ok"]) == (1, False)
    page = Page(target.read_text())
    check_page(page, place)
    assert "DAMAGED: 1 finding" in page.text
    assert page.text.count("chunk (1, 0) of key 'layers.0.weight'") == 2  # found, and not read
    summaries = re.findall("<summary>(.*?)</summary>", target.read_text())
    marked = [one for one in summaries if "damaged</span>" in one]
    assert len(marked) > 1  # that of the folded module, too
    assert "layers" in marked[0]
    assert "(of the readable chunks)" in page.text
    outcome = cli("report", place, "-o", target, "--no-verify", "--no-values")
    assert outcome.code == 0
    assert "Not verified" in Page(target.read_text()).text


def as_a_browser_shows(page: Path, profile: Path) -> Page:
    """The page as it is once a browser has laid it out; skips where there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium is installed here")
    command = [browser, *SWITCHES, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = run_to_end(command)
    assert done.returncode == 0, done.stderr[-2000:]
    return Page(done.stdout.removeprefix("<!DOCTYPE html>"))


def test_report_in_a_browser(pristine: Path, tmp_path: Path, cli: Cli) -> None:
    target = tmp_path / "report.html"
    assert cli("report", pristine, "-o", target).code == 0
    check_page(as_a_browser_shows(target, tmp_path / "profile"), pristine)


def test_a_long_key_does_not_widen_the_page(tmp_path: Path, cli: Cli) -> None:
    tensors = {key: torch.ones(3) for key in ("k" * 400, "a." + "b" * 400)}
    shardstore.save(shardstore.shard(tensors), tmp_path / "step-1")
    target = tmp_path / "report.html"
    assert cli("report", tmp_path / "step-1", "-o", target).code == 0
    # Opened out, and measured by the browser itself.
    measure = "document.title = document.documentElement.scrollWidth - innerWidth"
    text = target.read_text().replace("<details", "<details open")
    target.write_text(text.replace("</body>", f"<script>{measure}</script></body>"))
    page = as_a_browser_shows(target, tmp_path / "profile")
    assert "k" * 400 in page.text
    title = re.search(r"-?\d+", page.text)
    assert int(title[0]) <= 0


PLOTS = ["layout layers.1.weight", "layout scalar", "layout empty"]
PLOTS += ["histogram layers.10.odd", "histogram empty", "sizes", "sizes layers"]


@pytest.mark.parametrize("arguments", PLOTS)
def test_plots_are_written_as_svg(pristine: Path, tmp_path: Path, cli: Cli, arguments: str) -> None:
    kind, *key = arguments.split()
    target = tmp_path / "picture.svg"
    outcome = cli("plot", kind, pristine, *key, "-o", target)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.strip() == str(target)
    svg = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(target).getroot()
    assert root.tag == f"{svg}svg"
    drawn = [found.text for found in root.iterfind(f"{svg}rect/{svg}title")]
    assert bool(drawn) == (key != ["empty"])
    texts = [found.text for found in root.iterfind(f"{svg}text")]
    if kind == "sizes":
        assert len(texts) == 2 + len(drawn)
        bars = [bar for bar in root.iterfind(f"{svg}rect") if len(bar)]
        height = float(root.attrib["viewBox"].split()[3])
        end = max(float(bar.attrib["y"]) + float(bar.attrib["height"]) for bar in bars)
        assert height == pytest.approx(end + 37)  # the title above and a margin; no empty space
        sizes = {found.get("font-size") for found in root.iterfind(f"{svg}text")}
        assert sizes <= {None, "8.00"}  # however many bars there are
    else:
        assert texts[0] == key[0]


def test_a_histogram_of_a_damaged_array_is_drawn_and_exits_with_1(tmp_path: Path, cli: Cli) -> None:
    state = {"w": torch.arange(16.0), "v": torch.ones(3)}
    shardstore.save(shardstore.shard(state), tmp_path / "c")
    chunk = tmp_path / "c/w/c.0"
    chunk.write_bytes(chunk.read_bytes()[:-3])
    for key, code in (("w", 1), ("v", 0)):
        target = tmp_path / f"{key}.svg"
        outcome = cli("plot", "histogram", tmp_path / "c", key, "-o", target)
        assert (outcome.code, key in outcome.err) == (code, code == 1)
        assert ElementTree.parse(target).getroot().tag.endswith("svg")


def test_report_says_which_arrays_have_pictures(tmp_path: Path, cli: Cli) -> None:
    for count in (3, MAX_PICTURED + 1):
        state = {f"w{i:03}": torch.zeros(1 + i) for i in range(count)}
        shardstore.save(shardstore.shard(state), tmp_path / f"{count}")
        target = tmp_path / "report.html"
        assert cli("report", tmp_path / f"{count}", "-o", target, "--no-values").code == 0
        page = Page(target.read_text())
        note = f"The {MAX_PICTURED} largest of {count:,} arrays have pictures."
        assert (note in page.text) == (count > MAX_PICTURED)
        figures = sum(tag == "figure" for tag, _ in page.found)
        assert figures == min(count, MAX_PICTURED)


def array_of(shape: tuple[int, ...], chunk: tuple[int, ...]) -> ArrayMeta:
    return ArrayMeta("w", "w", Grid(shape, chunk), "float32")


@pytest.mark.parametrize(
    ("shape", "chunk", "axes"),
    [
        ((), (), (None, None)),
        ((9,), (2,), (None, 0)),
        ((9, 4), (9, 4), (0, 1)),
        ((5, 7), (2, 4), (0, 1)),
        ((4, 9, 6), (1, 9, 3), (0, 2)),  # the two with the most chunks, in their order
        ((2, 3, 4), (2, 3, 4), (1, 2)),  # the last two where none has more
        ((8, 2, 6, 6), (8, 1, 1, 6), (1, 2)),
    ],
)
def test_the_axes_that_are_cut_are_drawn(
    shape: tuple[int, ...], chunk: tuple[int, ...], axes: tuple[int | None, int | None]
) -> None:
    array = array_of(shape, chunk)
    assert drawn_axes(array) == axes
    rows, columns = axes
    for index, cell, _ in cells(array, None):
        box = array.grid.box(index)
        down = (0, 1) if rows is None else (box.offset[rows], box.shape[rows])
        across = (0, 1) if columns is None else (box.offset[columns], box.shape[columns])
        assert [*zip(cell.offset, cell.shape, strict=True)] == [down, across]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=4).map(
        lambda pairs: (tuple(n for n, _ in pairs), tuple(min(c, n) for n, c in pairs))
    )
)
def test_cells_cover_the_face_that_is_drawn_once(
    cut: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    array = array_of(*cut)
    rows, columns = drawn_axes(array)
    high = 1 if rows is None else array.shape[rows]
    wide = 1 if columns is None else array.shape[columns]
    face = np.zeros((high, wide), int)
    for index, cell, _ in cells(array, None):
        face[cell.slices] += 1
        others = set(range(len(array.shape))) - {rows, columns}
        assert all(index[axis] == 0 for axis in others)
    assert (face == 1).all()


def test_no_more_cells_than_can_be_seen() -> None:
    assert len(cells(array_of((10**5,), (1,)), None)) == MAX_CELLS
    assert len(cells(array_of((3000, 3000), (1, 1)), None)) <= MAX_CELLS
    assert cells(array_of((0, 4), (1, 4)), None) == []


def stored_of(values: torch.Tensor, place: Path) -> StoredArray:
    state: dict[str, Any] = {"w": ShardedTensor.from_rank_offsets("w", values)}
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=256)
    shardstore.save(state, place, strategy)
    return shardstore.open(place)["w"]


def binned(values: torch.Tensor, place: Path, bins: int) -> tuple[list[int], list[float]]:
    array = stored_of(values, place)
    counts, edges = histogram(array, measure([array])[0]["w"], bins)
    return counts.tolist(), edges.tolist()


def test_a_histogram_counts_each_finite_value_once(tmp_path: Path) -> None:
    odd = [math.nan, math.inf, -math.inf]
    values = torch.tensor([0.0, 0.9, 1.0, 1.5, 3.99, 4.0, 4.0, *odd])
    counts, edges = binned(values, tmp_path / "a", 4)
    assert (counts, edges) == ([2, 2, 0, 3], [0.0, 1.0, 2.0, 3.0, 4.0])
    # Over many chunks, and in a type that NumPy lacks, as NumPy counts all of it.
    many = torch.randn(41, 37, generator=torch.Generator().manual_seed(1)).bfloat16()
    counts, edges = binned(many, tmp_path / "b", 50)
    flat = many.double().numpy().reshape(-1)
    wanted, wanted_edges = np.histogram(flat, 50)
    assert counts == wanted.tolist()
    assert edges == pytest.approx(wanted_edges.tolist())


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([3.0] * 5, 2.5, 3.5), ([-2.0, -2.0], -2.5, -1.5), ([1e308, -1e308, 0.0], -1e308, 1e308)],
)
def test_a_histogram_of_extreme_values_counts_all(
    tmp_path: Path, values: list[float], low: float, high: float
) -> None:
    counts, edges = binned(torch.tensor(values, dtype=torch.float64), tmp_path / "a", 7)
    assert sum(counts) == len(values)
    assert (edges[0], edges[-1]) == (low, high)


@pytest.mark.parametrize("values", [torch.zeros(0), torch.tensor([math.nan, math.inf])])
def test_a_histogram_without_finite_values_is_empty(tmp_path: Path, values: torch.Tensor) -> None:
    counts, edges = binned(values, tmp_path / "a", 5)
    assert counts == [0] * 5
    assert (edges[0], edges[-1]) == (0.0, 1.0)


def record(world: int) -> object:
    seconds = {rank: {"plan": 0.5, "write": rank + 0.5} for rank in range(world)}
    sizes = [(rank + 1) << 20 for rank in range(world)]
    return json.loads(json.dumps(rank_record(seconds, sizes, range(1, world + 1))))


def test_the_table_has_a_row_for_each_rank() -> None:
    table = rank_table(record(3))
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
    assert table[1][-1] == ""


WRONG: list[object] = [None, [], {}, {"bytes": "x"}, {"bytes": [1], "chunks": [1, 2]}]
WRONG += [{"bytes": [1], "chunks": ["1"]}, {"bytes": [1], "chunks": {"min": 1}}]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_damaged_record_has_no_table(wrong: object) -> None:
    assert rank_table(wrong) is None
