"""Kills a process in the middle of its work, at a call to the file system or a request to S3.

Such a process is forked from one of a single thread, see :func:`alone`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.s3_proxy import Fault, FaultProxy, Passed, Rule
from tests.helpers.rank_server import start

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.link")


@dataclass(kw_only=True)
class Kills(Rule):
    """Kills a process at a request, which never reaches the server.

    Attributes:
        pid: whom.
    """

    pid: int = 0

    def takes(self, request: Passed) -> bool:
        if is_taken := super().takes(request):
            os.kill(self.pid, signal.SIGKILL)
        return is_taken


def alone(work: Callable[..., Any], *args: Any) -> Any:
    """Call a top-level function in a process with one thread, where another may be forked.

    Returns:
        What it returned, through JSON. What it raised fails the test.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        (process,) = start([(_told, (answer, work, args))])
        process.join()
        said = answer.read_text() if answer.exists() else ""
    assert process.exitcode == 0, said or process.exitcode
    return json.loads(said)


def _told(answer: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        said = json.dumps(work(*args))
    except BaseException:
        answer.write_text(traceback.format_exc())
        raise
    answer.write_text(said)


def dies(
    work: Callable[[], object], after: int, root: str, proxy: FaultProxy | None = None
) -> bool:
    """Do work in a forked process, and kill that one after so many calls or requests.

    Args:
        work: what it does.
        after: calls to the file system about ``root``, or requests that pass ``proxy``.
        root: a folder.
        proxy: between the process and an S3 server.

    Returns:
        Whether it died; otherwise it ended the work before.
    """
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.read(ready, 1)
            if proxy is None:
                die_at(after, root)
            work()
            code = 0
        finally:
            os._exit(code)
    if proxy is not None:
        proxy.rules.append(Kills(fault=Fault.SILENCE, pid=pid, skip=after))
    os.write(go, b"x")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(ready)
    os.close(go)
    if proxy is not None:
        proxy.rules.clear()
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def die_at(moment: int, root: str) -> list[str]:
    """Kill this process at a call to the file system about a folder; its calls so far."""
    calls: list[str] = []

    def count(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS and any(isinstance(arg, str) and root in arg for arg in args[:2]):
            if len(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            calls.append(event)

    sys.addaudithook(count)
    return calls
