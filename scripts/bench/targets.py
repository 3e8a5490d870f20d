"""The bounds that the project set itself, by case."""

from __future__ import annotations

from bench import background as late
from bench import cases, cli, clients, scale
from bench.cases import COLD, LOAD_MEMORY, MIB, S3_LOAD, S3_SAVE, SAVE, SAVE_MEMORY, SAVE_SYNC, WARM
from bench.clients import (
    DCP,
    DCP_OURS,
    DCP_REUSED,
    HF,
    HF_DCP,
    HF_UNSIGNED,
    MEGATRON,
    MULTIPART,
    MULTIPART_SIGNED,
    OURS,
    RAW,
    RAW_S3,
)
from bench.results import Target

_DCP, _DCP_S3 = ("dcp-best", "dcp-default"), ("dcp-s3", "dcp-s3-default")
_RESHARD = [f"bytes read / wanted, {a} -> {b} along axis {axis}" for a, b, axis in cases.CHANGES]

TARGETS = [
    Target("save-load", SAVE_SYNC, OURS, RAW, most=1.25),
    Target("save-load", SAVE, OURS, RAW, most=2.0),
    Target("save-load", WARM, OURS, RAW, most=1.4),
    Target("save-load", COLD, OURS, RAW, most=1.15),
    Target("save-load", SAVE_SYNC, OURS, _DCP, least=1.0),
    Target("save-load", SAVE_SYNC, OURS, (MEGATRON,), least=1.3),
    Target("save-load", WARM, OURS, _DCP, least=3.0),
    Target("save-load", WARM, OURS, (MEGATRON,), least=5.0),
    Target("flattened", SAVE_SYNC, OURS, (MEGATRON,), least=20.0),
    Target("flattened", SAVE, OURS, (MEGATRON,), least=20.0),
    Target("flattened", WARM, OURS, (MEGATRON,), least=5.0),
    Target("flattened", cases.READ, OURS, most=1.1),
    Target("memory", SAVE_MEMORY, OURS, most=32 * MIB),
    Target("memory", LOAD_MEMORY, OURS, most=128 * MIB),
    Target("small", SAVE_SYNC, OURS, _DCP, least=1.0),
    Target("small", SAVE, OURS, _DCP, least=1.0),
    Target("small", WARM, OURS, _DCP, least=5.0),
    *(Target("reshard", measure, OURS, most=1.25) for measure in _RESHARD),
    Target("dcp", SAVE_SYNC, DCP_OURS, _DCP, least=1.0),
    Target("dcp", SAVE, DCP_OURS, _DCP, least=1.0),
    Target("dcp", WARM, DCP_OURS, _DCP, least=2.0),
    *(Target("hf", measure, HF, RAW, most=1.15) for measure in (SAVE_SYNC, SAVE, WARM, COLD)),
    *(Target("hf", measure, HF, (HF_DCP,), least=2.0) for measure in (SAVE_SYNC, SAVE, WARM)),
    Target("s3-hf", S3_SAVE, HF, (MULTIPART_SIGNED,), most=1.2),
    Target("s3-hf", S3_SAVE, HF_UNSIGNED, (MULTIPART,), most=1.2),
    Target("s3-hf", S3_LOAD, HF, (MULTIPART,), most=1.15),
    Target("s3-chunks", S3_SAVE, OURS, RAW_S3, most=1.11),
    Target("s3-chunks", S3_LOAD, OURS, RAW_S3, most=1.11),
    Target("s3-chunks", S3_SAVE, OURS, ("dcp-s3",), least=2.0),
    Target("s3-chunks", S3_LOAD, OURS, ("dcp-s3",), least=2.0),
    Target("s3-arrays", S3_SAVE, OURS, clients.RAW_DOCUMENTS, most=1.25),
    Target("s3-arrays", S3_SAVE, OURS, RAW_S3, most=1.25),
    Target("s3-arrays", S3_SAVE, clients.ROOT_ONLY, RAW_S3, most=1.25),
    Target("s3-arrays", S3_LOAD, OURS, RAW_S3, most=1.25),
    Target("s3-latency", cases.OVER_IDEAL, OURS, most=3.0),
    Target("s3-memory", SAVE_MEMORY, OURS, most=1.1 * 256 * MIB),
    Target("s3-memory", LOAD_MEMORY, OURS, most=1.1 * 256 * MIB),
    *(Target("s3-dcp", S3_SAVE, DCP_OURS, (peer,), least=2.0) for peer in _DCP_S3),
    *(Target("s3-dcp", S3_LOAD, DCP_OURS, (peer,), least=2.0) for peer in _DCP_S3),
    Target("stall", late.STALL, OURS, (clients.COPY,), most=1.3),
    Target("stall", late.STALL, OURS, (DCP,), least=3.0),
    Target("stall", late.STALL, OURS, (DCP_REUSED,), least=1.0),
    Target("stall", late.FIRST, OURS, (DCP,), least=1.0),
    Target("stall", late.STALL, clients.OVERLAP, most=0.03),
    Target("train", late.LOST, OURS, (clients.PLAIN, DCP, DCP_REUSED), most=1.0),
    Target("budget", late.PEAK, clients.BUDGET, most=300 * MIB),
    Target("budget", late.DURABLE, clients.BUDGET, (OURS,), most=1.25),
    Target("base", late.SENT, OURS, most=0.06),
    Target("base", late.TIME, OURS, most=0.25),
    Target("replicas", late.READ, OURS, most=1.01),
    Target("replicas", late.FASTER, OURS, least=1.5),
    Target("scale", scale.label(scale.COMMIT, scale.CHUNKS[-1], "chunks"), OURS, most=10.0),
    Target("start", cli.START, cli.IMPORT, most=0.15),
    Target("start", cli.START, cli.LS, most=1.0),
    *(
        Target("verify", f"{state}, {cache}", cli.VERIFY, cli.PLAIN, most=1.25)
        for state in cli.STATES
        for cache in (cli.WARM, cli.COLD)
    ),
]
