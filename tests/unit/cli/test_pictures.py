"""The report, as a real browser shows it, and the plots."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import shardstore
from shardstore.cli.pictures import MAX_PICTURED, cells, rank_table
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location
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
    assert title is not None
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
