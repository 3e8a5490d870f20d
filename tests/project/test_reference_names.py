"""Every name, parameter and default of the reference pages that this package implements."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import shardstore
from tests.helpers.processes import run_to_end

# module -> name -> parameters ("name" or "name=default"), None for data and classes without their
# own.
REFERENCE: dict[str, dict[str, str | None]] = {
    "mapping": {
        "logger": None,
        "StateDict": None,
        "CommonStateDict": None,
        "ShardedStateDict": None,
        "ReplicaId": None,
        "_logged_deprecations": None,
        "FactoryBuildFn": None,
        "FactoryMergeFn": None,
        "ShardedBase.validate_metadata_integrity": "self",
        "ShardedBase.without_data": "self",
        "ShardedTensor": "key data dtype local_shape global_shape global_offset "
        "axis_fragmentations replica_id=0 prepend_axis_num=0 allow_shape_mismatch=False "
        "flattened_range=None",
        "ShardedTensor.__post_init__": "self",
        "ShardedTensor.validate_metadata_integrity": "self",
        "ShardedTensor.has_regular_grid": None,
        "ShardedTensor.global_slice": "self",
        "ShardedTensor.local_chunk_offset_in_global": "self",
        "ShardedTensor.max_allowed_chunks": "self",
        "ShardedTensor.without_data": "self",
        "ShardedTensor.from_rank_offsets": "key data *rank_offsets replica_id=0 prepend_axis_num=0 "
        "flattened_range=None **init_kwargs",
        "ShardedTensor.from_rank_offsets_flat": "key data non_flat_local_shape *args "
        "flattened_range=None **kwargs",
        "ShardedTensor.init_data": "self device init_fn=<torch.empty>",
        "ShardedTensor.narrow": "self dim start length",
        "is_main_replica": "replica_id",
        "LocalNonpersistentObject": "obj",
        "LocalNonpersistentObject.unwrap": "self",
        "ShardedObject": "key data global_shape global_offset replica_id=0",
        "ShardedObject.unique_key": None,
        "ShardedObject.__str__": "self",
        "ShardedObject.empty_from_unique_key": "unique_key replica_id=0",
        "ShardedTensorFactory": "key data build_fn merge_fn replica_id=0 flattened_range=None",
        "ShardedTensorFactory.build": "self",
        "apply_factories": "sharded_state_dict",
        "apply_factory_merges": "x1 x2 key=()",
    },
    "utils": {
        "_ShardId": None,
        "zip_strict": "*args",
        "_sharded_tensor_shard_id": "sharded_tensor",
        "_sharded_object_id": "sharded_object",
        "extract_sharded_tensors": "sharded_state_dict",
        "extract_sharded_tensors_and_factories": "sharded_state_dict",
        "extract_sharded_tensors_or_nonpersistent": "sharded_state_dict",
        "extract_sharded_base": "sharded_state_dict",
        "extract_nonpersistent": "sharded_state_dict",
        "add_prefix_for_sharding": "sharded_state_dict prefix",
        "replace_prefix_for_sharding": "sharded_state_dict old_prefix new_prefix",
        "apply_prefix_mapping": "sharded_state_dict prefix_map",
        "force_all_tensors_to_non_fp8": "sharded_state_dict",
        "fallback_logger": None,
        "__LOGGER_NAME_STACK": None,
        "__LOGGER_STACK": None,
        "logger_stack": "name=None current_logger=None",
        "debug_time": "name logger=None threshold=-inf level=None",
        "debug_msg": "msg",
        "_clean_metadata_for_serialization": "metadata",
    },
    "strategies.base": {
        "StrategyAction.LOAD_COMMON": None,
        "StrategyAction.LOAD_SHARDED": None,
        "StrategyAction.SAVE_COMMON": None,
        "StrategyAction.SAVE_SHARDED": None,
        "default_strategies": None,
        "async_calls": None,
        "get_default_strategy": "action backend version",
        "register_default_strategy": "action backend version strategy",
        "LoadStrategyBase.check_backend_compatibility": "self loaded_backend",
        "LoadStrategyBase.check_version_compatibility": "self loaded_version",
        "LoadStrategyBase.can_handle_sharded_objects": None,
        "SaveStrategyBase": "backend version",
        "SaveStrategyBase.can_handle_sharded_objects": None,
        "SaveStrategyBase.__str__": "self",
        "LoadCommonStrategy.load_common": "self checkpoint_dir",
        "LoadCommonStrategy.load_sharded_objects": "self sharded_objects_state_dict checkpoint_dir",
        "LoadCommonStrategy.load_sharded_metadata": "self checkpoint_dir",
        "LoadShardedStrategy.load": "self sharded_state_dict checkpoint_dir",
        "LoadShardedStrategy.load_tensors_metadata": "self checkpoint_dir",
        "LoadShardedStrategy.load_sharded_metadata": "self checkpoint_dir",
        "LoadShardedStrategy.remove_sharded_tensors": "self checkpoint_dir key_prefix",
        "SaveCommonStrategy.save_common": "self common_state_dict checkpoint_dir",
        "SaveCommonStrategy.save_sharded_objects": "self sharded_objects_state_dict checkpoint_dir",
        "SaveShardedStrategy.save": "self sharded_state_dict checkpoint_dir",
        "AsyncSaveShardedStrategy.async_save": "self sharded_state_dict checkpoint_dir",
        "AsyncSaveShardedStrategy.save": "self sharded_state_dict checkpoint_dir",
    },
    "strategies.zarr": {
        "logger": None,
        "numpy_to_torch_dtype_dict": None,
        "torch_to_numpy_dtype_dict": None,
        "register_default_zarr_strategies": "",
        "ZarrSaveShardedStrategy.save": "self sharded_state_dict checkpoint_dir",
        "_create_or_open_zarr_arrays": "sharded_tensors checkpoint_dir",
        "_should_create_array": "ten",
        "_save_to_existing_array": "sharded_tensor arr",
        "_create_zarr_array": "sharded_tensor checkpoint_dir",
        "ZarrLoadShardedStrategy.load": "self sharded_state_dict checkpoint_dir",
        "ZarrLoadShardedStrategy.load_tensors_metadata": "self checkpoint_dir",
        "ZarrLoadShardedStrategy.check_backend_compatibility": "self loaded_version",
        "ZarrLoadShardedStrategy.check_version_compatibility": "self loaded_version",
        "_load_from_array": "sharded_tensor checkpoint_dir",
        "_open_zarr_array_verbose": "path mode **open_kwargs",
        "postprocess_numpy_array": "loaded_array sharded_tensor apply_flattened_range=True",
        "flatten_range": "sharded_tensor x",
        "pad_to_expected_shape": "x expected_sharded_ten",
        "load_zarr_based_sharded_metadata": "checkpoint_dir get_shape_dtype_fn",
    },
    "strategies.checkpointable": {
        "CheckpointableShardedTensor.__new__": "cls data sh_ten",
        "CheckpointableShardedTensor.__create_write_items__": "self fqn sh_ten index=None",
        "CheckpointableShardedTensor.__create_chunk_list__": "self",
        "CheckpointableShardedTensor.__get_tensor_shard__": "self index",
        "CheckpointableShardedTensor.from_sh_ten": "sh_ten",
        "CheckpointableShardedTensor.__torch_dispatch__": "func types args kwargs=None",
        "CheckpointableShardedTensor.__repr__": "self",
        "LocalShardsContainer.__new__": "cls local_shards",
        "LocalShardsContainer.__torch_dispatch__": "func types args=() kwargs=None",
        "LocalShardsContainer.__create_write_items__": "self fqn local_shards_cont",
        "LocalShardsContainer.__create_chunk_list__": "self",
        "LocalShardsContainer.__get_tensor_shard__": "self index",
        "LocalShardsContainer.__repr__": "self",
    },
    "serialization": {
        "save": "sharded_state_dict checkpoint_dir sharded_strategy=None common_strategy=None "
        "validate_access_integrity=True async_sharded_save=False "
        "preprocess_common_before_consistancy_check=None content_metadata=None",
        "load": "sharded_state_dict checkpoint_dir sharded_strategy=None common_strategy=None "
        "validate_access_integrity=True strict=<StrictHandling.ASSUME_OK_UNEXPECTED>",
        "load_content_metadata": "checkpoint_dir=None preloaded_state_dict=None",
        "load_tensors_metadata": "checkpoint_dir sharded_strategy=None",
        "load_sharded_metadata": "checkpoint_dir sharded_strategy=None common_strategy=None",
        "load_plain_tensors": "checkpoint_dir",
        "load_common_state_dict": "checkpoint_dir",
        "remove_sharded_tensors": "checkpoint_dir key_prefix",
    },
}


def _spelled(function: object) -> list[str]:
    spelled = []
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = ""
        if parameter.default is not parameter.empty:
            value = parameter.default
            if callable(value):
                default = f"=<torch.{value.__name__}>"
            elif hasattr(value, "name"):
                default = f"=<{value}>"
            else:
                default = f"={value!r}"
        spelled.append(f"{star}{parameter.name}{default}")
    return spelled


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m, names in REFERENCE.items() for n in names]
)
def test_name_and_parameters_are_those_of_the_reference(module: str, name: str) -> None:
    found = importlib.import_module(f"shardstore.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    wanted = REFERENCE[module][name]
    if wanted is None:
        return
    spelled = _spelled(found)
    # Our own additions are keyword-only and come after what the reference has.
    assert spelled[: len(wanted.split())] == wanted.split()


def test_importing_the_package_imports_neither_torch_nor_tensorstore() -> None:
    program = (
        "import sys, shardstore; "
        "assert not {'torch', 'tensorstore', 'zarr', 'numpy'} & set(sys.modules), "
        "sys.modules.keys()"
    )
    done = run_to_end([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr


def test_type_checkers_find_the_names_of_the_pages_and_no_others() -> None:
    """They take a module with ``__getattr__`` for one that has every name, with no type."""
    file = Path(shardstore.__file__)
    block, loader = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    assert ast.unparse(loader.test) == "not TYPE_CHECKING"
    assert "def __getattr__" in ast.unparse(loader)
    assert "def __getattr__" not in "".join(map(ast.unparse, block.body))
    known = {name.asname for node in ast.walk(block) for name in getattr(node, "names", ())}
    used = set(shardstore.__all__)
    for page in [file.parents[1] / "README.md", *(file.parents[1] / "docs").rglob("*.md")]:
        for program in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.M):
            used.update(re.findall(r"^(?!from|import).*\bshardstore\.(\w+)", program, re.M))
    assert {"save", "dcp"} <= used <= known


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("mapping", "LocalNonpersistentObject"),
        ("mapping", "ShardedBase"),
        ("mapping", "ShardedObject"),
        ("mapping", "ShardedTensor"),
        ("mapping", "ShardedTensorFactory"),
        ("validation", "StrictHandling"),
    ],
)
def test_pickles_name_the_public_module(module: str, name: str) -> None:
    """Pickles and allow-lists of classes go by the name of the module, wherever the code lies."""
    found = getattr(importlib.import_module(f"shardstore.{module}"), name)
    assert (found.__module__, found.__qualname__) == (f"shardstore.{module}", name)
