"""One client in a process of its own: `python -m bench.async_worker CASE CLIENT FOLDER SCALE N`.

Prints one JSON object. What one client touched, allocated or started is in nobody else's figures.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.async_clients import CLIENTS, Client, State
from bench.disk_state import claim_memory
from bench.memory import resident

LAYERS = 32
SIDE = 2048
TRAIN_SIDE = 1024
RATE_S = 3.0


def state_of(scale: float, device: str = "cpu") -> State:
    """2 GiB at full scale: four square matrices and two vectors a layer."""
    found: State = {}
    for layer in range(max(1, round(LAYERS * scale))):
        for name in "qkvo":
            found[f"layers.{layer}.{name}"] = torch.randn(SIDE, SIDE, device=device)
        for name in ("norm", "bias"):
            found[f"layers.{layer}.{name}"] = torch.randn(SIDE, device=device)
    return found


def stall(client: Client, state: State, folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds until the call returns, until the state may be changed, and until all is durable."""
    rows: list[list[float]] = []
    size = sum(tensor.nbytes for tensor in state.values())
    for number in range(repeats + 1):
        place = folder / f"{number}"
        if number == 0:
            # It takes memory for the copy and for the page cache, which the machine may not own.
            claim_memory(folder, 2 * size, rest=True)
        begin = time.perf_counter()
        save = client.start(state, place)
        returned = time.perf_counter()
        save.staged()
        staged = time.perf_counter()
        save.wait()
        rows.append([t - begin for t in (returned, staged, time.perf_counter())])
        _remove(place)
    return {"first": rows[0], "rows": rows[1:]}


def train(client: Client, state: State, folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds of training that a save costs: time until it is durable, less what the steps made
    meanwhile would have taken without it. The call itself counts.

    Before each save the machine is had to own the memory that the page cache is going to take: what
    faults in the host take from the steps (seen: 0.6 s lost or 2.2, for the same plain write) says
    nothing of who saves.
    """
    a = torch.randn(TRAIN_SIDE, TRAIN_SIDE)
    size = sum(tensor.nbytes for tensor in state.values())

    def step() -> None:
        torch.matmul(a, a)

    client.start(state, folder / "warm").wait()
    _remove(folder / "warm")
    rows = []
    for number in range(repeats):
        place = folder / f"{number}"
        before = _rate(step)
        claim_memory(folder, size, rest=True)
        begin, steps = time.perf_counter(), 0
        save = client.start(state, place)
        while not save.done():
            step()
            steps += 1
        took = time.perf_counter() - begin
        save.wait()
        rate = (before + _rate(step)) / 2
        rows.append([took - steps / rate, took])
        _remove(place)
    return {"rows": rows}


def _rate(step: Any) -> float:
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() - begin < RATE_S:
        step()
        steps += 1
    return steps / (time.perf_counter() - begin)


def memory(client: Client, state: State, folder: Path, repeats: int) -> dict[str, Any]:
    """Peak of anonymous memory above the state, sampled, over saves from the very first one."""
    before = resident().anonymous_bytes
    peak, stop = before, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not stop.wait(0.002):
            peak = max(peak, resident().anonymous_bytes)

    sampler = threading.Thread(target=sample)
    sampler.start()
    seconds = []
    for number in range(repeats + 1):
        begin = time.perf_counter()
        client.start(state, folder / f"{number}").wait()
        seconds.append(time.perf_counter() - begin)
        _remove(folder / f"{number}")
    stop.set()
    sampler.join()
    return {"peak_bytes": peak - before, "seconds": seconds[1:]}


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def main() -> None:
    """Run one case for one client."""
    case, name, folder, scale, repeats = sys.argv[1:6]
    client = CLIENTS[name]()
    if name.startswith("dcp"):
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    state = state_of(float(scale))
    run = {"stall": stall, "train": train, "memory": memory}[case]
    found = run(client, state, Path(folder), int(repeats))
    found["state_bytes"] = sum(tensor.nbytes for tensor in state.values())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
