"""Node names: safe everywhere, never two keys to one, and back again."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import KeyNameError
from shardstore.storage.format.names import (
    MAX_NAME_BYTES,
    RESERVED,
    check_collisions,
    key_of,
    node_name,
)

keys = st.text(
    st.characters(codec="utf-8") | st.sampled_from("./\\%~_-zarjson"), min_size=1, max_size=120
)


@given(keys)
def test_names_are_safe_and_lead_back(key: str) -> None:
    name = node_name(key)
    assert re.fullmatch(r"[A-Za-z0-9._%~-]+", name)
    assert len(name) <= MAX_NAME_BYTES
    assert name[0] != "."
    assert not name.startswith("__")
    assert name.lower() not in RESERVED
    assert key_of(name) in (key, None)
    if len(key.encode()) * 3 <= MAX_NAME_BYTES:
        assert key_of(name) == key


@given(keys, keys)
def test_different_keys_have_different_names(one: str, other: str) -> None:
    assert (node_name(one) == node_name(other)) == (one == other)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("decoder.layers.0.weight", "decoder.layers.0.weight"),
        ("a/b c", "a%2Fb%20c"),
        ("..", "%2E."),
        (".", "%2E"),
        ("__x", "%5F_x"),
        ("zarr.json", "%7Aarr.json"),
        ("Common.PT", "%43ommon.PT"),
        ("100%", "100%25"),
        ("ä", "%C3%A4"),
        ("a\x00b", "a%00b"),
    ],
)
def test_keys_have_these_names(key: str, name: str) -> None:
    assert node_name(key) == name
    assert key_of(name) == key


def test_long_keys_are_shortened_and_stay_apart() -> None:
    names = {node_name("x" * 500 + str(n)) for n in range(100)}
    assert len(names) == 100
    assert {len(n) for n in names} == {MAX_NAME_BYTES}
    assert key_of(names.pop()) is None
    # A cut in the middle of an escape leaves nothing that could be taken for one.
    for n in range(3):
        assert re.fullmatch(r"x*(%[0-9A-F]{0,2})*%~[0-9a-f]{32}", node_name("x" * n + "/" * 300))


@pytest.mark.parametrize("key", ["", "\ud800", 3, None, b"x"])
def test_what_is_no_key_is_refused(key: object) -> None:
    with pytest.raises(KeyNameError):
        node_name(key)  # type: ignore[arg-type]


def test_keys_that_differ_in_case_alone_collide() -> None:
    check_collisions(["a", "b", "a", "A/"])
    with pytest.raises(KeyNameError, match="rename") as caught:
        check_collisions(["layer.Weight", "b", "layer.weight"])
    assert "'layer.Weight'" in str(caught.value)
    assert "'layer.weight'" in str(caught.value)
