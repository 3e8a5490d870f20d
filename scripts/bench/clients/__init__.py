"""The clients of the benchmark by name; each is imported only in the process that runs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

OURS, OVERLAP, BUDGET = "shardstore", "shardstore overlapped", "shardstore 256 MiB"
DCP_OURS = "dcp-shardstore"
ROOT_ONLY, DCP_ROOT_ONLY = "shardstore-root-only", "dcp-shardstore-root-only"
"""The same two without documents of the arrays' own."""
PACKED, DCP_PACKED = "shardstore-packed", "dcp-shardstore-packed"
MEGATRON, SAFETENSORS = "megatron-zarr", "safetensors"
RAW = ("raw-1", "raw-2")
RAW_S3 = ("raw-tensorstore", "raw-obstore")
RAW_DOCUMENTS = ("raw-ts-documents", "raw-ob-documents")
"""The same with a small document beside each object: as many objects as Zarr arrays are."""
COPY, PLAIN = "memory copy", "copy + write"
DCP, DCP_REUSED = "dcp thread", "dcp reused stager"
DIRECT = (*RAW, OURS, "dcp-best", "dcp-default", MEGATRON, SAFETENSORS)
HF, HF_UNSIGNED, HF_DCP = "hf", "hf-unsigned", "hf-dcp"
MULTIPART, MULTIPART_SIGNED = "raw-multipart", "raw-multipart-signed"
S3_DIRECT = (*RAW_S3, OURS, "dcp-s3", DCP_OURS)
LIMITS = (*RAW, *RAW_S3, *RAW_DOCUMENTS, MULTIPART, MULTIPART_SIGNED, COPY, PLAIN)
"""Not peers, but the least that is possible."""

_CLIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "raw-1": ("raw:Raw", {"threads": 1}),
    "raw-2": ("raw:Raw", {"threads": 2}),
    "raw-tensorstore": ("raw_s3:TensorStorePuts", {}),
    "raw-obstore": ("raw_s3:ObstorePuts", {}),
    "raw-ts-documents": ("raw_s3:TensorStorePuts", {"documents": 1}),
    "raw-ob-documents": ("raw_s3:ObstorePuts", {"documents": 1}),
    MULTIPART: ("raw_s3:Multipart", {}),
    MULTIPART_SIGNED: ("raw_s3:Multipart", {"signed": True}),
    COPY: ("raw:Copy", {"write": False}),
    PLAIN: ("raw:Copy", {"write": True}),
    OURS: ("ours:Ours", {}),
    ROOT_ONLY: ("ours:Ours", {"saving": {"array_documents": False}}),
    PACKED: ("ours:Ours", {"saving": {"pack": True}}),
    OVERLAP: ("ours:Ours", {"overlap_staging": True}),
    BUDGET: ("ours:Ours", {"staging_budget_bytes": 256 * 2**20}),
    "dcp-best": ("dcp:Dcp", {"threads": 2}),
    "dcp-default": ("dcp:Dcp", {"threads": 1}),
    DCP: ("dcp:Dcp", {}),
    DCP_REUSED: ("dcp:Dcp", {"reused": True}),
    HF: ("dcp:Hf", {}),
    HF_UNSIGNED: ("dcp:Hf", {"unsigned": True}),
    HF_DCP: ("dcp:DcpHf", {}),
    DCP_OURS: ("dcp:DcpOverShardstore", {}),
    DCP_ROOT_ONLY: ("dcp:DcpOverShardstore", {"array_documents": False}),
    DCP_PACKED: ("dcp:DcpOverShardstore", {"pack": True}),
    "dcp-s3": ("dcp:DcpS3", {"threads": 2}),
    "dcp-s3-default": ("dcp:DcpS3", {"threads": 1}),
    MEGATRON: ("megatron:Megatron", {}),
    SAFETENSORS: ("safetensors_file:SafetensorsFile", {}),
}


def create(name: str) -> Any:
    """The client of that name; ImportError where what it needs is not installed."""
    where, options = _CLIENTS[name]
    module, _, kind = where.partition(":")
    return getattr(import_module(f"bench.clients.{module}"), kind)(**options)
