"""Saving and loading through the public entry points: what programs rely on, on four real ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zarr

import shardstore
from shardstore.errors import (
    ArgumentError,
    CheckpointExistsError,
    NotACheckpointError,
    RanksError,
)
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.serialization import load_sharded_metadata
from shardstore.storage.runtime.counters import counters
from shardstore.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from shardstore.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from tests.helpers.scenarios import logged, raised, remains, remains_of_all

WORLD = 4
WHOLE = torch.arange(48, dtype=torch.float32).reshape(8, 6)


def rows(key: str, rank: int, world_size: int, whole: torch.Tensor = WHOLE) -> ShardedTensor:
    part = whole.chunk(world_size)[rank].clone()
    return ShardedTensor.from_rank_offsets(key, part, (0, rank, world_size))


def columns(key: str, rank: int, world_size: int, whole: torch.Tensor = WHOLE) -> ShardedTensor:
    part = torch.zeros(whole.shape[0], whole.shape[1] // world_size)
    return ShardedTensor.from_rank_offsets(key, part, (1, rank, world_size))


def replicated(key: str, rank: int, whole: torch.Tensor = WHOLE) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, whole.clone(), replica_id=rank)


def common_state_is_that_of_rank_0(rank: int, world_size: int, folder: Path) -> None:
    state: dict[str, Any] = {"w": rows("w", rank, world_size), "step": 7, "args": {"lr": 0.1}}
    if rank == 2:
        state["step"] = 8
        state["mine"] = 1
        del state["args"]["lr"]
    with logged() as texts:
        shardstore.save(state, folder / "c")
    if rank == 2:
        (text,) = texts
        assert text.startswith("The common values of rank 2 differ from those of rank 0")
        before, only_mine = text.split("only on rank 2: ")
        assert "Only on rank 0: [('args', 'lr')]" in before
        assert only_mine.startswith("[('mine',)]; different: [(('step',)")
    else:
        assert texts == []
    loaded = shardstore.load({"w": rows("w", rank, world_size, WHOLE * 0)}, folder / "c")
    assert {k: v for k, v in loaded.items() if k != "w"} == {"step": 7, "args": {"lr": 0.1}}


def comparison_can_be_told_what_to_leave_out(rank: int, world_size: int, folder: Path) -> None:
    state: dict[str, Any] = {"w": rows("w", rank, world_size), "rank": rank, "step": 1}

    def without_rank(common: dict[str, Any]) -> dict[str, Any]:
        common.pop("rank")
        return common

    with logged() as texts:
        shardstore.save(
            state, folder / "c", preprocess_common_before_consistancy_check=without_rank
        )
    assert texts == []
    assert shardstore.load(
        {}, folder / "c", strict="ignore_all", validate_access_integrity=False
    ) == {"rank": 0, "step": 1}


def clean_save_and_load_log_nothing(rank: int, world_size: int, folder: Path) -> None:
    state = {
        "w": rows("w", rank, world_size),
        "r": replicated("r", rank),
        "o": ShardedObject("o", {"rank": rank}, (world_size,), (rank,)),
        "step": 3,
        "float8": torch.ones(2).to(torch.float8_e5m2),
        "float4": torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    with logged() as texts:
        shardstore.save(state, folder / "c", content_metadata={"a": 1})
        wanted = {"w": columns("w", rank % 2, 2), "r": replicated("r", rank, WHOLE * 0)}
        wanted["w"].replica_id = rank // 2
        loaded = shardstore.load(wanted, folder / "c")
    assert texts == []
    assert torch.equal(loaded["r"], WHOLE)
    assert torch.equal(loaded["w"], WHOLE.chunk(2, 1)[rank % 2])
    assert remains(folder) == ["c"]


def sharded_objects(rank: int, world_size: int, folder: Path) -> None:
    state = {
        "grid": ShardedObject("grid", {"of": rank}, (2, world_size), (0, rank)),
        "list": [ShardedObject("grid", [rank, torch.ones(2)], (2, world_size), (1, rank))],
        "one": ShardedObject("one", "main" if rank == 0 else "copy", (1,), (0,), replica_id=rank),
    }
    shardstore.save(state, folder / "c")
    other = (rank + 1) % world_size
    wanted = {
        "grid": ShardedObject("grid", None, (2, world_size), (0, other)),
        "list": [ShardedObject("grid", None, (2, world_size), (1, other))],
        "one": ShardedObject("one", None, (1,), (0,), replica_id=rank),
    }
    loaded = shardstore.load(wanted, folder / "c")
    assert loaded["grid"] == {"of": other}
    assert loaded["list"][0][0] == other
    assert loaded["one"] == "main"
    stored = load_sharded_metadata(folder / "c")
    assert f"grid/shard_1.{rank}_2.{world_size}" in stored
    assert len(stored) == 2 * world_size + 1


def content_metadata_is_in_the_root_attributes(rank: int, world_size: int, folder: Path) -> None:
    given = {"model": "gpt", "tp": 2, "nested": {"list": [1, None]}}
    shardstore.save({"w": rows("w", rank, world_size)}, folder / "c", content_metadata=given)
    attributes: Any = dict(zarr.open_group(folder / "c", mode="r").attrs)
    assert attributes["content_metadata"] == given
    assert attributes["shardstore"]["commit"]["world_size"] == world_size
    assert shardstore.load_content_metadata(folder / "c") == given
    shardstore.save({"w": rows("w", rank, world_size)}, folder / "e", content_metadata={})
    loaded = shardstore.load({"w": rows("w", rank, world_size)}, folder / "e")
    assert shardstore.load_content_metadata(preloaded_state_dict=loaded) == {}


def strict_modes(rank: int, world_size: int, folder: Path) -> None:
    stored = {key: rows(key, rank, world_size) for key in ("both", "only_stored")}
    shardstore.save(stored, folder / "c")

    def wanted() -> dict[str, Any]:
        return {key: rows(key, rank, world_size, WHOLE * 0) for key in ("both", "only_wanted")}

    # Only rank 1 asks for one of them: the others must hear of it.
    def uneven() -> dict[str, Any]:
        state = {"both": rows("both", rank, world_size, WHOLE * 0)}
        if rank == 1:
            state["only_wanted"] = ShardedTensor.from_rank_offsets("only_wanted", torch.zeros(3))
        return state

    for state in (wanted, uneven):
        mine = {"only_wanted"} if state is wanted or rank == 1 else set()

        def attempt(mode: str, state: Callable[[], dict[str, Any]] = state) -> Any:
            return shardstore.load(state(), folder / "c", strict=mode)

        def message(mode: str, attempt: Callable[[str], Any] = attempt) -> str:
            return str(raised(lambda: attempt(mode)))

        assert "only_wanted" in message("assume_ok_unexpected")
        text = message("raise_unexpected")
        assert "Unexpected keys" in text
        assert "only_wanted" in text
        assert "Missing keys" not in text
        text = message("raise_all")
        assert ("Unexpected keys" in text) >= bool(mine)
        assert "Missing keys" in text
        assert "only_stored" in text
        for mode, missing in (("return_unexpected", set()), ("return_all", {"only_stored"})):
            loaded, lacking, unexpected = attempt(mode)
            assert (lacking, unexpected) == (missing, mine), mode
            assert torch.equal(loaded["both"], WHOLE.chunk(world_size)[rank])
            assert "only_wanted" not in loaded
        logs = {"log_unexpected": mine, "log_all": {*mine, "only_stored"}, "ignore_all": set()}
        for mode, words in logs.items():
            with logged() as texts:
                loaded = attempt(mode)
            assert torch.equal(loaded["both"], WHOLE.chunk(world_size)[rank])
            assert {w for w in ("only_wanted", "only_stored") if w in str(texts)} == words, mode
            assert bool(texts) == bool(words), (mode, texts)


def shapes_may_differ_if_allowed(rank: int, world_size: int, folder: Path) -> None:
    stored = torch.arange(1.0, 61.0).reshape(10, 6)
    shardstore.save({"w": replicated("w", rank, stored)}, folder / "c")

    for length in (8, 12, 16):
        part = torch.full((length // world_size, 6), -1.0)
        wanted = ShardedTensor.from_rank_offsets(
            "w", part, (0, rank, world_size), allow_shape_mismatch=True
        )
        padded = torch.zeros(length, 6)
        padded[:10] = stored[:length]
        loaded = shardstore.load({"w": wanted}, folder / "c")
        assert torch.equal(loaded["w"], padded.chunk(world_size)[rank]), length


def a_checkpoint_is_replaced_only_if_asked_for(rank: int, world_size: int, folder: Path) -> None:
    def state(factor: int) -> dict[str, Any]:
        return {"w": rows("w", rank, world_size, WHOLE * factor), "step": factor}

    shardstore.save(state(1), folder / "c")
    for save in (shardstore.save, shardstore.async_save):
        raised(partial(save, state(2), folder / "c"), "overwrite=True", kind=CheckpointExistsError)
        assert remains(folder) == ["c"]
    assert torch.equal(shardstore.load(state(0), folder / "c")["w"], WHOLE.chunk(world_size)[rank])
    shardstore.save(state(3), folder / "c", overwrite=True)
    loaded = shardstore.load({"w": rows("w", rank, world_size)}, folder / "c")
    assert torch.equal(loaded["w"], 3 * WHOLE.chunk(world_size)[rank])
    assert loaded["step"] == 3
    assert remains_of_all(folder) == ["c"]


def metadata_can_be_loaded(rank: int, world_size: int, folder: Path) -> None:
    state = {"a": rows("a", rank, world_size), "b.x": rows("b.x", rank, world_size, WHOLE + 1)}
    shardstore.save({**state, "step": 1}, folder / "c")
    metadata = shardstore.load_tensors_metadata(folder / "c")
    assert sorted(metadata) == ["a", "b.x"]
    assert metadata["a"].global_shape == metadata["a"].local_shape == (8, 6)
    assert metadata["a"].axis_fragmentations == (1, 1)
    loaded = shardstore.load(metadata, folder / "c", validate_access_integrity=False)
    assert torch.equal(loaded["a"], WHOLE)
    plain = shardstore.load_plain_tensors(folder / "c")
    assert torch.equal(plain["b.x"], WHOLE + 1)
    assert plain["step"] == 1


def replicas_share_the_work(rank: int, folder: Path) -> None:
    shapes = {"a": (16, 4), "b": (7,), "c": (3, 3, 3), "d": (), "e": (64,)}
    wholes = {key: torch.randn(shape) for key, shape in shapes.items()}
    for whole in wholes.values():
        dist.broadcast(whole, 0)
    save = FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy("zarr", 2))
    before = counters.copy()["chunks_written"]
    # Half of the ranks hold one part of the flattened optimizer state, half the other.
    part = slice(0, 40) if rank % 2 == 0 else slice(40, 96)
    flat = torch.arange(96.0)
    state: dict[str, Any] = {key: replicated(key, rank, whole) for key, whole in wholes.items()}
    state["flat"] = ShardedTensor.from_rank_offsets_flat(
        "flat", flat[part].clone(), (12, 8), flattened_range=part, replica_id=rank // 2
    )
    state["o"] = ShardedObject("o", [1], (1,), (0,), replica_id=rank)
    shardstore.save(state, folder / "c", save)
    mine = torch.tensor(counters.copy()["chunks_written"] - before)
    assert mine > 0
    dist.all_reduce(mine)
    assert mine <= len(shapes) + 96 * 4 // 64 + 1
    for algorithm in ("broadcast", "gather_rounds", "gather_object"):
        strategy = FullyParallelLoadStrategyWrapper(
            ZarrLoadShardedStrategy(), exchange_algo=algorithm
        )
        wanted: dict[str, Any] = {
            key: replicated(key, rank, whole * 0) for key, whole in wholes.items()
        }
        wanted["flat"] = ShardedTensor.from_rank_offsets_flat(
            "flat", torch.zeros(96)[part], (12, 8), flattened_range=part, replica_id=rank // 2
        )
        wanted["o"] = ShardedObject("o", None, (1,), (0,), replica_id=rank)
        loaded = shardstore.load(wanted, folder / "c", sharded_strategy=strategy)
        for key, whole in wholes.items():
            assert torch.equal(loaded[key], whole), (algorithm, key)
        assert torch.equal(loaded["flat"], flat[part])
        assert loaded["o"] == [1]


_opened: list[str] = []


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        _opened.append(os.fsdecode(arguments[0]))


def documents_are_read_by_one_rank_of_several_machines(rank: int, folder: Path) -> None:
    state = {f"w{i}": rows(f"w{i}", rank, WORLD) for i in range(20)}
    shardstore.save({**state, "step": 1}, folder / "c")
    dist.barrier()
    sys.addaudithook(_note_opened)
    _opened.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        shardstore.load(
            {f"w{i}": columns(f"w{i}", rank % 2, 2) for i in range(20)},
            folder / "c",
            validate_access_integrity=False,
        )
    read = [Path(path) for path in _opened if path.startswith(str(folder))]
    read = [path for path in read if not path.name.startswith("c.")]
    if rank:
        assert read == [], read
    else:
        names = sorted(path.name for path in read)
        assert names == ["common.pt", "metadata.json", "zarr.json"], names


def a_place_without_a_checkpoint_is_an_error_on_all(rank: int, folder: Path) -> None:
    """Also where it is that of one rank alone, and nothing is read."""
    shardstore.save({"w": rows("w", rank, WORLD)}, folder / "c")
    wanted = {"w": rows("w", rank, WORLD, WHOLE * 0)}
    for victims in ([1], range(WORLD)):
        place = folder / ("nowhere" if rank in victims else "c")
        kind = NotACheckpointError if rank in victims else RanksError
        error = raised(partial(shardstore.load, wanted, place), "does not exist", kind=kind)
        assert rank in victims or "rank 1: " in str(error)
        assert not wanted["w"].data.any()


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)


# -- a world of one, without a process group ------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    shardstore.save({"w": replicated("w", 0), "step": 1}, tmp_path / "c")
    return tmp_path / "c"


def _given(tensor: torch.Tensor, place: Path) -> torch.Tensor:
    state = {"w": ShardedTensor.from_rank_offsets("w", tensor)}
    loaded = shardstore.load(state, place)["w"]
    assert torch.equal(loaded, WHOLE)
    return loaded


def test_loading_writes_into_the_memory_given(stored: Path) -> None:
    contiguous = torch.zeros(8, 6)
    assert _given(contiguous, stored).data_ptr() == contiguous.data_ptr()
    transposed = torch.zeros(6, 8).t()
    assert _given(transposed, stored).data_ptr() == transposed.data_ptr()
    wide = torch.zeros(8, 12)
    assert _given(wide[:, ::2], stored).data_ptr() == wide.data_ptr()
    assert torch.equal(wide[:, 1::2], torch.zeros(8, 6))
    parameter = torch.nn.Parameter(torch.zeros(8, 6))
    assert _given(parameter, stored).data_ptr() == parameter.data_ptr()
    assert torch.equal(parameter, WHOLE)
    assert parameter.requires_grad
    assert parameter.grad is None


def test_loading_makes_a_tensor_where_there_is_no_memory_of_its_own(stored: Path) -> None:
    assert _given(torch.empty(8, 6, device="meta"), stored).device.type == "cpu"
    nothing = ShardedTensor("w", None, torch.float32, (8, 6), (8, 6), (0, 0), (1, 1))
    assert torch.equal(shardstore.load({"w": nothing}, stored)["w"], WHOLE)


SHARING: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.zeros(1, 6).expand(8, 6),
    "one element": lambda: torch.zeros(()).expand(8, 6),
    "overlapping": lambda: torch.zeros(60).as_strided((8, 6), (3, 1)),
    "axes into each other": lambda: torch.zeros(80).as_strided((8, 6), (7, 2)),
    "sparse": lambda: torch.zeros(8, 6).to_sparse(),
    "csr": lambda: torch.zeros(8, 6).to_sparse_csr(),
}


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *((("zarr", 2), kind) for kind in SHARING),
        (("zarr", 1), "overlapping"),
        (("torch_dist", 1), "expanded"),
        (("torch_dist", 1), "sparse"),
    ],
    ids=str,
)
def test_a_tensor_that_can_not_be_filled_is_refused(
    tmp_path: Path, kind: str, backend: tuple[str, int]
) -> None:
    """A new tensor in its place would leave a model as it was."""
    shardstore.save({"w": replicated("w", 0)}, tmp_path / "c", backend)
    given = SHARING[kind]()
    with pytest.raises(ArgumentError, match=r"'w'.*shape \(8, 6\).*data=None"):
        shardstore.load({"w": ShardedTensor.from_rank_offsets("w", given)}, tmp_path / "c")
    assert not given.to_dense().any() if given.layout is not torch.strided else not given.any()


def test_a_part_of_a_larger_state_may_be_asked_for(stored: Path) -> None:
    loaded = shardstore.load({}, stored)
    assert loaded == {"step": 1}
    part = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 6), (0, 3, 4))
    assert torch.equal(
        shardstore.load({"w": part}, stored, validate_access_integrity=False)["w"], WHOLE[6:]
    )
    raised(lambda: shardstore.load({"w": part}, stored), "Invalid access pattern", "'w'")


def _bytes_read(wanted: list[ShardedTensor], place: Path) -> int:
    """Bytes read if each of these were loaded by a rank of its own."""
    before = counters.copy()["bytes_read"]
    for tensor in wanted:
        shardstore.load({"x": tensor}, place, validate_access_integrity=False)
    return counters.copy()["bytes_read"] - before


def _flat_shards(whole: torch.Tensor, parts: int) -> list[ShardedTensor]:
    share = -(-whole.numel() // parts)
    bounds = [(i * share, min((i + 1) * share, whole.numel())) for i in range(parts)]
    return [
        ShardedTensor.from_rank_offsets_flat(
            "x", whole.reshape(-1)[a:b], tuple(whole.shape), flattened_range=slice(a, b)
        )
        for a, b in bounds
    ]


@pytest.mark.parametrize("shape", [(1536, 2048), (3_000_001,), (12, 1000, 257), (3, 1024, 1024)])
def test_a_flat_range_reads_little_more_than_itself(shape: tuple[int, ...], tmp_path: Path) -> None:
    whole = torch.randn(shape)
    shardstore.save({"x": _flat_shards(whole, 8)}, tmp_path / "c", durable=False)
    for parts in (8, 5, 3, 1):
        wanted = _flat_shards(torch.zeros(shape), parts)
        read = _bytes_read(wanted, tmp_path / "c")
        assert whole.nbytes <= read <= 1.1 * whole.nbytes, (parts, read / whole.nbytes)
        assert torch.equal(
            torch.cat([w.data for w in wanted if w.data is not None]), whole.reshape(-1)
        )


@pytest.mark.parametrize(("before", "after", "axis"), [(4, 16, 0), (4, 16, 1), (16, 4, 1)])
def test_resharding_reads_little_more_than_is_wanted(
    before: int, after: int, axis: int, tmp_path: Path
) -> None:
    whole = torch.randn(2048, 2048)
    saved = [
        ShardedTensor.from_rank_offsets("x", part, (axis, i, before))
        for i, part in enumerate(whole.chunk(before, axis))
    ]
    shardstore.save({"x": saved}, tmp_path / "c", durable=False)
    wanted = [
        ShardedTensor.from_rank_offsets("x", torch.zeros_like(part), (axis, i, after))
        for i, part in enumerate(whole.chunk(after, axis))
    ]
    read = _bytes_read(wanted, tmp_path / "c")
    assert read <= 1.25 * whole.nbytes, read / whole.nbytes
    assert torch.equal(torch.cat([w.data for w in wanted if w.data is not None], axis), whole)


def test_a_strategy_may_be_named_or_be_an_object(tmp_path: Path) -> None:
    for number, strategy in enumerate(
        [("zarr", 2), ("zarr", 1), ZarrSaveShardedStrategy("zarr", 1), None]
    ):
        place = tmp_path / str(number)
        shardstore.save({"w": replicated("w", 0)}, place, strategy, ("torch", 1))
        loaded = shardstore.load({"w": replicated("w", 0, WHOLE * 0)}, place)
        assert torch.equal(loaded["w"], WHOLE)
        assert (place / "w" / ".zarray").exists() == (number in (1, 2))
    for wrong in (("zarr", 9), ("none", 1), "zarr", 3):
        raised(partial(shardstore.save, {}, tmp_path / "x", wrong))
    assert not (tmp_path / "x").exists()


@contextmanager
def _in(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def test_places_may_be_relative_or_links(tmp_path: Path) -> None:
    with _in(tmp_path):
        shardstore.save({"w": replicated("w", 0)}, "a/b/c")
        loaded = shardstore.load({"w": replicated("w", 0, WHOLE * 0)}, Path("a/../a/b/c"))
    assert torch.equal(loaded["w"], WHOLE)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b" / "c")
    assert torch.equal(shardstore.load({"w": replicated("w", 0)}, tmp_path / "link")["w"], WHOLE)
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["c"]
