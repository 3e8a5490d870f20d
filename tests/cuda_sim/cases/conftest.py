"""What every case leaves behind: no wrong call, no registered memory, no queued copy, a device that
can be used, and the current device and streams that it found."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from shardstore.saving import staging
from tests.cuda_sim import simulation
from tests.cuda_sim.states import on_host

if not simulation.IS_LOADED:
    collect_ignore_glob = ["*.py"]


@pytest.fixture(autouse=True)
def nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    before = simulation.faults()
    assert torch.cuda.device_count() == 2
    monkeypatch.setattr(staging, "POOL", deque(maxlen=1))
    yield
    simulation.delay(0)
    assert torch.cuda.current_device() == 0
    for device in range(2):
        torch.cuda.synchronize(device)
        assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    assert on_host(torch.ones(4, device="cuda").fill_(3)).tolist() == [3, 3, 3, 3]
    monkeypatch.undo()
    caplog.get_records("call").clear()  # errors in them refer to frames with the memory
    gc.collect()
    assert simulation.registered() == 0
    assert simulation.queued_copies() == 0
    assert simulation.faults() == before
