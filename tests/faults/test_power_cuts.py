"""Power cuts: ``durable=True`` is worth what it says. See :mod:`tests.helpers.power_cuts`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardstore
from shardstore import CheckpointManager
from shardstore.dcp import StorageWriter
from shardstore.errors import NotACheckpointError
from shardstore.mapping import ShardedTensor
from tests.helpers.power_cuts import Trace, attached
from tests.helpers.rank_server import start
from tests.helpers.ranks_helper import join
from tests.helpers.verification import verified

Work = Callable[[Path, int], None]


def state(version: int, rank: int = 0, parts: int = 1) -> dict[str, Any]:
    def shard(key: str, value: float) -> ShardedTensor:
        part = torch.full((6, 64), value).chunk(parts)[rank].clone()
        return ShardedTensor.from_rank_offsets(key, part, (0, rank, parts))

    return {"w": shard("w", version), "same": shard("same", 0.5), "step": version}


def save(place: Path, version: int, rank: int = 0, parts: int = 1, **options: Any) -> None:
    shardstore.save(state(version, rank, parts), place, overwrite=True, **options)


def version_of(place: Path) -> int | None:
    """The version that is there, whole."""
    try:
        opened = shardstore.open(place)
    except NotACheckpointError:
        return None
    values = opened["w"][:]
    assert (values == values.flat[0]).all()
    result, found = verified(place, threads=1)
    assert result.ok, found
    return int(values.flat[0])


def with_a_log(root: Path, _: int) -> None:
    save(root / "c", 1)
    (root / "c" / "log.txt").write_text("years of work")


def keep_one(root: Path, step: int) -> None:
    manager = CheckpointManager(root, prefix="c", keep_last=1)
    manager.save(step, state(step))
    manager.wait()
    manager.close()


def by_dcp(root: Path, version: int) -> None:
    writer = StorageWriter(root / "c", overwrite=True)
    dcp.save({"w": torch.full((6, 64), float(version))}, storage_writer=writer, no_dist=True)


SCENARIOS: dict[str, tuple[int, Work, Work, dict[str, set[int | None]], dict[str, set[int | None]]]]
# Ranks; what is there before; what is traced; the versions by place that may be there after a cut,
# and after a cut that comes when it was reported as done.
SCENARIOS = {
    "three ranks": (
        3,
        lambda root, _: root.mkdir(exist_ok=True),
        lambda root, rank: save(root / "deep" / "c", 2, rank, 3),
        {"deep/c": {None, 2}},
        {"deep/c": {2}},
    ),
    "overwrite": (
        3,
        with_a_log,
        lambda root, rank: save(root / "c", 2, rank, 3),
        {"c": {1, 2}},
        {"c": {2}},
    ),
    "base": (
        1,
        lambda root, _: save(root / "a", 1),
        lambda root, _: save(root / "c", 2, base=root / "a"),
        {"a": {1}, "c": {None, 2}},
        {"a": {1}, "c": {2}},
    ),
    "manager": (
        1,
        lambda root, _: keep_one(root, 1),
        lambda root, _: keep_one(root, 2),
        {"c1": {1, None}, "c2": {2, None}},
        {"c1": {1, None}, "c2": {2}},
    ),
    "dcp": (1, with_a_log, lambda root, _: by_dcp(root, 2), {"c": {1, 2}}, {"c": {2}}),
    "delete": (
        1,
        lambda root, _: save(root / "c", 1),
        lambda root, _: shardstore.delete_checkpoint(root / "c"),
        {"c": {1, None}},
        {"c": {1, None}},
    ),
    "remove tensors": (
        1,
        lambda root, _: save(root / "c", 1),
        lambda root, _: shardstore.remove_sharded_tensors(root / "c", "same"),
        {"c": {1}},
        {"c": {1}},
    ),
}


def _rank(name: str, rank: int, base: str) -> None:
    torch.set_num_threads(1)
    ranks, prepare, work = SCENARIOS[name][:3]
    root = Path(base, "root")
    if not rank:
        root.mkdir()
        prepare(root, rank)
        shutil.copytree(root, Path(base, "before"))
    if ranks > 1:
        join(f"{base}/store", rank, ranks)
        dist.barrier()
    Path(base, f"ready-{rank}").touch()
    while not Path(base, "go").exists():
        time.sleep(0.01)
    work(root, rank)
    if not rank:
        (root / "reported").mkdir()
    if ranks > 1:
        dist.barrier()
    os._exit(0)


def traced(name: str, base: Path) -> Trace:
    ranks = SCENARIOS[name][0]
    processes = start((_rank, (name, rank, str(base))) for rank in range(ranks))
    while not all((base / f"ready-{rank}").exists() for rank in range(ranks)):
        assert all(process.exitcode is None for process in processes)
        time.sleep(0.01)
    tracer = attached([process.pid for process in processes], base / "trace")
    (base / "go").touch()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * ranks
    assert tracer.wait(30) == 0
    return Trace.of((base / "trace").read_text().splitlines(), base / "root", base / "before")


def built(tree: dict[str, bytes | None], root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, data in sorted(tree.items()):
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)


def check(root: Path, wanted: dict[str, set[int | None]], has_log: bool) -> None:
    places = list(wanted)
    found = {place: version_of(root / place) for place in places}
    assert all(found[place] in wanted[place] for place in places), (found, wanted)
    assert any(version is not None for version in found.values()) or None in wanted[places[-1]]
    save(root / places[-1], 9, durable=False)
    assert version_of(root / places[-1]) == 9
    shardstore.sweep(root, dry_run=False)
    left = [path for path in root.rglob("*") if ".attempt-" in path.name]
    assert not left
    if has_log:
        assert (root / places[-1] / "log.txt").read_text() == "years of work"


def test_a_folder_that_another_rank_used_at_once(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()

    def text(path: str) -> str:
        return "".join(f"\\x{byte:02x}" for byte in f"{tmp_path}/root/{path}".encode())

    lines = [
        f'1 mkdir("{text("w")}", 0777 <unfinished ...>',
        f'2 mkdir("{text("w")}", 0777) = -1 EEXIST (File exists)',
        f'2 openat(AT_FDCWD</>, "{text("w/c.1")}", O_WRONLY|O_CREAT, 0666) = 3<{text("w/c.1")}>',
        "1 <... mkdir resumed>) = 0",
    ]
    trace = Trace.of(lines, tmp_path / "root", tmp_path / "before")
    assert [getattr(call, "text", "") for call in trace.calls] == ["mkdir w", "openat w/c.1"]


def probe() -> bool:
    """Whether this process may trace others."""
    try:
        done = subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], capture_output=True)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.skipif(not probe(), reason="needs strace, and leave to trace processes")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("most", [2, pytest.param(12, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_power_cut_at_any_moment(tmp_path: Path, name: str, most: int) -> None:
    trace = traced(name, tmp_path)
    _, _, _, before, after = SCENARIOS[name]
    reported = next(
        number
        for number, call in enumerate(trace.calls)
        if getattr(call, "text", "").endswith("reported")
    )
    seen: set[int] = set()
    step = 1 if most > 2 else max(1, len(trace.calls) // 25)
    last = range(max(0, reported - 12), reported + 1)
    for cut in sorted({*range(0, len(trace.calls) + 1, step), *last}):
        for state_ in trace.states(cut, most, 0):
            tree = trace.tree(cut, state_)
            tree.pop("reported", None)
            key = hash(frozenset(tree.items()))
            if key in seen:
                continue
            seen.add(key)
            built(tree, tmp_path / "copy")
            try:
                wanted = before if cut < reported else after
                check(tmp_path / "copy", wanted, name in ("overwrite", "dcp"))
            except Exception as error:
                calls = [getattr(call, "text", call) for call in trace.calls[max(0, cut - 6) : cut]]
                odd = [c.text for n, c in enumerate(trace.pending(cut)[1]) if state_[n] != "kept"]
                error.add_note(f"cut {cut} of {len(trace.calls)}, after {calls}; not kept: {odd}")
                raise
    assert len(seen) > 10
