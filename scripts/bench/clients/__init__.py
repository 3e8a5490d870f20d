"""The clients of the benchmark by name; each is imported only in the process that runs it."""

from __future__ import annotations

from importlib import import_module

from bench.clients.base import Client

# name -> (module, class, constructor arguments)
_CLIENTS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "raw-1": ("raw", "Raw", (1,)),
    "raw-2": ("raw", "Raw", (2,)),
    "shardstore": ("ours", "Ours", ()),
    "dcp-best": ("dcp", "Dcp", (2,)),
    "dcp-default": ("dcp", "Dcp", (1,)),
    "dcp-shardstore": ("dcp", "DcpOverShardstore", ()),
    "megatron-zarr": ("megatron", "Megatron", ()),
    "safetensors": ("safetensors_file", "SafetensorsFile", ()),
    "orbax": ("orbax_arrays", "Orbax", ()),
}
_S3_CLIENTS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "raw-tensorstore": ("raw_s3", "TensorStorePuts", ()),
    "raw-obstore": ("raw_s3", "ObstorePuts", ()),
    "raw-ts-documents": ("raw_s3", "TensorStorePuts", (1,)),
    "raw-ob-documents": ("raw_s3", "ObstorePuts", (1,)),
    "shardstore": _CLIENTS["shardstore"],
    "dcp-s3": ("dcp_s3", "DcpS3", (2,)),
    "dcp-s3-default": ("dcp_s3", "DcpS3", (1,)),
    "dcp-shardstore": _CLIENTS["dcp-shardstore"],
    "shardstore-root-only": ("ours", "Ours", (False,)),
    "dcp-shardstore-root-only": ("dcp", "DcpOverShardstore", (False,)),
}

NAMES = tuple(_CLIENTS)
S3_NAMES = tuple(_S3_CLIENTS)
DCP_OURS = "dcp-shardstore"
ROOT_ONLY, DCP_ROOT_ONLY = "shardstore-root-only", "dcp-shardstore-root-only"
"""The same two without documents of the arrays' own."""
DIRECT = tuple(name for name in NAMES if name != DCP_OURS)
"""All but DCP over our storage, which is measured against DCP alone."""
RAW = ("raw-1", "raw-2", "raw-tensorstore", "raw-obstore")
RAW_DOCUMENTS = ("raw-ts-documents", "raw-ob-documents")
"""The same with a small document beside each object: as many objects as Zarr arrays are."""
_OF_SOME_CASES = (*RAW_DOCUMENTS, "dcp-s3-default", ROOT_ONLY, DCP_ROOT_ONLY)
S3_DIRECT = tuple(name for name in S3_NAMES if name not in _OF_SOME_CASES)
MEGATRON = "megatron-zarr"
ORBAX = "orbax"
OURS = "shardstore"


def create(name: str) -> Client:
    """The client of that name; ImportError where what it needs is not installed."""
    module, kind, arguments = {**_CLIENTS, **_S3_CLIENTS}[name]
    made: Client = getattr(import_module(f"bench.clients.{module}"), kind)(*arguments)
    return made
