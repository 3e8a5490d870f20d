"""Takes each synchronisation out of the package in turn, and expects that a case notices.

``python -m tests.cuda_sim.mutations [NAME ...]`` runs the mutations, all by default, and exits with
1 if one is not noticed. Each mutation changes one place in a copy of the package.
"""

from __future__ import annotations

import ast
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.cuda_sim.simulation import ROOT, run

DEVICE = "shardstore/storage/movers/device.py"
STAGING = "shardstore/saving/staging.py"
READ = "shardstore/loading/read.py"
TORCH_DIST = "shardstore/dcp/torch_dist.py"
OVERWRITTEN = "saving.py::test_the_state_is_overwritten_right_after_the_call"
SYNCHRONISATIONS = {
    "behind",
    "on_current_device",
    "record_stream",
    "set_device",
    "stream_of",
    "streams_of",
    "synchronize",
    "wait_stream",
    "_wait_for_devices",
}
"""Names of functions that order the work of devices and threads: each call needs a mutation."""


class Mutation(NamedTuple):
    """A change of the package, and the case that notices.

    Attributes:
        name: what the package no longer does.
        file: the changed file.
        old: text that stands in the file once.
        new: what replaces it.
        case: file in ``cases``, and the test.
    """

    name: str
    file: str
    old: str
    new: str
    case: str

    def applied(self, root: Path) -> str:
        """Return the changed file. Raises ``ValueError`` if the text does not stand there once."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"mutation {self.name!r}: its text is not once in {self.file}")
        return text.replace(self.old, self.new)

    def is_noticed(self) -> bool:
        """Run the case on a changed copy of the package, and return whether it fails."""
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            for name in ("shardstore", "tests", "testing", "scripts"):
                ignored = shutil.ignore_patterns("__pycache__", "golden", ".*")
                shutil.copytree(ROOT / name, f"{folder}/{name}", ignore=ignored)
            shutil.copy(ROOT / "pyproject.toml", folder)
            Path(folder, self.file).write_text(self.applied(ROOT))
            return not passes(self.case, Path(folder))


@cache
def passes(case: str, root: Path = ROOT) -> bool:
    """Return whether a case passes with the package in a folder.

    Raises:
        RuntimeError: pytest could not run the case, which says nothing about the package.
    """
    arguments = ("-m", "pytest", "-q", "-x", f"tests/cuda_sim/cases/{case}")
    done = run(*arguments, cwd=root, CUDA_SIM_DEVICES=2)
    if done.returncode > 1:
        raise RuntimeError(f"{case} did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


CHANGES: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    (DEVICE, OVERWRITTEN): {
        "the copies wait for the caller's stream": (
            "        self._stream.wait_stream(self._module.current_stream(device))\n",
            "",
        ),
        "copies are queued on their own stream": (
            "        with behind(self._stream):\n            dtypes.require_memory",
            "        with behind():\n            dtypes.require_memory",
        ),
        "the allocator learns of the copies' stream": (
            "            source.record_stream(self._stream)\n",
            "",
        ),
        "wait_staged() lets the caller's stream wait for the copies": (
            "            self._module.current_stream(self._device).wait_stream(self._stream)\n",
            "            pass\n",
        ),
        "the host waits for the copies": ("        event.synchronize()\n", ""),
        "behind() enters the stream": (
            "            stack.enter_context(module.stream(stream))\n",
            "",
        ),
    },
    (DEVICE, "errors.py::test_a_dropped_copy_keeps_its_memory_until_it_is_complete"): {
        "dropped copies keep their memory": (
            "            if self._is_behind:\n                self.wait(host=True)\n",
            "            pass\n",
        ),
    },
    (DEVICE, "errors.py::test_a_dropped_request_leaves_nothing_registered"): {
        "page-locked memory is unlocked before it is freed": (
            "weakref.finalize(memory, _unlock, device, memory.ctypes.data).atexit = False\n",
            "pass\n",
        ),
    },
    (DEVICE, "errors.py::test_refused_page_locking_is_a_warning"): {
        "the pending error of page-locking is cleared": (
            "                torch.zeros(1, device=device)",
            "                pass",
        ),
    },
    (DEVICE, "saving.py::test_a_save_reads_behind_the_streams_of_both_devices"): {
        "a save waits for the caller's stream": (
            "    with behind(stream):\n        return dtypes",
            "    with behind():\n        return dtypes",
        ),
    },
    (DEVICE, "ranks.py::test_a_rank_uses_no_device_but_its_own"): {
        "behind() enters the device first": (
            "            stack.enter_context(module.device(stream.device))\n",
            "",
        ),
    },
    (
        "shardstore/saving/plan.py",
        "saving.py::test_a_save_reads_behind_the_streams_of_both_devices",
    ): {
        "the threads of a save know the caller's streams": (
            "    return DevicePart(tensor, stream_of(tensor.device))\n",
            "    return DevicePart(tensor)\n",
        ),
    },
    (DEVICE, "ranks.py::test_a_shared_load_is_behind_the_callers_streams_of_all_devices"): {
        "the streams of all devices are taken": (
            '[stream_of(device) for device in {v.device for v in values if hasattr(v, "is_cpu")}]',
            "[stream_of(torch.device('cuda', torch.cuda.current_device()))]",
        ),
    },
    (READ, "ranks.py::test_a_shared_load_is_behind_the_callers_streams_of_all_devices"): {
        "the thread of a shared load knows the caller's streams": (
            "    streams = streams_of(part.out for held in parts.values() for part in held)\n",
            "    streams: list[torch.Stream | None] = []\n",
        ),
        "the thread of a shared load uses the caller's streams": (
            "        with behind(*streams):\n",
            "        with behind():\n",
        ),
    },
    (READ, "loading.py::test_tensors_are_filled_in_place"): {
        "a buffer is copied to the device before it is used again": (
            "        target.copy_(dtypes.as_tensor(values))\n",
            "        target.copy_(dtypes.as_tensor(values), non_blocking=True)\n",
        ),
    },
    (
        "shardstore/loading/plan.py",
        "loading.py::test_a_loaded_tensor_is_complete_on_every_stream",
    ): {
        "a load returns when the last copy is complete": (
            "                read.result.copy_(read.target)\n",
            "                read.result.copy_(read.target, non_blocking=True)\n",
        ),
    },
    (TORCH_DIST, "programs.py::test_megatrons_present_format"): {
        "the threads of Megatron's present format know the caller's streams": (
            "self._streams = streams_of(map(self._planner.resolve_data, tensors))\n",
            "self._streams = []\n",
        ),
        "the threads of Megatron's present format use the caller's streams": (
            "                        with behind(*self._streams):\n",
            "                        with behind():\n",
        ),
    },
    (DEVICE, "programs.py::test_a_background_function_has_the_callers_device"): {
        "a thread takes the caller's device": ("        module.set_device(device)\n", ""),
    },
    (
        "shardstore/strategies/async_utils.py",
        "programs.py::test_a_background_function_has_the_callers_device",
    ): {
        "a thread in the background is given the caller's device": (
            "    start_thread(on_current_device(work), ",
            "    start_thread(work, ",
        ),
    },
    (STAGING, OVERWRITTEN): {
        "a round is copied before it is written": (
            "                    self._wait_for_devices()\n                    write(",
            "                    write(",
        ),
        "a save returns when the copies are complete": (
            "            if waits:\n                self._wait_for_devices()\n",
            "",
        ),
        "the copies are complete before they are written": (
            "            raise self.error\n        self._wait_for_devices()\n",
            "            raise self.error\n",
        ),
        "wait_staged() waits for the devices": ("        self._wait_for_devices(host=host)\n", ""),
        "wait_staged() waits for the thread that queues the copies": (
            "        if not self._complete.wait(timeout):\n            return False\n",
            "",
        ),
    },
    (STAGING, "errors.py::test_memory_of_an_aborted_copy_is_given_back_when_it_is_complete"): {
        "memory is given back when its copies are complete": (
            "            self.wait(host=True)\n            if self._arena",
            "            if self._arena",
        ),
    },
}
"""By file and case, the changes: of a name, the text and what replaces it."""

MUTATIONS = [
    Mutation(name, file, old, new, case)
    for (file, case), changes in CHANGES.items()
    for name, (old, new) in changes.items()
]


def without_mutation(root: Path) -> list[str]:
    """Return the calls of :data:`SYNCHRONISATIONS` in the package that no mutation changes."""
    left: list[str] = []
    for path in sorted((root / "shardstore").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        if not any(f"{called}(" in text for called in SYNCHRONISATIONS):
            continue
        lines = text.splitlines(keepends=True)
        changed = [text.index(m.old) for m in MUTATIONS if m.file == name and m.old in text]
        sizes = [len(m.old) for m in MUTATIONS if m.file == name and m.old in text]
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
            spans = zip(changed, sizes, strict=True)
            if called in SYNCHRONISATIONS and not any(a <= start < a + n for a, n in spans):
                left.append(f"{name}:{node.lineno} {called}()")
    return left


def main(names: list[str]) -> int:
    """Run mutations and print which of them are noticed; return the exit status.

    Raises:
        SystemExit: a case fails on the package as it is.
    """
    unnoticed = []
    for mutation in MUTATIONS:
        if names and mutation.name not in names:
            continue
        if not passes(mutation.case):
            raise SystemExit(f"{mutation.case} fails without a mutation")
        noticed = mutation.is_noticed()
        print("noticed    " if noticed else "NOT noticed", mutation.name, flush=True)
        if not noticed:
            unnoticed.append(mutation.name)
    return int(bool(unnoticed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
