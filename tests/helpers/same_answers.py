"""Questions to the API whose answers Megatron-Core gives too: mapping, structures, validation.

Runs against either package, which it imports by name, and writes the answers as JSON::

    python tests/helpers/same_answers.py megatron.core.dist_checkpointing FILE

Each answer is text: a value in a form that both sides share, or ``raises`` with the kinds of the
error, the narrowest first. It knows nothing of files or ranks.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

typing.override = typing_extensions.override  # wheels for Python 3.12 import it
Question = tuple[str, Callable[[], Any]]
Modules = Callable[[str], Any]


def answers(package: str) -> dict[str, str]:
    """Question -> answer of a package."""

    def module(name: str) -> Any:
        return importlib.import_module(f"{package}.{name}")

    found = {}
    for name, ask in itertools.chain(
        _positions(module), _narrowed(module), _structures(module), _checks(module), _shares(module)
    ):
        try:
            found[name] = plain(ask())
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            found[name] = f"raises {' '.join(kinds[:-3])}"  # not Exception and what is above it
    return found


def plain(value: Any) -> str:
    """A value as text that does not tell which package it came from."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(plain, value)) + "]"
    if isinstance(value, set | frozenset):
        return f"set {sorted(map(plain, value))}"
    if hasattr(value, "local_shape"):
        fields = ("key", "data", "dtype", "local_shape", "global_shape", "global_offset")
        fields += ("axis_fragmentations", "replica_id", "prepend_axis_num", "flattened_range")
        return f"tensor({', '.join(plain(getattr(value, name, None)) for name in fields)})"
    if hasattr(value, "unique_key"):
        return f"object({value.unique_key}, {plain(value.data)}, {value.replica_id})"
    if isinstance(value, type):
        return value.__name__
    return repr(value)


def _positions(module: Modules) -> Iterator[Question]:
    """What the constructors make of shapes, ranks and prepended axes."""
    shard = module("mapping").ShardedTensor
    cuts = [(), ((0, 1, 2),), ((1, 1, 3),), ((0, 1, 2), (1, 2, 3)), ((0, 2, 2),), ((0, -1, 2),)]
    asked = ("global_slice", "local_chunk_offset_in_global", "max_allowed_chunks")
    for shape, prepended, cut in itertools.product([(4,), (2, 3), (2, 1, 2)], (0, 1), cuts):
        if len(cut) > len(shape) + prepended or any(axis >= len(shape) for axis, _, _ in cut):
            continue

        def ask(shape: Any = shape, prepended: int = prepended, cut: Any = cut) -> Any:
            made = shard.from_rank_offsets("k", torch.ones(shape), *cut, prepend_axis_num=prepended)
            return [made, made.without_data(), *(getattr(made, name)() for name in asked)]

        yield f"{shape} after {prepended} axes, cut {cut}", ask
    for bounds, length in [((0, 6), 6), ((2, 5), 3), ((3, 3), 0), ((0, 9), 6), ((2, 5), 2)]:

        def flat(bounds: Any = bounds, length: int = length) -> Any:
            made = shard.from_rank_offsets_flat(
                "k", torch.arange(length), (2, 3), (0, 1, 2), flattened_range=slice(*bounds)
            )
            return [made, made.global_slice()]

        yield f"range {bounds} with {length} elements", flat
    replicas: list[Any] = [0, 1, (0, 0), (0, 1), [0, 0], ()]
    yield "main replicas", lambda: [module("mapping").is_main_replica(one) for one in replicas]
    objects = module("mapping").ShardedObject
    yield "object", lambda: objects("o", 1, (2, 3), (1, 2), replica_id=(0, 1)).without_data()
    yield "object of its key", lambda: objects.empty_from_unique_key("o/shard_1.2_2.3")
    yield "object of no key", lambda: objects.empty_from_unique_key("nothing")


