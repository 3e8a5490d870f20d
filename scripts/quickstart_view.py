"""The quickstart's checkpoint through plain zarr: no shardstore, no torch, no ranks.

Lists every array, prints a few values and compares each array's bytes with the hash that the ranks
recorded when they saved. Usage: ``quickstart_view.py CHECKPOINT RECORD_JSON``.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time

import numpy as np
import zarr


def open_plain(checkpoint: str) -> zarr.Group:
    """The checkpoint in a folder, or at a URL whose credentials the environment has."""
    # An S3 server that is not Amazon's has its buckets in the path.
    given = {"config_kwargs": {"s3": {"addressing_style": "path"}}}
    remote = checkpoint.startswith("s3://")
    return zarr.open_group(checkpoint, mode="r", storage_options=given if remote else None)


def main() -> int:
    checkpoint, record = sys.argv[1:3]
    with open(record) as file:
        saved = json.load(file)["saved"]
    root = open_plain(checkpoint)
    attributes = root.attrs.asdict()
    print(f"  zarr {zarr.__version__}, group with attributes {', '.join(attributes)}")
    print(f"  {'array':<40}{'shape':>20}  {'dtype':<9}{'chunks':>20}  first values")
    wrong, nbytes, began = [], 0, time.perf_counter()
    arrays = dict(root.arrays())
    for key, array in sorted(arrays.items()):
        values = np.asarray(array[...])
        nbytes += values.nbytes
        first = ", ".join(f"{float(v):.4g}" for v in values.reshape(-1)[:3])
        shape, chunks = ("x".join(map(str, t)) for t in (array.shape, array.chunks))
        print(f"  {key:<40}{shape:>20}  {array.dtype!s:<9}{chunks:>20}  {first}")
        found = {
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "sha256": hashlib.sha256(values.tobytes()).hexdigest(),
        }
        if found != saved.get(key):
            wrong.append(key)
    took = time.perf_counter() - began
    missing = sorted(set(saved) - set(arrays))
    mib = nbytes / (1 << 20)
    print(f"  {mib:.1f} MiB read and hashed in {took:.2f} s, {mib / took:,.0f} MiB/s")
    if "torch" in sys.modules:
        print("  torch was imported: this is not a plain reader")
        return 1
    if wrong or missing:
        print(f"  not what was saved: {wrong}; missing: {missing}")
        return 1
    print(
        f"  all {len(arrays)} arrays have the hashes recorded at the save; torch was not imported"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
