"""Count the functions on the way from a call to its first chunk, and the walks of the state.

``python -m testing.roads`` prints the calls, functions and files of the package, and how deep they
were nested, until the first byte of a chunk moved; and the walks: the outermost calls of functions
that call themselves with a dict. ``--names`` lists the functions.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType

import torch
import torch.distributed.checkpoint as dcp

import shardstore
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.mapping import ShardedObject, ShardedTensor

PACKAGE = os.path.dirname(shardstore.__file__) + "/"


class Road:
    """The calls of a function in this package: ``calls`` and ``depth`` until the first byte of a
    chunk moves; all ``names``, by their first call; and all ``walks`` by name."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.calls, self.depth, self._arrived = Counter[CodeType](), 0, False
        walked, self.names = dict[int, FrameType](), dict[str, None]()

        def see(frame: FrameType | None, event: str, _: object) -> None:
            stack = []
            if event == "call" and frame is not None and _is_ours(frame):
                self.names[_name(frame.f_code)] = None
                code, place = frame.f_code, os.path.basename(str(frame.f_locals.get("path")))
                while frame is not None:
                    stack += [frame] * _is_ours(frame)
                    frame = frame.f_back
                same = next((n for n, f in enumerate(stack) if f.f_code is not code), 1)
                outer = stack[same - 1]
                names = code.co_varnames[: code.co_argcount]
                if same > 1 and any(isinstance(outer.f_locals.get(n), dict) for n in names):
                    walked[id(outer)] = outer
                if not self._arrived:
                    self.calls[code] += 1
                    self.depth = max(self.depth, len(stack))
                    is_chunk = code.co_name == "write_file" and f"{place}.".startswith("c.")
                    self._arrived = is_chunk or code.co_name == "read_at_once"

        for watch in (threading.setprofile, sys.setprofile):
            watch(see)
        work()
        for watch in (threading.setprofile, sys.setprofile):
            watch(None)
        self.walks = Counter(f.f_code.co_qualname for f in walked.values())

    def __str__(self) -> str:
        total = f"{self.calls.total()} calls of {len(self.calls)} functions in {self.files} files"
        return f"{total}, {self.depth} deep; {self.walks.total()} walks"

    @property
    def files(self) -> int:
        return len({code.co_filename for code in self.calls})


def _name(code: CodeType) -> str:
    module = code.co_filename.removeprefix(os.path.dirname(PACKAGE[:-1]) + "/")
    return f"{module.removesuffix('.py').replace('/', '.')}.{code.co_qualname}"


def _is_ours(frame: FrameType) -> bool:
    """Whether a named function of the package runs: no module, class body or lambda."""
    code = frame.f_code
    is_function = code.co_name[0] != "<" and code.co_flags & inspect.CO_OPTIMIZED
    return bool(is_function) and code.co_filename.startswith(PACKAGE)


def roads(root: str) -> dict[str, Callable[[], object]]:
    """Return the operations of two tensors, an object and a number, to be called in this order."""
    tensors = {name: torch.ones(4, 4) for name in ("w", "b")}
    shards = {n: ShardedTensor.from_rank_offsets(n, one) for n, one in tensors.items()}
    state = {"model": shards, "rng": ShardedObject("rng", [1], (1,), (0,)), "step": 1}
    plain = {"model": tensors, "rng": [1], "step": 1}
    return {
        "save": lambda: shardstore.save({**state}, f"{root}/s"),
        "load": lambda: shardstore.load({**state}, f"{root}/s"),
        "DCP save": lambda: dcp.save(plain, storage_writer=StorageWriter(f"{root}/d")),
        "DCP load": lambda: dcp.load(plain, storage_reader=StorageReader(f"{root}/d")),
    }


def main() -> None:
    """Print the counts."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as root:
        [work() for work in roads(first).values()]  # imports and caches
        for name, work in roads(root).items():
            road = Road(work)
            print(f"{name}: {road}")
            for code, count in road.calls.items() if "--names" in sys.argv else ():
                print(f"{count:6} {_name(code)}")


if __name__ == "__main__":
    main()
