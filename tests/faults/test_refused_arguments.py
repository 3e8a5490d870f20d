"""Arguments that make no sense: refused by name, with what was given and what may be, before
anything is touched."""

from __future__ import annotations

import inspect
import itertools
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException

import shardstore
import shardstore.dcp
from shardstore import CheckpointManager, ShardedObject, ShardedTensor
from shardstore.convert import convert
from shardstore.dcp import StorageReader, StorageWriter, install
from shardstore.errors import ArgumentError, CheckpointingException, StructureError
from shardstore.storage.options import SaveKeywords, WriterKeywords
from shardstore.strategies.torch import TorchDistSaveShardedStrategy
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.verification import findings


def state() -> dict[str, Any]:
    return shardstore.shard({"w": torch.arange(6.0).reshape(2, 3)})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    shardstore.save(state(), tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("value", [3, [1], torch.ones(2), ShardedTensor, {"w": ShardedTensor}])
def test_a_state_with_another_value_at_content_metadata_is_refused(
    tmp_path: Path, value: Any
) -> None:
    def made(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: made(item) for key, item in one.items()}
        return ShardedTensor.from_rank_offsets("w", torch.ones(2)) if one is ShardedTensor else one

    given = {**state(), "content_metadata": made(value)}
    with pytest.raises(StructureError, match=r"'content_metadata' in the state.*rename that key"):
        shardstore.save(given, tmp_path / "c", content_metadata={"a": 1})
    assert not (tmp_path / "c").exists()
    given["content_metadata"] = OrderedDict({"a": 0, "of": "an earlier load"})
    shardstore.save(given, tmp_path / "c", content_metadata={"a": 1})
    assert shardstore.load_content_metadata(tmp_path / "c") == {"a": 1}


# -- options -----------------------------------------------------------------------------------


def save(saved: Path, **options: Any) -> object:
    return shardstore.save(state(), saved.with_name("c"), **options)


def save_later(saved: Path, **options: Any) -> object:
    return shardstore.async_save(state(), saved.with_name("c"), **options).result()


def save_managed(saved: Path, **options: Any) -> object:
    return CheckpointManager(saved.with_name("run")).save(1, state(), **options)


def load(saved: Path, **options: Any) -> object:
    return shardstore.load(state(), saved, **options)


def restore(saved: Path, **options: Any) -> object:
    return CheckpointManager(saved.parent).restore(state(), **options)


def convert_it(saved: Path, **options: Any) -> object:
    return convert(saved, saved.with_name("c.safetensors"), **options)


def strategy(_: Path, **options: Any) -> object:
    return ZarrSaveShardedStrategy("zarr", 2, **options)


def torch_dist(_: Path, **options: Any) -> object:
    return TorchDistSaveShardedStrategy(**options)


def install_it(_: Path, **options: Any) -> object:
    return install(**options)


Functions = tuple[Callable[..., object], ...]
SAVES = (save, save_later, save_managed)
LOADS = (load, shardstore.load_plain_tensors)
GROUP = "replica_group=.* must be a process group.*or None"
OPTIONS = "storage_options must be a dict.* of type list"
SLICES = "key 'w' of shape .* give a list of slices"
DEVICES = ["nowhere", "cpu:x", "cuda:99", 1.5]
WRONG: list[tuple[Functions, str, list[Any], str]] = [
    (SAVES, "compression", ["lz9"], "compression={} must be 'zstd', 'blosc' or None"),
    (SAVES, "options", [{"durable": False}], "a shardstore.SaveOptions, such as .* or None"),
    (SAVES[1:2], "when_busy", ["panic"], "when_busy={} must be 'wait' or"),
    (SAVES[1:2], "at_exit", ["explode"], "at_exit={} must be 'wait' or"),
    (SAVES[:1], "async_strategy", ["gloo"], "{} must be 'mcore', 'nvrx'"),
    (SAVES, "staging_budget_bytes", [-1], "staging_budget_bytes={}"),
    (SAVES, "progress", ["bars"], "progress={}"),
    (SAVES, "content_metadata", [[1]], "content_metadata=.* must be a dict"),
    (SAVES, "base", [""], "empty"),
    (SAVES, "threads", [2], "has no keyword threads; it takes "),
    ((save, save_later, load), "replica_group", [3, "dp", [0, 1]], GROUP),
    ((save, load, shardstore.open, install_it), "storage_options", [["x"]], OPTIONS),
    (LOADS, "map_location", DEVICES, "map_location=.* must be a device, as in 'c"),
    (LOADS, "map_location", ["meta", torch.device("meta")], "map_location=.*load_tensors_metadata"),
    ((load,), "cast", [torch.float32], "cast={} must be True, False or 'warn'"),
    ((load,), "process_group", [3], "process_group={} must be a process group"),
    ((load,), "exchange_budget_bytes", ["1 MiB"], "exchange_budget_bytes={} must be a whole num"),
    ((load, StorageReader, install_it), "strict", ["rais_all"], "strict.*{}; give one of"),
    ((load,), "share_replicas", ["maybe"], "share_replicas.*{}"),
    ((load,), "progress", [5], "progress.*{}"),
    (LOADS[1:], "keys", ["weight", 5], "keys={} must be a list"),
    (LOADS[1:], "region", [{"w": slice(0, 1)}, {"w": [0]}], SLICES),
    (LOADS[1:], "region", [5], "give a list of slices"),
    (LOADS[1:], "region", [{"w": [slice(0, 2, 2)]}], "without steps"),
    (LOADS[1:], "region", [[slice(0, 1)] * 3], "at most one an axis"),
    ((StorageReader,), "threads", [0, 1.5, "2", True], "threads={} must be .*at least 1, or None"),
    ((StorageWriter, install_it), "threads", [0, -1, 1.5], "={} must be .*at least 1, or None"),
    ((StorageWriter,), "target_chunk_bytes", [0, 2.5, "1 MiB", None], "={} must be .*at least 1"),
    ((torch_dist,), "thread_count", [0, "2"], "thread_count={}"),
    ((torch_dist,), "separation_hint", ["a/b", ".a", 3], "separation_hint={}"),
    ((strategy,), "array_documents", [None, 1, "False"], "documents={} must be True or False"),
    ((findings,), "progress", ["x"], "progress={} must be a callable, 'bar' or None"),
    ((findings,), "threads", [0], "threads={}"),
    ((convert_it,), "memory_budget", ["1G"], "memory_budget={}"),
    ((convert_it,), "file_bytes", [0], "file_bytes={}"),
    ((convert_it,), "progress", [5], "progress={}"),
    ((save_managed,), "metrics", [5], "metrics={} must be a dict"),
    ((save_managed,), "metrics", [{"loss": "low"}, {"loss": torch.ones(2)}], "metric 'loss'="),
    ((save_managed,), "metrics", [{"loss": 10**400}], "metric 'loss'=1000"),  # OverflowError
    ((restore,), "progress", [7], "progress={}"),
    ((CheckpointManager,), "sweep_after", [24], "sweep_after={} must be a timedelta"),
    ((shardstore.sweep,), "older_than", [24, "1 day", None], "older_than={} must be a timedelta"),
    ((CheckpointManager,), "keep_last", ["2"], "keep_last"),
    ((CheckpointManager,), "prefix", [None], "prefix"),
    ((shardstore.remove_sharded_tensors,), "key_prefix", [3, None, b"w"], "{} must be a string"),
]
"""Functions with an option, values that they refuse, and what they say."""


@pytest.mark.parametrize(("functions", "name", "values", "says"), WRONG)
def test_a_wrong_value_of_an_option_is_refused(
    saved: Path, functions: Functions, name: str, values: list[Any], says: str
) -> None:
    for function, value in itertools.product(functions, values):
        with pytest.raises(ArgumentError, match=says.replace("{}", re.escape(repr(value)))):
            function(saved, **{name: value})
    assert set(os.listdir(saved.parent)) <= {"saved", "run"}
    assert not list(saved.parent.glob("run/*"))


def test_slices_of_a_key_that_is_not_asked_for_are_refused(saved: Path) -> None:
    (key, *_) = shardstore.load_tensors_metadata(saved)
    with pytest.raises(ArgumentError, match=r"typo.* keys= does not name"):
        shardstore.load_plain_tensors(saved, keys=[key], region={"typo": [slice(0, 1)]})


def test_a_load_whose_tensors_would_have_no_values_is_refused(saved: Path) -> None:
    """It called intact files damaged, so that a manager passed over the step."""
    save_managed(saved)
    restore_it = CheckpointManager(saved.with_name("run")).restore
    for call in (*(partial(function, saved) for function in LOADS), partial(restore_it, state())):
        with FakeTensorMode(), pytest.raises(ArgumentError, match=r"FakeTensorMode.*open\(\)"):
            call()
        assert call()


@pytest.mark.parametrize("step", [-1, 1.5, "3", None, True])
def test_a_manager_refuses_steps_that_are_no_whole_numbers(tmp_path: Path, step: Any) -> None:
    manager = CheckpointManager(tmp_path)
    for call in (manager.url, lambda wrong: manager.save(wrong, state())):
        with pytest.raises(ArgumentError, match="step="):
            call(step)
    assert manager.steps() == []


FLAGGED: dict[Callable[..., object], Callable[..., object]] = {
    shardstore.save: save,
    shardstore.async_save: save_later,
    shardstore.load: load,
    shardstore.sweep: shardstore.sweep,
    CheckpointManager.restore: restore,
    convert: convert_it,
    StorageReader.__init__: StorageReader,
    StorageWriter.__init__: StorageWriter,
    install: install_it,
}
"""Each public function that takes True or False, and a call of it."""


KEYWORDS = {f"Unpack[{kind.__name__}]": kind for kind in (SaveKeywords, WriterKeywords)}


def flags_of(function: Callable[..., object]) -> list[str]:
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.annotation == "bool":
            names.append(parameter.name)
        if parameter.annotation in KEYWORDS:
            hints = get_type_hints(KEYWORDS[parameter.annotation])
            names += [name for name, kind in hints.items() if kind is bool]
    return names


def public_functions() -> Iterator[Callable[..., object]]:
    for module in (shardstore, shardstore.convert, shardstore.dcp):
        for found in vars(module).values():
            if inspect.isfunction(found):
                yield found
            elif inspect.isclass(found) and not is_dataclass(found):
                yield from (f for f in vars(found).values() if inspect.isfunction(f))


def test_each_function_with_flags_is_tried() -> None:
    of_dcp = {StorageReader.set_up_storage_reader, StorageWriter.set_up_storage_writer}
    assert {f for f in public_functions() if flags_of(f)} - of_dcp == set(FLAGGED)


@pytest.mark.parametrize("given", ["no", 1, None], ids=repr)
@pytest.mark.parametrize("function", FLAGGED, ids=lambda f: f.__qualname__)
def test_flags_are_true_or_false(
    saved: Path, function: Callable[..., object], given: object
) -> None:
    for name in flags_of(function):
        with pytest.raises(ArgumentError, match=f"{name}={given!r} must be True or False"):
            FLAGGED[function](saved, **{name: given})
    assert os.listdir(saved.parent) == ["saved"]


def test_states_that_are_no_dicts_are_refused(saved: Path) -> None:
    manager = CheckpointManager(saved.parent)
    calls: list[Callable[[Any], object]] = [
        lambda wrong: shardstore.save(wrong, saved / "c"),
        lambda wrong: shardstore.async_save(wrong, saved / "c"),
        lambda wrong: shardstore.load(wrong, saved),
        lambda wrong: manager.save(1, wrong),
        manager.restore,
        shardstore.shard,
    ]
    model = torch.nn.Linear(1, 1)
    others = ([1], [state()["w"]], state()["w"], None, 3, "x", object(), model)
    for call, wrong in itertools.product(calls, others):
        how = r"pass its state_dict\(\)" if wrong is model else "for one tensor"
        said = f"the state dict must be a dict.*{type(wrong).__name__}.*{how}"
        with pytest.raises(StructureError, match=said):
            call(wrong)
    assert os.listdir(saved.parent) == ["saved"]


@pytest.mark.parametrize("wrong", [3, None, ("x",), ("a", 2)], ids=repr)
def test_shapes_that_are_no_whole_numbers_are_refused(wrong: Any) -> None:
    for make in (
        lambda: ShardedObject("o", 1, wrong, (0,)),
        lambda: ShardedObject("o", 1, (1,), wrong),
    ):
        with pytest.raises(ArgumentError, match="must be a tuple of whole numbers"):
            make()


@pytest.mark.parametrize("kind", ["dict", "list", "deep"])
def test_endless_nesting_is_refused(saved: Path, kind: str) -> None:
    endless: dict[str, Any] = {"outer": {"inner": [1, 2]}}
    if kind == "dict":
        endless["outer"]["inner"] = endless["outer"]
    elif kind == "list":
        endless["outer"]["inner"].append(endless["outer"]["inner"])
    else:
        for _ in range(5000):
            endless = {"outer": {"inner": endless}}
    for function in (shardstore.save, shardstore.load, shardstore.async_save):
        with pytest.raises(StructureError, match=r"more than 300 levels deep at outer\.inner\."):
            function(endless, saved.with_name("c") if function is not shardstore.load else saved)
    assert os.listdir(saved.parent) == ["saved"]


# -- tensors that DCP's loads can not fill -----------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [torch.zeros(1, 3).expand(2, 3), torch.zeros(4).as_strided((2, 3), (1, 1))],
    ids=["expanded", "overlapping"],
)
@pytest.mark.parametrize("cast", [False, True])
def test_dcp_does_not_load_into_tensors_that_share_memory(
    saved: Path, given: torch.Tensor, cast: bool
) -> None:
    reader = StorageReader(saved, cast=cast)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": given}, storage_reader=reader, no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, ArgumentError)
    assert "'w'" in str(error)
    assert "share memory" in str(error)
    assert not given.any()


