"""Packs as zip files, and the places of chunks in them."""

from __future__ import annotations

import io
import zipfile
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.storage.format.packs import Pack, Places, is_pack

MEMBERS = st.dictionaries(
    st.text("abc%2F.0", min_size=1, max_size=30), st.lists(st.binary(max_size=50), max_size=3)
)


def made(members: dict[str, list[bytes]]) -> tuple[Pack, dict[str, tuple[int, int]]]:
    pack = Pack()
    return pack, {name: pack.add(name, parts) for name, parts in members.items()}


@given(MEMBERS, MEMBERS)
def test_a_pack_of_two_is_a_zip_with_the_members_where_it_says(
    first: dict[str, list[bytes]], second: dict[str, list[bytes]]
) -> None:
    first = {f"1{name}": parts for name, parts in first.items()}
    second = {f"2{name}": parts for name, parts in second.items()}
    pack, places = made(first)
    other, others = made(second)
    moved = pack.extend(other)
    places |= {name: (begin + moved, size) for name, (begin, size) in others.items()}
    data = pack.close([("node", '{"a": 1}')])
    with zipfile.ZipFile(io.BytesIO(data)) as found:
        assert found.testzip() is None
        assert found.namelist() == [*first, *second, "node/zarr.json", "zarr.json"]
        for name, parts in {**first, **second}.items():
            begin, size = places[name]
            assert data[begin : begin + size] == found.read(name) == b"".join(parts)
        assert all(member.compress_type == zipfile.ZIP_STORED for member in found.infolist())
        assert found.read("node/zarr.json") == b'{"a": 1}'


@pytest.mark.parametrize("count", [65_534, 70_000])
def test_a_pack_of_many_members_is_a_zip64(count: int) -> None:
    pack = Pack()
    for number in range(count):
        pack.add(str(number), [b"x"])
    with zipfile.ZipFile(io.BytesIO(pack.close([]))) as found:
        names = found.namelist()
        assert (len(names), names[-2]) == (count + 1, str(count - 1))
        assert zlib.crc32(b"x") == found.getinfo(names[-2]).CRC
        assert found.read(names[-2]) == b"x"


@pytest.mark.parametrize(
    ("files", "rows", "chunks", "fit"),
    [
        (("a",), bytes(16), 1, True),
        (("a",), bytes(16), 2, False),
        ((), bytes(16), 1, False),
        (("a",), b"\1" + bytes(15), 1, False),
        (("a",), bytes(4) + b"\xff" * 8 + bytes(4), 1, False),
        ((), b"", 0, True),
    ],
)
def test_places_fit_an_array_or_do_not(
    files: tuple[str, ...], rows: bytes, chunks: int, fit: bool
) -> None:
    assert Places(files, rows).fit(chunks) is fit


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        (".packs/0.0.zip", True),
        (".packs/12.3.zip", True),
        (".packs/0.0.zip/x", False),
        (".packs/../0.0.zip", False),
        ("x.packs/0.0.zip", False),
        ("w/.packs/0.0.zip", False),
        (".packs/a.zip", False),
        (".packs/0.0.zip\n", False),
    ],
)
def test_only_names_that_saves_write_are_packs(name: str, is_one: bool) -> None:
    assert is_pack(name) is is_one
