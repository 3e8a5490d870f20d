"""Checks of a save or a load: access pattern, common values, keys, backends."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from shardstore import dict_utils, errors, mapping
from shardstore.core import CheckpointingConfig, maybe_load_config, stored_config
from shardstore.coverage import check_reports, report_shards
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import gathered
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.identity import instead
from shardstore.storage.commit.inventory import check_integrity, write_integrity
from shardstore.storage.format.names import CONFIG_NAME
from shardstore.storage.stores.location import Location
from shardstore.strategies import base
from shardstore.values import torch_dump
from shardstore.values.torch_dump import require_loadable

logger = logging.getLogger(__name__)

CkptShardedMetadata: TypeAlias = dict[str, Any]
LocalMetadata: TypeAlias = list[mapping.ShardedTensor | mapping.ShardedObject]
GlobalMetadata: TypeAlias = list[LocalMetadata]

_SHARDS = (mapping.ShardedTensor, mapping.ShardedObject)


class StrictHandling(Enum):
    """What to do about keys that only the state dict or only the checkpoint has.

    An *unexpected* key is in this rank's state dict and not in the checkpoint. A *missing* key is
    in the checkpoint and in no rank's state dict.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Do not compare keys; reading an unexpected key raises an error."""
    LOG_UNEXPECTED = "log_unexpected"
    """Log unexpected keys and do not load them."""
    LOG_ALL = "log_all"
    """Log unexpected and missing keys; do not load the unexpected ones."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Raise if there are unexpected keys."""
    RAISE_ALL = "raise_all"
    """Raise if there are unexpected or missing keys."""
    RETURN_UNEXPECTED = "return_unexpected"
    """Do not load unexpected keys; return them."""
    RETURN_ALL = "return_all"
    """Do not load unexpected keys; return them and the missing ones."""
    IGNORE_ALL = "ignore_all"
    """Do not load unexpected keys, without a log record."""

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Return whether a mode needs the checkpoint's keys before loading."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Return whether a mode needs the keys of all ranks before loading."""
        return val.name.endswith("_ALL")

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Return whether a mode makes ``load`` return the two sets of keys too."""
        return val in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Turn a mode or its value into the mode.

    Args:
        strict: a :class:`StrictHandling` or the value of one, such as ``"raise_all"``.

    Raises:
        ArgumentError: it is neither.
    """
    try:
        return StrictHandling(strict)
    except ValueError:
        modes = ", ".join(mode.value for mode in StrictHandling)
        raise errors.ArgumentError(
            f"Invalid strict flag: {strict!r}; give one of {modes}"
        ) from None


def validate_integrity_and_strict_load(
    sharded_state_dict: mapping.ShardedStateDict,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: LocalMetadata | None = None,
    global_metadata: GlobalMetadata | None = None,
    ckpt_sharded_metadata: CkptShardedMetadata | None = None,
) -> tuple[mapping.ShardedStateDict, set[str], set[str]]:
    """Compare a state dict with the checkpoint and the other ranks, before anything is read.

    Every rank calls it; it waits for no other, because the arguments describe the other ranks.

    Args:
        sharded_state_dict: the state dict of this rank's load; not changed.
        strict: what to do about keys that do not match.
        validate_access_integrity: check, on rank 0, that all ranks together ask for each tensor
            exactly once.
        local_metadata: shards of this rank, those of ``sharded_state_dict``.
        global_metadata: shards of every rank, by rank.
        ckpt_sharded_metadata: tensors and objects of the checkpoint.

    Returns:
        The state dict, without unexpected keys (and containers that held nothing else) if the mode
        says so; the missing keys; the unexpected keys. A set is empty if the mode does not need it.

    Raises:
        CheckpointingException: a check fails, or lacks the metadata that it needs; for unexpected
            keys a :class:`MissingKeyError`.
    """
    compares = StrictHandling.requires_explicit_ckpt_mismatch_check(strict)
    all_ranks = StrictHandling.requires_global_app_metadata(strict)
    for name, given, is_needed in (
        ("local_metadata", local_metadata, compares),
        ("ckpt_sharded_metadata", ckpt_sharded_metadata, compares),
        ("global_metadata", global_metadata, all_ranks or validate_access_integrity),
    ):
        if is_needed and given is None:
            raise errors.CheckpointingException(
                f"Strict mode {strict.value!r} with validate_access_integrity="
                f"{validate_access_integrity} needs {name}, which must not be None"
            )
    if validate_access_integrity:
        validate_sharding_integrity(global_metadata or [])
    requested = {item.key for one_rank in global_metadata or () for item in one_rank}
    stored = {item.key for item in (ckpt_sharded_metadata or {}).values()}
    return compare_keys(sharded_state_dict, strict, requested, stored)


