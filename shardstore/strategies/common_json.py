"""The non-sharded part as JSON in the root document: common backend ``("json", 1)``.

What PyTorch DCP's writer and the converters leave beside the arrays: values under flat keys, each
with its path in the nested state dict. No pickle: see :mod:`shardstore.values.plain`. Objects that
have no JSON form are files of sharded objects, as in the ``torch`` backend.
"""

from __future__ import annotations

from pathlib import Path

from shardstore.errors import NotACheckpointError
from shardstore.loading.context import context_of
from shardstore.mapping import ShardedObject, StateDict
from shardstore.strategies.base import StrategyAction, register_default_strategy
from shardstore.strategies.common import TorchCommonLoadStrategy
from shardstore.strategies.compatibility import require_backend, require_version
from shardstore.values.record import BACKEND, VERSION, StateRecord

__all__ = ["JsonCommonLoadStrategy", "register_default_json_strategies"]


class JsonCommonLoadStrategy(TorchCommonLoadStrategy):
    """Load strategy for a common part that lies in the root document."""

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Load the common part. Any rank may call it; it waits for no other.

        Raises:
            NotACheckpointError: there is no root document.
            DamagedCheckpointError: the record in it is malformed.
            UnsafeObjectError: an object without a JSON form needs a class that was not allowed.
        """
        stored = context_of(checkpoint_dir).stored
        url = stored.location.url
        if stored.root is None:
            raise NotACheckpointError(
                f"{url}/zarr.json is missing: {url} is no whole checkpoint", url=url
            )
        record = StateRecord.from_root(stored.root.attributes, url)
        if record is None:
            return {}
        wanted = {key: ShardedObject(key, None, (1,), (0,)) for key in record.files}
        return record.nested(url, self.load_sharded_objects(wanted, checkpoint_dir))

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise unless the common part was written by this backend."""
        require_backend("the common part", loaded_backend, BACKEND, "common_strategy")

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise unless the common part was written by a version that this one reads."""
        require_version("the common part", loaded_version, BACKEND, VERSION)


def register_default_json_strategies() -> None:
    """Register the default strategy of a common part in JSON."""
    register_default_strategy(
        StrategyAction.LOAD_COMMON, BACKEND, VERSION, JsonCommonLoadStrategy()
    )
