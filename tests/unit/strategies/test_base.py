"""The registry of strategies and what the interfaces do by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardstore.errors import CheckpointingException
from shardstore.strategies import base
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import StrategyAction


class _LoadCommon(base.LoadCommonStrategy):
    def check_backend_compatibility(self, loaded_backend: str) -> None: ...

    def check_version_compatibility(self, loaded_version: int) -> None: ...

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return {}

    def load_sharded_objects(
        self, sharded_objects_state_dict: dict[str, Any], checkpoint_dir: str | Path
    ) -> dict[str, Any]:
        return {}


class _LoadSharded(base.LoadShardedStrategy):
    def check_backend_compatibility(self, loaded_backend: str) -> None: ...

    def check_version_compatibility(self, loaded_version: int) -> None: ...

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path
    ) -> dict[str, Any]:
        return {}

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return {"from": checkpoint_dir}


class _LoadObjectsToo(_LoadSharded):
    @property
    def can_handle_sharded_objects(self) -> bool:
        return True


class _SaveCommon(base.SaveCommonStrategy):
    def save_common(
        self, common_state_dict: dict[str, Any], checkpoint_dir: str | Path
    ) -> None: ...


class _SaveAsync(base.AsyncSaveShardedStrategy):
    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path
    ) -> AsyncRequest:
        log = sharded_state_dict["log"]
        return AsyncRequest(log.append, (f"write {checkpoint_dir}",), [lambda: log.append("end")])


@pytest.fixture(autouse=True)
def _registry_restored() -> Iterator[None]:
    before = {action: dict(known) for action, known in base.default_strategies.items()}
    yield
    base.default_strategies.clear()
    base.default_strategies.update(before)


def test_actions_have_the_values_of_megatron() -> None:
    assert {action.name: action.value for action in StrategyAction} == {
        "LOAD_COMMON": "load_common",
        "LOAD_SHARDED": "load_sharded",
        "SAVE_COMMON": "save_common",
        "SAVE_SHARDED": "save_sharded",
    }


def test_registered_strategy_is_found_for_its_action_alone() -> None:
    mine = _LoadSharded()
    base.register_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 7, mine)
    assert base.get_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 7) is mine
    assert base.default_strategies["load_sharded"]["mine", 7] is mine
    for action, backend, version in (
        (StrategyAction.LOAD_COMMON, "mine", 7),
        (StrategyAction.LOAD_SHARDED, "mine", 8),
        (StrategyAction.LOAD_SHARDED, "other", 7),
    ):
        with pytest.raises(CheckpointingException) as caught:
            base.get_default_strategy(action, backend, version)
        text = str(caught.value)
        assert action.value in text
        assert backend in text
        assert str(version) in text


def test_failed_lookup_offers_what_can_be_asked_for() -> None:
    with pytest.raises(CheckpointingException) as caught:
        base.get_default_strategy(StrategyAction.SAVE_COMMON, "json", 1)
    _, _, offered = str(caught.value).partition("Registered for 'save_common': ")
    assert "('torch', 1)" in offered
    assert "json" not in offered
    with pytest.raises(CheckpointingException, match=r"\('torch_dist', 1\), \('zarr', 1\)"):
        base.get_default_strategy(StrategyAction.LOAD_SHARDED, "nothing", 1)


def test_later_registration_replaces_earlier() -> None:
    for _ in range(2):
        last = _LoadSharded()
        base.register_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 7, last)
    assert base.get_default_strategy(StrategyAction.LOAD_SHARDED, "mine", 7) is last


def test_builtins_are_registered_by_lookup_and_never_replace_ones_own() -> None:
    base.default_strategies.clear()
    mine = _LoadSharded()
    base.register_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 2, mine)
    for action, backend, version in base._BUILTIN_STRATEGIES:
        base.get_default_strategy(StrategyAction(action), backend, version)
    assert base.get_default_strategy(StrategyAction.LOAD_SHARDED, "zarr", 2) is mine


def test_builtin_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "load_common", "nothing", 1
    monkeypatch.setitem(base._BUILTIN_STRATEGIES, key, "shardstore.no_such_module:Strategy")
    with pytest.raises(CheckpointingException, match=r"shardstore\.no_such_module"):
        base.get_default_strategy(StrategyAction.LOAD_COMMON, "nothing", 1)


def test_interfaces_cannot_be_instantiated_bare() -> None:
    for cls, args in (
        (base.LoadCommonStrategy, ()),
        (base.LoadShardedStrategy, ()),
        (base.SaveCommonStrategy, ("b", 1)),
        (base.SaveShardedStrategy, ("b", 1)),
        (base.AsyncSaveShardedStrategy, ("b", 1)),
    ):
        with pytest.raises(TypeError, match="abstract"):
            cls(*args)


def test_defaults() -> None:
    save = _SaveCommon("torch", 3)
    assert str(save) == "_SaveCommon(torch, 3)"
    assert (save.backend, save.version) == ("torch", 3)
    assert not save.can_handle_sharded_objects
    assert not _LoadSharded().can_handle_sharded_objects
    assert _LoadCommon().load_sharded_metadata("x") == {}
    with pytest.raises(NotImplementedError, match="_SaveCommon"):
        save.save_sharded_objects({}, "x")
    with pytest.raises(NotImplementedError, match="_LoadSharded"):
        _LoadSharded().remove_sharded_tensors("x", "prefix")


def test_sharded_metadata_is_that_of_tensors_unless_objects_are_handled() -> None:
    assert _LoadSharded().load_sharded_metadata("here") == {"from": "here"}
    with pytest.raises(NotImplementedError, match="_LoadObjectsToo"):
        _LoadObjectsToo().load_sharded_metadata("here")


def test_async_strategy_saves_synchronously_too() -> None:
    log: list[str] = []
    _SaveAsync("b", 1).save({"log": log}, "here")
    assert log == ["write here", "end"]


def test_torch_dist_strategies_are_found_where_programs_import_them() -> None:
    from shardstore.strategies.torch import (
        TorchDistLoadShardedStrategy,
        TorchDistSaveShardedStrategy,
    )

    save = base.get_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1)
    load = base.get_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1)
    assert isinstance(save, TorchDistSaveShardedStrategy)
    assert isinstance(load, TorchDistLoadShardedStrategy)