def compare_keys(
    sharded_state_dict: mapping.ShardedStateDict,
    strict: StrictHandling,
    requested: set[str],
    stored: set[str],
) -> tuple[mapping.ShardedStateDict, set[str], set[str]]:
    """Compare the keys of a state dict with those of the checkpoint, and handle differences.

    Args:
        sharded_state_dict: the state dict of this rank.
        strict: how to handle keys that do not match.
        requested: keys in the state dicts of all ranks, if the mode needs them.
        stored: keys in the checkpoint.
    """
    if not StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        return sharded_state_dict, set(), set()
    own = (v for v in dict_utils.nested_values(sharded_state_dict) if isinstance(v, _SHARDS))
    unexpected = {item.key for item in own} - stored
    missing = stored - requested if StrictHandling.requires_global_app_metadata(strict) else set()
    report_keys(strict, missing, unexpected)
    if unexpected:
        _, sharded_state_dict = dict_utils.extract_matching_values(
            sharded_state_dict, lambda v: isinstance(v, mapping.ShardedBase) and v.key in unexpected
        )
    if strict is StrictHandling.IGNORE_ALL:
        return sharded_state_dict, set(), set()
    return sharded_state_dict, missing, unexpected


def report_keys(strict: StrictHandling, missing: set[str], unexpected: set[str]) -> None:
    """Log the keys that do not match, or raise an error, as a mode says.

    Raises:
        MissingKeyError: there are unexpected keys, and the mode raises.
        CheckpointingException: there are missing keys, and the mode raises.
    """
    found = {
        "Missing keys (in the checkpoint, in no rank's state dict)": missing,
        "Unexpected keys (in this rank's state dict, not in the checkpoint)": unexpected,
    }
    text = " ".join(f"{what}: {sorted(keys)}." for what, keys in found.items() if keys)
    if text and strict in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL):
        logger.warning("%s", text)
    elif text and strict in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL):
        text += " Other `strict` modes log, return or ignore them."
        kind = errors.MissingKeyError if unexpected else errors.CheckpointingException
        raise kind(text, key=min(unexpected, default=None))


def preprocessed(
    common: mapping.StateDict,
    preprocess: Callable[[mapping.CommonStateDict], mapping.StateDict] | None,
) -> mapping.StateDict:
    """Return the common values that are compared: those that ``preprocess`` returns for a copy."""
    if preprocess is None:
        return common
    return preprocess(dict_utils.dict_list_map_outplace(lambda value: value, common))


def comparable(common: mapping.StateDict) -> mapping.StateDict:
    """Return common values with their tensors in host memory."""
    return cast(mapping.StateDict, dict_utils.dict_list_map_outplace(_on_host, common))


