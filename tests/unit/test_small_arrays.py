"""Small arrays that are proved at once: with and without the compiled part, sound and damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardstore
from shardstore import ShardedTensor
from shardstore.inspection import small_arrays
from shardstore.inspection.small_arrays import SmallArrays, document_texts
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location

KEYS = ["line", "square", "point", "none", "müller", "in/folder"]


def save(place: Path, **options: bool) -> None:
    values = {
        "line": torch.arange(10, dtype=torch.int64),
        "square": torch.rand(6, 5, dtype=torch.float64),
        "point": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "müller": torch.ones(3, dtype=torch.bfloat16),
        "in/folder": torch.zeros(4, 4),
    }
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()} | {
        "z": ShardedTensor.from_rank_offsets("z", torch.zeros(1))
    }
    shardstore.save(state, place, **options)


def proved(place: Path, *, hashes: bool = False) -> dict[str, int | None]:
    stored = StoredCheckpoint(Location.of(place))
    assert stored.root is not None
    assert stored.manifest is not None
    documents = stored.root.documents
    texts = document_texts((place / "zarr.json").read_bytes(), documents)
    look = SmallArrays(
        str(place),
        documents,
        texts,
        stored.manifest,
        hashes=hashes,
        array_documents=stored.root.array_documents,
    )
    found = look.prove(look.known(stored.arrays[key].node for key in KEYS))
    return {key: found.get(stored.arrays[key].node) for key in KEYS}


@pytest.fixture(params=["compiled", "python", "hashes"])
def look(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], dict[str, int | None]]:
    if request.param == "compiled" and not small_arrays.COMPILED:
        pytest.skip("built without a compiler")
    if request.param == "python":
        monkeypatch.setattr(small_arrays, "COMPILED", False)
    return lambda place: proved(place, hashes=request.param == "hashes")


Look = Callable[[Path], dict[str, int | None]]


@pytest.mark.parametrize("documents", [True, False])
def test_sound_ones(tmp_path: Path, look: Look, documents: bool) -> None:
    save(tmp_path / "c", array_documents=documents)
    found = look(tmp_path / "c")
    files = dict.fromkeys(KEYS, 0)
    stored = StoredCheckpoint(Location.of(tmp_path / "c"))
    for key in KEYS:
        folder = tmp_path / "c" / stored.arrays[key].node
        files[key] = sum(f.stat().st_size for f in folder.iterdir() if f.name != "zarr.json")
    assert found == files


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def another_chunk(folder: Path) -> None:
    """A chunk with a right checksum of its own, but not the one that was saved."""
    path = next(folder.glob("c*"))
    before = path.read_bytes()
    from shardstore.storage.movers.checksums import crc32c

    body = bytes(len(before) - 4)
    path.write_bytes(body + crc32c(body, 0).to_bytes(4, "little"))


def to_folder(folder: Path) -> None:
    path = next(folder.glob("c*"))
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "first bit of the chunk": lambda f: flip(next(f.glob("c*")), 0),
    "last bit of the checksum": lambda f: flip(next(f.glob("c*")), -1),
    "another chunk": another_chunk,
    "a longer chunk": lambda f: next(f.glob("c*")).open("ab").write(b"x"),
    "a shorter chunk": lambda f: next(f.glob("c*")).write_bytes(
        next(f.glob("c*")).read_bytes()[:-1]
    ),
    "no chunk": lambda f: next(f.glob("c*")).unlink(),
    "a folder for a chunk": to_folder,
    "a bit of the document": lambda f: flip(f / "zarr.json", 20),
    "a longer document": lambda f: (f / "zarr.json").open("ab").write(b" "),
    "no document": lambda f: (f / "zarr.json").unlink(),
    "a file too many": lambda f: (f / "x").write_bytes(b""),
    "another name": lambda f: next(f.glob("c*")).rename(f / "d"),
}


@pytest.mark.parametrize("damage", [name for name in DAMAGE if "document" not in name])
def test_a_damaged_one_without_a_document(tmp_path: Path, look: Look, damage: str) -> None:
    save(tmp_path / "c", array_documents=False)
    before = look(tmp_path / "c")
    DAMAGE[damage](tmp_path / "c" / "line")
    assert look(tmp_path / "c") == {**before, "line": None}


def test_a_document_too_many(tmp_path: Path, look: Look) -> None:
    save(tmp_path / "c", array_documents=False)
    before = look(tmp_path / "c")
    stored = StoredCheckpoint(Location.of(tmp_path / "c"))
    assert stored.root is not None
    texts = document_texts((tmp_path / "c" / "zarr.json").read_bytes(), stored.root.documents)
    (tmp_path / "c" / "line" / "zarr.json").write_bytes(texts["line"])
    assert look(tmp_path / "c") == {**before, "line": None}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("key", ["line", "point", "square"])
def test_a_damaged_one_is_not_proved_and_the_others_are(
    tmp_path: Path, look: Look, damage: str, key: str
) -> None:
    save(tmp_path / "c")
    before = look(tmp_path / "c")
    stored = StoredCheckpoint(Location.of(tmp_path / "c"))
    DAMAGE[damage](tmp_path / "c" / stored.arrays[key].node)
    assert look(tmp_path / "c") == {**before, key: None}


def test_no_folder_outside_of_the_checkpoint_is_looked_at(tmp_path: Path, look: Look) -> None:
    place = tmp_path / "c"
    save(place)
    stored = StoredCheckpoint(Location.of(place))
    assert stored.root is not None
    assert stored.manifest is not None
    (place / "line").rename(tmp_path / "line")
    documents = {"../line": stored.root.documents["line"]}
    texts = {"../line": (tmp_path / "line" / "zarr.json").read_bytes()}
    manifest = stored.manifest
    manifest._start["../line"] = manifest._start["line"]
    assert SmallArrays(str(place), documents, texts, manifest).known(texts) == []


def test_texts_are_those_of_the_arrays_own_documents(tmp_path: Path) -> None:
    save(tmp_path / "c")
    stored = StoredCheckpoint(Location.of(tmp_path / "c"))
    assert stored.root is not None
    texts = document_texts((tmp_path / "c" / "zarr.json").read_bytes(), stored.root.documents)
    assert len(texts) == len(KEYS)  # all but the last
    for node, text in texts.items():
        assert text == (tmp_path / "c" / node / "zarr.json").read_bytes()


@pytest.mark.skipif(not small_arrays.COMPILED, reason="built without a compiler")
@pytest.mark.parametrize(
    "wrong",
    [
        ["no tuple"],
        ("no tuple",),
        (("folder", "zarr.json", b"text", ["c"], 8, b"1234"),),
        (("folder", "zarr.json", b"text", ("c",), 8, b"123"),),
        (("folder", "zarr.json", b"text", ("c",), 3, b"1234"),),
        (("folder", "zarr.json", b"text", (1,), 8, b"1234"),),
        (("fol\0der", "zarr.json", b"text", ("c",), 8, b"1234"),),
    ],
)
def test_the_compiled_part_takes_nothing_else(wrong: object) -> None:
    from shardstore.storage.movers import _small_files

    with pytest.raises((TypeError, ValueError)):
        _small_files.sound_arrays(wrong)  # type: ignore[arg-type]
    assert _small_files.sound_arrays(()) == b""
