"""shardstore.utils: state dicts split, keys renamed, float8 widened, blocks timed."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardstore import utils
from shardstore.errors import CheckpointingException
from shardstore.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from shardstore.utils import (
    _clean_metadata_for_serialization,
    _sharded_object_id,
    _sharded_tensor_shard_id,
    add_prefix_for_sharding,
    apply_prefix_mapping,
    debug_msg,
    debug_time,
    extract_sharded_tensors_and_factories,
    extract_sharded_tensors_or_nonpersistent,
    force_all_tensors_to_non_fp8,
    logger_stack,
    zip_strict,
)
from shardstore.utils import replace_prefix_for_sharding as replace_prefix

DATA = torch.ones(2, 3)


def tensor(key: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, DATA)


def factory(key: str) -> ShardedTensorFactory:
    return ShardedTensorFactory(key, DATA, lambda *_: {}, lambda _: DATA)


def state() -> dict[str, Any]:
    return {
        "t": tensor("t"),
        "o": ShardedObject("o", 1, (1,), (0,)),
        "f": factory("f"),
        "n": LocalNonpersistentObject(5),
        "c": {"t2": tensor("t2"), "x": 1},
        "l": [tensor("t3"), 7, [LocalNonpersistentObject(6)]],
        "e": {},
    }


def keys(x: Any) -> Any:
    """The structure with kind and key in place of every wrapped value."""
    if isinstance(x, dict):
        return {k: keys(v) for k, v in x.items()}
    if isinstance(x, list):
        return [keys(v) for v in x]
    if isinstance(x, ShardedBase):
        return f"{type(x).__name__}:{x.key}"
    return "nonpersistent" if isinstance(x, LocalNonpersistentObject) else x


T, T2, T3 = "ShardedTensor:t", "ShardedTensor:t2", "ShardedTensor:t3"
OBJ, F, N = "ShardedObject:o", "ShardedTensorFactory:f", "nonpersistent"


@pytest.mark.parametrize(
    ("split", "taken", "left"),
    [
        (
            extract_sharded_tensors_and_factories,
            {"t": T, "f": F, "c": {"t2": T2}, "l": [T3]},
            {"o": OBJ, "n": N, "c": {"x": 1}, "l": [7, [N]], "e": {}},
        ),
        (
            extract_sharded_tensors_or_nonpersistent,
            {"t": T, "f": F, "n": N, "c": {"t2": T2}, "l": [T3, [N]]},
            {"o": OBJ, "c": {"x": 1}, "l": [7], "e": {}},
        ),
    ],
)
def test_state_dicts_are_split_by_kind(split: Any, taken: Any, left: Any) -> None:
    whole = state()
    assert tuple(map(keys, split(whole))) == (taken, left)
    assert keys(whole) == keys(state())


def test_zip_strict() -> None:
    assert list(zip_strict([1, 2], (i for i in "ab"))) == [(1, "a"), (2, "b")]
    assert list(zip_strict()) == []
    for kind in (ValueError, AssertionError, CheckpointingException):
        with pytest.raises(kind, match=re.escape("[1, 1, 2]")):
            zip_strict([1], [2], (i for i in range(2)))


def test_shard_ids_tell_shards_apart_but_not_replicas() -> None:
    def shard(index: int, replica_id: int) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets("k", DATA, (0, index, 2), replica_id=replica_id)

    assert _sharded_tensor_shard_id(shard(1, 0)) == ("k", (2, 0), None)
    assert _sharded_tensor_shard_id(shard(1, 0)) == _sharded_tensor_shard_id(shard(1, 3))
    assert _sharded_tensor_shard_id(shard(0, 0)) != _sharded_tensor_shard_id(shard(1, 0))
    flat = ShardedTensor.from_rank_offsets_flat(
        "k", torch.ones(3), (2, 3), (0, 1, 2), flattened_range=slice(1, 4)
    )
    assert _sharded_tensor_shard_id(flat) == ("k", (2, 0), (1, 4))
    hash(_sharded_tensor_shard_id(flat))
    assert _sharded_object_id(ShardedObject("a", 1, (2,), (1,), 4)) == ("a", (1,), (2,))


# ---- prefixes


def test_add_prefix() -> None:
    whole = state()
    add_prefix_for_sharding(whole, "p.")
    assert [v.key for v in (whole["t"], whole["o"], whole["f"])] == ["p.t", "p.o", "p.f"]
    assert (whole["c"]["t2"].key, whole["l"][0].key) == ("p.t2", "p.t3")


def test_a_shard_that_appears_twice_is_renamed_once() -> None:
    shared = tensor("k")
    add_prefix_for_sharding({"a": shared, "b": [shared]}, "p.")
    assert shared.key == "p.k"


def test_replace_prefix_changes_all_keys_or_none() -> None:
    whole = {"a": tensor("old.a"), "b": tensor("other")}
    with pytest.raises(ValueError, match=r"'other'.*'old\.'") as caught:
        replace_prefix(whole, "old.", "new.")
    assert isinstance(caught.value, CheckpointingException)
    assert caught.value.key == "other"
    assert whole["a"].key == "old.a"


def test_prefix_mapping_takes_the_first_that_matches() -> None:
    whole = state()
    apply_prefix_mapping(whole, {"t2": "X", "t": "Y", "absent": "Z"})
    assert keys(whole)["t"] == "ShardedTensor:Y"
    assert keys(whole)["c"] == {"t2": "ShardedTensor:X", "x": 1}
    assert keys(whole)["l"][0] == "ShardedTensor:Y3"
    assert keys(whole)["o"] == OBJ
    whole = state()
    apply_prefix_mapping(whole, {"t": "Y", "t2": "X"})
    assert keys(whole)["c"]["t2"] == "ShardedTensor:Y2"


# ---- float8


class Quantized(torch.Tensor):
    """A tensor that knows its own way out of eight bits, as Transformer Engine's do."""

    def dequantize(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full(self.shape, 3.0, dtype=torch.float16)


FLOAT8 = [
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_float8_value_survives(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    whole: dict[str, Any] = {"s": ShardedTensor.from_rank_offsets("s", every), "l": [every]}
    assert force_all_tensors_to_non_fp8(whole) is None  # type: ignore[func-returns-value]
    for widened in (whole["s"].data, whole["l"][0]):
        assert widened.dtype == torch.bfloat16
        torch.testing.assert_close(
            widened.to(torch.float32), every.to(torch.float32), rtol=0, atol=0, equal_nan=True
        )
    assert whole["s"].dtype == torch.bfloat16
    whole["s"].validate_metadata_integrity()


def test_tensors_that_dequantize_themselves() -> None:
    quantized = torch.zeros(2, 3).as_subclass(Quantized)
    whole: dict[str, Any] = {
        "s": ShardedTensor.from_rank_offsets("s", quantized),
        "f": ShardedTensorFactory("f", quantized, lambda *_: {}, lambda _: DATA),
    }
    force_all_tensors_to_non_fp8(whole)
    for shard in whole.values():
        assert type(shard.data) is torch.Tensor
        assert torch.equal(shard.data, torch.full((2, 3), 3.0, dtype=torch.float16))
    assert whole["s"].dtype == torch.float16


def test_other_tensors_are_left_alone() -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    bare = tensor("b").without_data()
    eight = ShardedTensor.from_rank_offsets("e", DATA.to(torch.float8_e5m2)).without_data()
    whole: dict[str, Any] = {"p": param, "s": tensor("s"), "b": bare, "e": eight, "x": [1, None]}
    force_all_tensors_to_non_fp8(whole)
    assert whole["p"] is param
    assert whole["s"].data is DATA
    assert (bare.data, bare.dtype) == (None, torch.float32)
    assert (eight.data, eight.dtype) == (None, torch.bfloat16)
    assert whole["x"] == [1, None]


# ---- logging


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG):
        yield caplog
    assert getattr(utils, "__LOGGER_STACK") == []
    assert getattr(utils, "__LOGGER_NAME_STACK") == []


ONE, TWO = logging.getLogger("one"), logging.getLogger("two")


def said(log: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """Logger, level and text without figures of every record so far; forgets them."""
    records = [
        (r.name, r.levelname, re.sub(r"\d+\.\d{4}s$", "#", r.getMessage())) for r in log.records
    ]
    log.clear()
    return records


def test_scopes_nest(log: pytest.LogCaptureFixture) -> None:
    with logger_stack("a", ONE) as outer:
        assert outer == ("a", ONE)
        debug_msg("first")
        with logger_stack("b") as inner:
            assert inner == ("a.b", ONE)
            with logger_stack(None, TWO) as innermost:
                assert innermost == ("a.b", TWO)
                debug_msg("second")
        debug_msg("third")
    assert said(log) == [
        ("one", "DEBUG", "a first"),
        ("two", "DEBUG", "a.b second"),
        ("one", "DEBUG", "a third"),
    ]


def test_messages_outside_any_scope_go_to_the_fallback_logger(
    log: pytest.LogCaptureFixture,
) -> None:
    with logger_stack() as scope:
        assert scope == ("", utils.fallback_logger)
    debug_msg("alone")
    [(name, level, text)] = said(log)
    assert (name, level, text.strip()) == ("shardstore.utils", "DEBUG", "alone")


def test_scopes_end_with_an_error(log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), logger_stack("a", ONE):
        raise KeyError
    with pytest.raises(KeyError), debug_time("b", ONE):
        raise KeyError
    assert said(log) == [("one", "DEBUG", "b took #")]


def test_debug_time(log: pytest.LogCaptureFixture) -> None:
    for scope in (
        debug_time("x"),
        debug_time("x", ONE, threshold=0.0),
        debug_time("x", ONE, threshold=1000.0),
        debug_time("x", ONE, level=logging.INFO),
        debug_time("x", ONE, threshold=0.0, level=logging.ERROR),
    ):
        with scope:
            pass
    assert said(log) == [
        ("shardstore.utils", "DEBUG", "x took #"),
        ("one", "WARNING", "x took #"),
        ("one", "INFO", "x took #"),
        ("one", "ERROR", "x took #"),
    ]


def test_debug_time_is_a_scope_and_a_decorator(log: pytest.LogCaptureFixture) -> None:
    @debug_time("inner", TWO)
    def work() -> int:
        debug_msg("working")
        return 3

    with logger_stack("outer", ONE):
        assert work() + work() == 6
        with debug_time("last"):
            pass
    assert said(log) == [
        ("two", "DEBUG", "outer.inner working"),
        ("two", "DEBUG", "outer.inner took #"),
    ] * 2 + [("one", "DEBUG", "outer.last took #")]


def test_debug_time_measures_the_block(log: pytest.LogCaptureFixture) -> None:
    with debug_time("x", ONE):
        time.sleep(0.05)
    [record] = log.records
    seconds = re.search(r"took (\d+\.\d+)s", record.getMessage())
    assert float(seconds[1]) >= 0.05


# ---- metadata


def test_clean_metadata() -> None:
    kept = {
        "kind": "dp_reshardable",
        "flag": True,
        "none": None,
        "pair": (1, 2),
        "dtype": torch.bfloat16,
    }
    metadata: dict[str, Any] = {
        **kept,
        "lock": threading.Lock(),
        "function": len,
        "lambda": lambda: 0,
        "nested": {"lock": threading.Lock(), "list": [1, threading.Lock(), {"x": len, "y": 2}]},
    }
    clean = _clean_metadata_for_serialization(metadata)
    assert clean == {**kept, "nested": {"list": [1, {"y": 2}]}}
    assert "lock" in metadata
    clean["nested"]["list"].append(3)
    assert len(metadata["nested"]["list"]) == 3


def test_clean_metadata_drops_process_groups(tmp_path: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        metadata = {"dp_group": torch.distributed.group.WORLD, "x": [1]}
        assert _clean_metadata_for_serialization(metadata) == {"x": [1]}
    finally:
        torch.distributed.destroy_process_group()