def _on_host(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    value = value.detach().cpu()
    # torch cannot unpickle these tensors outside of its own archives.
    is_short = str(value.dtype).startswith(("torch.float8", "torch.float4"))
    return value.view(torch.uint8) if is_short else value


def pickled(common: mapping.StateDict) -> bytes:
    """Return the common values as bytes for the other ranks.

    Raises:
        CheckpointingException: a value cannot be pickled.
    """
    try:
        return torch_dump.pickled(common)
    except Exception:
        require_loadable(common, "the common (non-sharded) state")  # its error names the path
        raise


def compare_common(
    mine: mapping.StateDict, of_coordinator: bytes, ranks: Ranks, *, equal: bool = False
) -> None:
    """Log differences between this rank's common values and the coordinator's, given as bytes.

    Raises:
        AccessPatternError: they differ, and must be ``equal``.
    """
    rank, first = ranks.rank, ranks.members[0]
    try:
        only_there, only_here, mismatched = dict_utils.diff(pickle.loads(of_coordinator), mine)
    except Exception as error:
        logger.warning(
            f"The common values of rank {rank} cannot be compared with rank {first}'s: {error}"
        )
        return
    if only_there or only_here or mismatched:
        text = (
            f"The common values of rank {rank} differ from those of rank {first}, which are saved. "
            f"Only on rank {first}: {only_there}; only on rank {rank}: {only_here}; "
            f"different: {mismatched}"
        )
        if equal:
            raise errors.AccessPatternError(f"replicas='equal': {text}", rank=rank)
        logger.warning(text)


def verify_checkpoint(checkpoint_dir: str | Path) -> CheckpointingConfig:
    """Check that there is a checkpoint, and return its backends. Any rank may call it; it waits for
    no other.

    Raises:
        NotACheckpointError: the place does not exist, or holds no checkpoint.
    """
    config = maybe_load_config(checkpoint_dir)
    if config is None:
        url, location = str(checkpoint_dir), Location.of(checkpoint_dir)
        if location.is_missing():
            raise errors.NotACheckpointError(f"Checkpoint directory {url} does not exist", url=url)
        kind, hint = "not a distributed checkpoint", instead(location)
        if location.is_file():
            kind, hint = "a file", hint or "give the folder that save() wrote"
        hint = hint or (
            f"it has no readable metadata.json"
            f"{', or not the zarr.json that commits it' if location.exists(CONFIG_NAME) else ''}. "
            f"A save that did not finish leaves such a directory"
        )
        raise errors.NotACheckpointError(f"{url} is {kind}: {hint}", url=url)
    return config


def save_integrity_manifest(checkpoint_dir: str | Path) -> None:
    """Write ``integrity.json``, the SHA-256 of each file of a checkpoint. One rank calls it.

    Raises:
        StorageError: the store failed.
    """
    write_integrity(Location.of(checkpoint_dir))


def verify_integrity_manifest(checkpoint_dir: str | Path) -> None:
    """Compare each file of a checkpoint with ``integrity.json``.

    Every rank of the default process group calls it. The coordinator reads the files, and all wait
    for it.

    Raises:
        NotACheckpointError: there is no ``integrity.json``.
        DamagedCheckpointError: a file is missing or differs, or the document is malformed.
    """
    location = Location.of(checkpoint_dir)
    what = f"verifying {location.url}"
    Ranks.current().together(what=what, decide=lambda _: check_integrity(location))


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str | Path | StoredCheckpoint,
    sharded_strategy: base.LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: base.LoadCommonStrategy | tuple[str, int] | None = None,
) -> tuple[base.LoadShardedStrategy, base.LoadCommonStrategy]:
    """Check that there is a checkpoint, and return the strategies that read it.

    Any rank may call it; it waits for no other.

    Args:
        checkpoint_dir: folder or URL of the checkpoint, or the opened checkpoint.
        sharded_strategy: a strategy, the ``(backend, version)`` of a registered one, or None for
            the strategy of the checkpoint's backend.
        common_strategy: the same for the common values.

    Returns:
        The sharded and the common strategy.

    Raises:
        NotACheckpointError: there is no checkpoint.
        CheckpointingException: a strategy cannot read this checkpoint.
    """
    stored = checkpoint_dir
    if not isinstance(stored, StoredCheckpoint):
        stored = StoredCheckpoint(Location.of(stored))
    url = stored.location.url
    if (config := stored_config(stored)) is None:
        config = verify_checkpoint(stored.location.place)  # raises the error
    sharded = config.sharded_backend, config.sharded_backend_version
    common = config.common_backend, config.common_backend_version
    found: list[Any] = []
    for kind, action, given, (backend, version) in (
        (base.LoadShardedStrategy, base.StrategyAction.LOAD_SHARDED, sharded_strategy, sharded),
        (base.LoadCommonStrategy, base.StrategyAction.LOAD_COMMON, common_strategy, common),
    ):
        try:
            if given is None:
                found.append(base.get_default_strategy(action, backend, version))
                continue
            found.append(strategy_of(kind, given, action))
        except errors.CheckpointingException as error:
            if not isinstance(given, tuple | None):
                raise
            text = f"the checkpoint {url} cannot be loaded: {error}"
            raise errors.FormatVersionError(text, url=url) from error
        found[-1].check_backend_compatibility(backend)
        found[-1].check_version_compatibility(version)
    return found[0], found[1]