# -- a conversion's two places -----------------------------------------------------------------


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("target_format", "overwrite"), [("shardstore", True), ("safetensors", False), ("dcp", True)]
)
def test_a_conversion_into_its_source_is_refused(
    saved: Path, target_format: str, overwrite: bool
) -> None:
    shardstore.save(state(), saved / "inner")
    before = files_below(saved.parent)
    link = saved.parent / "link"
    link.symlink_to(saved)
    for target, where in (
        (saved, "is the source itself"),
        (saved / "new", "lies inside the source"),
        (saved / "w" / "deep" / "new", "lies inside the source"),
        (link, "is the source itself"),
        (link / "new", "lies inside the source"),
        (saved / "x" / ".." / "new", "lies inside the source"),
    ):
        for source in (saved, link):
            with pytest.raises(ArgumentError, match=f"{where} .*beside the source"):
                convert(source, target, target_format=target_format, overwrite=overwrite)
    for target in (saved, link):
        with pytest.raises(ArgumentError, match="holds the source"):
            convert(saved / "inner", target, target_format=target_format, overwrite=overwrite)
    link.unlink()
    assert files_below(saved.parent) == before


def test_a_conversion_into_its_source_is_refused_in_an_object_store(saved: Path) -> None:
    convert(saved, "memory://apart/run/c")
    for target in ("memory://apart/run/c", "memory://apart/run/c/d", "memory://apart/run"):
        with pytest.raises(ArgumentError, match="the target memory://apart/run"):
            convert("memory://apart/run/c", target, overwrite=True)
    convert("memory://apart/run/c", "memory://apart/run/c2")  # which only begins alike
    assert shardstore.load_plain_tensors("memory://apart/run/c2")["w"].tolist()[1] == [3, 4, 5]


