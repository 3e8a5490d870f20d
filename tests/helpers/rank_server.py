"""Starts processes that have torch, zarr and this package imported already: a rank costs a fork, no
new Python.

Run as a program this is the server: it imports what ranks need, stays alone with one thread, and
forks a process for each request. It does not know TensorStore, which does not survive a fork. Each
process has the environment, the folder, the path of modules and the standard streams that the one
who asked had at that moment. Such a process ends as any Python program does, its own ``atexit`` and
the interpreter's end included.

There are two servers, and neighbouring processes come from different ones: what is forked from one
shares its seed of hashes, and ranks must not agree because their sets happen to have one order.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait as wait_for_any
from typing import Any

# Nothing here may import TensorStore. The import of this package was half of a small rank's time;
# DTensors bring torch._dynamo, which takes a second.
PRELOADED = (
    "hypothesis",
    "numpy",
    "pytest",
    "s3fs",
    "shardstore.async_handle",
    "shardstore.dcp",
    "shardstore.hf.loading",
    "shardstore.hf.writing",
    "shardstore.inspection.opened",
    "shardstore.manager",
    "shardstore.megatron",
    "shardstore.serialization",
    "shardstore.strategies.zarr",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.multiprocessing",
    "zarr",
)
SERVERS = 2
_STREAMS = 3
# Libraries of linear algebra read these when they are imported; one starts its threads there.
_ALONE = dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_LENGTH = struct.Struct("<Q")


class Started:
    """A process that a server forked; its end is seen on :attr:`sentinel`, which then reads."""

    def __init__(self, server: _Server, pid: int, sentinel: int) -> None:
        self.pid = pid
        self.sentinel = sentinel
        self._server = server
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """None while it runs; the negative number of the signal that killed it."""
        if self._code is None and wait_for_any([self.sentinel], timeout=0):
            self._code = self._server.ask(("reap", self.pid))
            os.close(self.sentinel)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout_s: float | None = None) -> None:
        if self._code is None:
            wait_for_any([self.sentinel], timeout=timeout_s)
        assert self.exitcode is not None or timeout_s is not None


def start(calls: Iterable[tuple[Callable[..., object], tuple[Any, ...]]]) -> list[Started]:
    """Start a process for each call of a top-level function; the arguments must pickle."""
    with _starting:
        for server in _servers:
            server.begin()
    return [_servers[number % SERVERS].start(*call) for number, call in enumerate(calls)]


class _Server:
    """This process's end; the server is started with the first process that is asked for."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._asking = threading.Lock()

    def begin(self) -> None:
        if self._channel is None:
            self._channel, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    env={**os.environ, **_ALONE, "PYTHONPATH": os.pathsep.join(sys.path)},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            atexit.register(self.end)

    def end(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._process.wait()
            self._channel = None

    def ask(self, request: tuple[Any, ...], descriptors: tuple[int, ...] = ()) -> Any:
        assert self._channel is not None
        with self._asking:
            _send(self._channel, request, descriptors)
            answer = _receive(self._channel)
        if answer is None:
            raise RuntimeError("the server of ranks died")
        return answer[0]

    def start(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> Started:
        here = (dict(os.environ), os.getcwd(), sys.path, sys.argv)
        call = pickle.dumps((function, arguments))
        ours, theirs = os.pipe()
        pid = self.ask(("start", here, call), (0, 1, 2, theirs))
        os.close(theirs)
        return Started(self, pid, ours)


_servers = [_Server() for _ in range(SERVERS)]
_starting = threading.Lock()


def _send(channel: socket.socket, message: object, descriptors: tuple[int, ...] = ()) -> None:
    data = pickle.dumps(message)
    socket.send_fds(channel, [_LENGTH.pack(len(data))], descriptors)
    channel.sendall(data)


def _receive(channel: socket.socket) -> tuple[Any, list[int]] | None:
    """A message and the descriptors that came with it; None where the other side has closed."""
    head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, _STREAMS + 1)
    if not head:
        return None
    data = bytearray()
    while len(data) < _LENGTH.unpack(head)[0]:
        data += channel.recv(1 << 20)
    return pickle.loads(data), descriptors


def _serve(channel: socket.socket) -> None:
    """Returns at the end of the requests, and in each process that was forked."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "tensorstore" not in sys.modules
    assert (threads := _threads()) == 1, f"{threads} threads: a fork would not have them all"
    gc.freeze()
    # Ctrl-C is for those who run tests; this process ends with who started it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (message := _receive(channel)) is not None:
        request, descriptors = message
        if request[0] == "reap":
            _send(channel, os.waitstatus_to_exitcode(os.waitpid(request[1], 0)[1]))
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            _, here, call = request
            _run(here, call, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        _send(channel, pid)


def _run(
    here: tuple[dict[str, str], str, list[str], list[str]], call: bytes, descriptors: list[int]
) -> None:
    """In a forked process, which keeps the last descriptor open as long as it lives."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, descriptor in enumerate(descriptors[:_STREAMS]):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    environment, folder, sys.path[:], sys.argv[:] = here
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    function, arguments = pickle.loads(call)
    function(*arguments)


def _threads() -> int:
    """Of this process, those of libraries included where the system tells."""
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return threading.active_count()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