def strategy_of(kind: type, given: object, action: base.StrategyAction) -> Any:
    """Return a given strategy, or the one that is registered for a ``(backend, version)``.

    Raises:
        CheckpointingException: it is neither, or none is registered.
    """
    if isinstance(given, tuple | list) and len(given) == 2:
        given = base.get_default_strategy(action, *given)
    if isinstance(given, kind):
        return given
    verb, part = action.value.split("_")
    raise errors.CheckpointingException(
        f"{part}_strategy={given!r} must be a strategy that can {verb}, or a (backend, version) "
        "pair such as ('zarr', 2)"
    )


def validate_sharded_objects_handling(
    sharded_strategy: base.SaveShardedStrategy | base.LoadShardedStrategy,
    common_strategy: base.SaveCommonStrategy | base.LoadCommonStrategy,
) -> None:
    """Check that one of two strategies handles ShardedObjects.

    Args:
        sharded_strategy: strategy of the sharded part.
        common_strategy: strategy of the common values.

    Raises:
        CheckpointingException: neither does.
    """
    if not any(one.can_handle_sharded_objects for one in (sharded_strategy, common_strategy)):
        raise errors.CheckpointingException(
            f"Neither {sharded_strategy} nor {common_strategy} handles ShardedObjects "
            f"(can_handle_sharded_objects is False for both); use a strategy that does"
        )


def determine_global_metadata(
    sharded_state_dict: mapping.ShardedStateDict, process_group: Any = None
) -> tuple[LocalMetadata, GlobalMetadata]:
    """Gather the descriptions of all shards on all ranks.

    Every rank of the group calls it and waits for the others.

    Args:
        sharded_state_dict: state dict of this rank, after :func:`apply_factories`.
        process_group: default: all ranks.

    Returns:
        The shards of this rank without data, and those of every rank, by rank.
    """
    values = dict_utils.nested_values(sharded_state_dict)
    local: LocalMetadata = [one.without_data() for one in values if isinstance(one, _SHARDS)]
    return local, gathered(local, process_group)


def validate_sharding_integrity(
    global_metadata: GlobalMetadata, common_state_dict: mapping.CommonStateDict | None = None
) -> None:
    """Check that the main replicas of all ranks cover every tensor and object exactly once.

    Every rank calls it. Only rank 0 checks and raises errors; the caller must tell the other ranks.
    With ``common_state_dict``, all ranks wait for rank 0, and each logs its differences. The time
    is almost linear in the number of shards.

    Args:
        global_metadata: shards without data of every rank, by rank.
        common_state_dict: common values of this rank, to compare with rank 0's.

    Raises:
        AccessPatternError: a region is covered twice or not at all; the text names key, region and
            ranks.
        ShapeMismatchError, DTypeMismatchError: ranks describe a global tensor differently.
    """
    ranks = Ranks.current()
    if common_state_dict is not None and ranks.world_size > 1:
        what = "comparing the common values with those of rank 0"
        with ranks.meet(what, lambda reports: reports[0]) as meeting:
            mine = comparable(common_state_dict)
            meeting.report = pickled(mine) if ranks.is_coordinator else b""
        if not ranks.is_coordinator:
            compare_common(mine, meeting.answer, ranks)
    if ranks.is_coordinator:
        reports = [report_shards(shards) for shards in global_metadata]
        check_reports(reports, range(len(reports)))