def test_a_conversion_beside_its_source_is_allowed(saved: Path) -> None:
    convert(saved, saved.with_name("saved.more"))
    convert(saved, saved.with_name("sav"))
    single = saved.with_name("one.safetensors")
    convert(saved, single)
    convert(single, saved.with_name("one"))
    # Nothing there: what is wrong with the source comes first.
    with pytest.raises(CheckpointingException, match="nothing"):
        convert(saved.with_name("nothing"), saved.with_name("d"))


# -- verify, as a function ---------------------------------------------------------------------


def test_verify_draws_a_bar(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert findings(saved, progress="bar") == []
    line = capfd.readouterr().err
    assert "verify saved done" in line
    assert "24/24 bytes" in line
    with pytest.raises(CheckpointingException):
        findings(saved.parent, progress="bar")
    assert f"verify {saved.parent.name} failed" in capfd.readouterr().err


# -- tensors to be loaded that share memory ----------------------------------------------------


class Marked(torch.Tensor):
    """A subclass that has memory."""


def _views() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    memory = torch.zeros(4, 12)
    return {
        "parts that overlap": (memory[:3], memory[1:]),
        "transposed": (memory[:, :4], memory[:, :4].T),
        "another shape": (memory.reshape(48), memory),
        "columns that overlap": (memory[:, :8], memory[:, 4:]),
        "other bits": (memory[0].view(torch.int32), memory[0]),
        "of a subclass": (memory[:3].as_subclass(Marked), memory[1:].as_subclass(Marked)),
    }


def _saved(place: Path, *tensors: torch.Tensor) -> None:
    fills = [torch.full(t.shape, i + 1, dtype=t.dtype) for i, t in enumerate(tensors)]
    shardstore.save(_asked(*fills), place)


def _asked(*tensors: torch.Tensor) -> dict[str, Any]:
    return shardstore.shard({f"t{i}": tensor for i, tensor in enumerate(tensors)})


@pytest.mark.parametrize("kind", _views())
def test_targets_that_share_a_part_of_their_memory_are_refused(tmp_path: Path, kind: str) -> None:
    views = _views()[kind]
    _saved(tmp_path / "c", *views)
    with pytest.raises(ArgumentError, match=r"'t[01]' and 't[01]'.*share a part of their memory"):
        shardstore.load(_asked(*views), tmp_path / "c")
    assert not any(view.any() for view in views)
    by_dcp = StorageReader(tmp_path / "c")
    with pytest.raises(CheckpointException) as caught:
        dcp.load({f"t{i}": v for i, v in enumerate(views)}, storage_reader=by_dcp, no_dist=True)
    assert "share a part of their memory" in str(caught.value.failures[0][0])


def test_views_that_share_no_element_are_loaded(tmp_path: Path) -> None:
    memory = torch.zeros(4, 12)
    views = [memory[:, :4], memory[:, 4:8], memory[:2, 8:], memory[2:, 8::2], memory[2:, 9::2]]
    _saved(tmp_path / "c", *views)
    shardstore.load(_asked(*views), tmp_path / "c")
    assert [float(view.mean()) for view in views] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("kind", [torch.Tensor, Marked])
def test_tied_tensors_load_if_what_is_stored_is_equal(
    tmp_path: Path, dtype: torch.dtype, kind: type[torch.Tensor]
) -> None:
    """One tensor under two keys: what is stored under both has to be the same."""
    tied = torch.zeros(2, 3, dtype=dtype).as_subclass(kind)
    values = torch.tensor([[1, 2, 3], [4, 5, 6]]).to(dtype)
    if dtype.is_floating_point:
        values[0, 0] = torch.nan
    shardstore.save(_asked(values, values), tmp_path / "same")
    loaded: Any = shardstore.load(_asked(tied, tied), tmp_path / "same")
    assert torch.equal(tied.view(torch.uint8), values.view(torch.uint8))
    assert loaded["t0"].data_ptr() == loaded["t1"].data_ptr() == tied.data_ptr()
    shardstore.save(_asked(values, values * 2), tmp_path / "other")
    with pytest.raises(ArgumentError, match=r"'t0' and 't1'.*same memory.*differ"):
        shardstore.load(_asked(tied, tied), tmp_path / "other")