def _narrowed(module: Modules) -> Iterator[Question]:
    shard = module("mapping").ShardedTensor
    made = {
        "regular": lambda: shard.from_rank_offsets(
            "k", torch.arange(24).reshape(4, 6), (0, 1, 2), (1, 0, 3)
        ),
        "prepended": lambda: shard.from_rank_offsets(
            "k", torch.arange(24).reshape(4, 6), (0, 1, 2), (1, 2, 3), prepend_axis_num=1
        ),
        "flat": lambda: shard.from_rank_offsets_flat(
            "k", torch.arange(12), (4, 6), (0, 1, 2), flattened_range=slice(5, 17)
        ),
    }
    parts = [(0, 0, 1), (0, 1, 2), (0, 2, 2), (0, 0, 4)]
    for (kind, make), part in itertools.product(made.items(), parts):
        yield f"{kind} narrowed to {part}", lambda make=make, part=part: make().narrow(*part)
    for kind in ("regular", "prepended"):
        yield f"{kind} narrowed along 1", lambda kind=kind: made[kind]().narrow(1, 2, 3)


def _structures(module: Modules) -> Iterator[Question]:
    """Splitting, mapping, merging and comparing nested states."""
    dicts, utils, mapping = module("dict_utils"), module("utils"), module("mapping")
    nested: list[Any] = [
        {},
        {"a": 1, "b": "x"},
        {"a": {"b": 1, "c": "x"}, "d": [1, "x", 2]},
        {"a": [{"b": 1}, {"c": "x"}]},
        {"a": [], "b": {}},
        {"a": (1, "x")},
    ]

    def copies(x: Any) -> Any:
        return json.loads(json.dumps(x)) if "(" not in str(x) else dict(x)

    def is_int(value: object) -> bool:
        return isinstance(value, int)

    for x in nested:
        for as_dicts in (False, True):
            yield (
                f"integers of {x}, {as_dicts}",
                lambda x=x, d=as_dicts: dicts.extract_matching_values(copies(x), is_int, d),
            )
        yield f"values of {x}", lambda x=x: list(dicts.nested_values(copies(x)))
        yield f"{x} mapped", lambda x=x: dicts.dict_list_map_outplace(str, copies(x))
    for x, y in itertools.permutations([x for x in nested if "(" not in str(x)], 2):
        yield f"{x} merged with {y}", lambda x=x, y=y: dicts.merge(copies(x), copies(y))
    by_position: Any = ({"a": [{}, {}, 7]}, {"a": {0: {"x": 1}}})
    yield "list merged with a dict by position", lambda: dicts.merge(*by_position)

    def tensor(key: str, *values: float) -> Any:
        return mapping.ShardedTensor.from_rank_offsets(key, torch.tensor(values))

    def thing(value: Any) -> Any:
        return mapping.ShardedObject("o", value, (1,), (0,))

    pairs: list[tuple[Any, Any]] = [
        (1, 2),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}),
        ([1, 2], [1, 2, 3]),
        (torch.ones(2), torch.tensor([1.0, 0.0])),
        (torch.ones(2), torch.ones(3)),
        (tensor("a", 1, 2), tensor("b", 1, 2)),
        (tensor("a", 1, 2), tensor("a", 1, 3)),
        (thing({"x": 1}), thing({"x": 2})),
    ]
    for number, (x, y) in enumerate(pairs):
        yield f"difference {number}", lambda x=x, y=y: dicts.diff({"p": x}, {"p": y})

    def state() -> Any:
        return {
            "m": {"a": tensor("p.a", 1), "l": [tensor("p.b", 2), 3, thing("v")], "e": {}},
            "n": mapping.LocalNonpersistentObject(5),
            "c": 1,
        }

    kinds = ("sharded_tensors", "sharded_base", "nonpersistent", "sharded_tensors_or_nonpersistent")
    for kind in kinds:

        def split(kind: str = kind) -> Any:
            return [_without_locals(part) for part in getattr(utils, f"extract_{kind}")(state())]

        yield f"{kind} of a state", split

    def prefixed(change: str, *arguments: Any) -> Any:
        changed = {"a": tensor("p.a", 1), "l": [tensor("p.b", 2)]}
        getattr(utils, change)(changed, *arguments)
        return changed

    yield "prefix added", lambda: prefixed("add_prefix_for_sharding", "x/")
    yield "prefix replaced", lambda: prefixed("replace_prefix_for_sharding", "p.", "q.")
    yield "wrong prefix replaced", lambda: prefixed("replace_prefix_for_sharding", "z.", "q.")
    mapped = {"p.a": "first", "p.": "second"}
    yield "prefixes mapped", lambda: prefixed("apply_prefix_mapping", mapped)
    yield "zipped", lambda: list(utils.zip_strict([1, 2], "ab"))
    yield "zipped unevenly", lambda: list(utils.zip_strict([1, 2], "a"))


