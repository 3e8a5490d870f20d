"""Whether NCCL works between this machine's GPUs; run by torchrun with one rank a GPU."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    numbers = torch.full((1 << 20,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(numbers)
    wanted = sum(range(1, dist.get_world_size() + 1))
    if not bool((numbers == wanted).all()):
        raise SystemExit(f"NCCL summed to {numbers[0].item()}, not {wanted}")
    if dist.get_rank() == 0:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        name = torch.cuda.get_device_name(device)
        print(f"NCCL {version}: {dist.get_world_size()} GPU(s), {name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
