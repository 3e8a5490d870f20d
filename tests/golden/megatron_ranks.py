"""Saves and loads the state of ``states.py`` with the real Megatron-Core, on gloo ranks.

The ranks are forked from a process that has imported torch and nothing that uses TensorStore, which
does not survive a fork.

Runs inside the environment that scripts/megatron_env makes; knows nothing of this package::

    python tests/golden/megatron_ranks.py tp2dp2 zarr=DIRECTORY torch_dist=DIRECTORY
    python tests/golden/megatron_ranks.py tp1dp4 load=DIRECTORY load=DIRECTORY

The name of a backend saves with it. ``load`` compares every value, to the bit, and fails with the
list of the differences.
"""

from __future__ import annotations

import io
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))
import states


def one_rank(rank: int, layout: states.Layout, actions: list[tuple[str, str]], meet: str) -> None:
    """What each rank does; ``meet`` is a file that the ranks find each other by."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # Megatron-Core calls it for every tensor, which a CPU build of torch refuses.
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_device = lambda: torch.device("cpu")
    # As programs do that keep such objects; Megatron-Core itself loads with weights_only.
    torch.serialization.add_safe_globals([io.BytesIO])
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=layout.world_size
    )
    for action, checkpoint in actions:
        if action == "load":
            load(rank, layout, checkpoint)
        else:
            save(rank, layout, checkpoint, action)
        dist.barrier()
    dist.destroy_process_group()


def save(rank: int, layout: states.Layout, checkpoint: str, backend: str) -> None:
    """One rank's part of a save."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import mapping

    dist_checkpointing.save(
        states.build(mapping, layout, rank),
        checkpoint,
        sharded_strategy=(backend, 1),
        content_metadata=states.CONTENT_METADATA,
    )


def load(rank: int, layout: states.Layout, checkpoint: str) -> None:
    """One rank's part of a load, and its comparison."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import mapping

    loaded = dist_checkpointing.load(states.build(mapping, layout, rank, empty=True), checkpoint)
    found = dist_checkpointing.load_content_metadata(preloaded_state_dict=loaded)
    loaded.pop("content_metadata", None)
    lines = states.differences(loaded, states.expected(mapping, layout, rank))
    lines += states.differences(found, states.CONTENT_METADATA, "content metadata")
    if lines:
        raise AssertionError(f"rank {rank} of {layout} read {checkpoint}:\n" + "\n".join(lines))


def main() -> None:
    """Command line: a layout, and actions with the directory of each."""
    layout = states.Layout.parse(sys.argv[1])
    actions = [tuple(argument.split("=", 1)) for argument in sys.argv[2:]]
    for _, checkpoint in actions:
        Path(checkpoint).mkdir(parents=True, exist_ok=True)
    assert not {"megatron", "tensorstore"} & set(sys.modules)
    with tempfile.TemporaryDirectory() as scratch:
        mp.start_processes(
            one_rank,
            (layout, actions, f"{scratch}/meet"),
            nprocs=layout.world_size,
            start_method="fork",
        )


if __name__ == "__main__":
    main()