def _without_locals(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _without_locals(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_without_locals(value) for value in x]
    return f"local {x.unwrap()}" if hasattr(x, "unwrap") else x


def _checks(module: Modules) -> Iterator[Question]:
    """Coverage of tensors and objects, and the modes of strictness."""
    mapping, validation = module("mapping"), module("validation")

    def part(index: int, parts: int, **more: Any) -> Any:
        return mapping.ShardedTensor.from_rank_offsets(
            "k", torch.ones(2, 3), (0, index, parts), **more
        ).without_data()

    def flat(start: int, stop: int, **more: Any) -> Any:
        return mapping.ShardedTensor.from_rank_offsets_flat(
            "k", torch.ones(stop - start), (2, 3), flattened_range=slice(start, stop), **more
        ).without_data()

    def thing(index: int, parts: int, replica: int = 0) -> Any:
        return mapping.ShardedObject("o", None, (parts,), (index,), replica_id=replica)

    arrangements: dict[str, Callable[[], list[list[Any]]]] = {
        "whole": lambda: [[part(0, 2)], [part(1, 2)]],
        "part is missing": lambda: [[part(0, 2)]],
        "twice": lambda: [[part(0, 1)], [part(0, 1)]],
        "with a copy": lambda: [[part(0, 1)], [part(0, 1, replica_id=1)]],
        "copies alone": lambda: [[part(0, 1, replica_id=1)], [part(0, 1, replica_id=2)]],
        "ranges": lambda: [[flat(0, 3)], [flat(3, 6)]],
        "ranges with a gap": lambda: [[flat(0, 3)], [flat(4, 6)]],
        "ranges that overlap": lambda: [[flat(0, 4)], [flat(3, 6)]],
        "objects": lambda: [[thing(0, 2)], [thing(1, 2)]],
        "object is missing": lambda: [[thing(0, 2)], []],
        "object twice": lambda: [[thing(0, 1)], [thing(0, 1)]],
        "object with a copy": lambda: [[thing(0, 1)], [thing(0, 1, 1)]],
        "nothing": lambda: [[], []],
    }
    for name, held in arrangements.items():
        yield name, lambda held=held: validation.validate_sharding_integrity(held())

    stored = {"k": part(0, 1), "stored": part(0, 1)}
    asked = {"k": part(0, 1), "more": [mapping.ShardedTensor.from_rank_offsets("q", torch.ones(2))]}
    for mode in validation.StrictHandling:

        def strict(mode: Any = mode) -> Any:
            held = [s.without_data() for s in (asked["k"], asked["more"][0])]  # type: ignore[index]
            return validation.validate_integrity_and_strict_load(
                dict(asked), mode, False, held, [held], stored
            )

        yield f"{mode.value} about other keys", strict
        yield f"{mode.value} parsed", lambda m=mode: validation.parse_strict_flag(m.value).name
    yield "unknown mode", lambda: validation.parse_strict_flag("so-so")


def _shares(module: Modules) -> Iterator[Question]:
    """Which rank of a group saves which shard."""
    share_out = module("exchange_utils").distribute_shards_to_ranks
    names = [(f"k{i}", (i % 3,), None) for i in range(30)]
    ranks = {
        name: [r for r in range(4) if i >> r & 1 or r == i % 4] for i, name in enumerate(names)
    }
    sizes = {name: i * 7 % 11 for i, name in enumerate(names)}
    yield "shares", lambda: share_out(ranks, sizes, 4, {})
    yield "shares, some held elsewhere", lambda: share_out(ranks, sizes, 4, set(names[::3]))
    everywhere = {name: [0, 1, 2, 3] for name in names}
    yield "shares of equals", lambda: share_out(everywhere, dict.fromkeys(names, 5), 4, {})


if __name__ == "__main__":
    # Megatron-Core checks coverage on rank 0 of a process group only.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Path(sys.argv[2]).write_text(json.dumps(answers(sys.argv[1]), indent=1) + "\n")
