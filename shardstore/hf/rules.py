"""Rules: how a tensor of a state dict is made of the tensors in the files.

A rule is the name of a stored tensor, or a composition of rules. Names are templates: a field such
as ``{layer}`` has the value that it has in the key of the tensor::

    rules = {
        "layers.{layer}.mlp.experts.gate_up": stack(
            concat("layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
                   "layers.{layer}.mlp.experts.{expert}.up_proj.weight"),
            over="expert",
        ),
        "layers.{layer}.attention.q": part("layers.{layer}.attention.qkv.weight", 0, (8, 2, 2)),
    }

A composition maps each box of its result to boxes of stored tensors, so a rank reads only the bytes
of its shards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, TypeAlias

import torch

from shardstore import errors
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Shape
from shardstore.storage.options import require_number

SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Ends of the names of a weight's scales: DeepSeek-V3's, and those of compressed-tensors."""
SCALED_ELEMENTS = 1024 * 1024
"""Number of elements that are multiplied by their scales at a time."""

Regions: TypeAlias = Iterator[tuple[ArrayMeta, Box, Any]]
"""Regions of stored tensors, each with its destination."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor that is made of stored tensors.

    Attributes:
        shape: its shape.
        dtype: Zarr name of its data type.
        keys: names of the stored tensors.
        regions: returns the regions of stored tensors that fill an array or tensor with a box.
    """

    shape: Shape
    dtype: str
    keys: frozenset[str]
    regions: Callable[[Box, Any], Regions]


Fields: TypeAlias = Mapping[str, str]
Rule: TypeAlias = "str | Callable[[Fields, Sources], SourceTensor]"


# -- rules -----------------------------------------------------------------------------------------


def concat(*rules: Rule, axis: int = 0, groups: int = 1) -> Rule:
    """Return the rule for tensors that are joined along an axis, as in fused QKV weights.

    Args:
        *rules: the parts, in order.
        axis: the axis.
        groups: number of equal groups into which each part is cut. The result has the first group
            of each part, then the second of each. Megatron-Core's fused QKV has a group for each
            key-value head.

    Raises:
        ArgumentError: there are no parts, or an argument has a wrong type or value.
    """
    if not rules:
        raise errors.ArgumentError("concat() has no parts; give it at least one rule")
    _require_numbers(groups, axis=axis)

    def made(fields: Fields, sources: Sources) -> SourceTensor:
        parts = [sources.made(rule, fields) for rule in rules]
        sizes = [_even(_size(part, axis, "concat"), groups, part) for part in parts]
        runs = [(p, n * g, n) for g in range(groups) for p, n in zip(parts, sizes, strict=True)]
        return _joined(axis, runs)

    return made


def part(rule: Rule, number: int, sizes: Sequence[int], *, axis: int = 0, groups: int = 1) -> Rule:
    """Return the rule for one part of a fused tensor, the reverse of :func:`concat`.

    Args:
        rule: the fused tensor.
        number: position of the part among the parts.
        sizes: sizes of all parts along the axis, or their ratio, as numbers of heads.
        axis: the axis.
        groups: see :func:`concat`.

    Raises:
        ArgumentError: there is no part of this number, a size is negative, or an argument has a
            wrong type or value.
    """
    given, sizes = sizes, [*sizes] if isinstance(sizes, Iterable) else []
    _require_numbers(groups, number=number, axis=axis, **{f"size {n}": n for n in sizes})
    if not -len(sizes) <= number < len(sizes) or min(sizes) < 0:
        text = f"part({rule!r:.100}, {number}, {given}) is none of {len(sizes)} parts"
        raise errors.ArgumentError(f"{text}; they are counted from 0, and no size is negative")

    def made(fields: Fields, sources: Sources) -> SourceTensor:
        whole = sources.made(rule, fields)
        unit = _even(_size(whole, axis, "part"), groups * sum(sizes), whole)
        first, length = unit * sum(sizes[:number]), unit * sizes[number]
        starts = (group * unit * sum(sizes) + first for group in range(groups))
        return _joined(axis, [(whole, start, length) for start in starts])

    return made


def stack(rule: Rule, over: str) -> Rule:
    """Return the rule for tensors that are stacked along a new first axis, as in grouped experts.

    Args:
        rule: the tensors.
        over: the field that has the values 0, 1, 2, ... as long as such tensors are stored.
    """

    def made(fields: Fields, sources: Sources) -> SourceTensor:
        try:
            sources.made(rule, {name: fields[name] for name in fields if name != over})
        except (errors.ArgumentError, errors.MissingKeyError):
            pass
        else:
            text = f"stack(..., over={over!r}) in a rule would never end: no template in it has "
            raise errors.ArgumentError(f"{text}the field {{{over}}}")
        found: list[SourceTensor] = []
        try:
            while True:
                found.append(sources.made(rule, {**fields, over: str(len(found))}))
        except errors.MissingKeyError:
            if not found:
                raise
        layers = (
            _viewed(one, (1, *one.shape), lambda values, _: values[1:], lambda out: out[0, ...])
            for one in found
        )
        return _joined(0, [(layer, 0, 1) for layer in layers])

    return made


def index(rule: Rule, at: str | int) -> Rule:
    """Return the rule for one element of the first axis, the reverse of :func:`stack`.

    Args:
        rule: the stacked tensor.
        at: position along its first axis; a text is a template.
    """

    def made(fields: Fields, sources: Sources) -> SourceTensor:
        whole = sources.made(rule, fields)
        text = _filled(str(at), fields)
        try:
            position = int(text)
        except ValueError:
            raise errors.ArgumentError(
                f"index(..., {at!r}) gives {text!r} in a rule; give a number"
            ) from None
        if not 0 <= position < _size(whole, 0, "index"):
            key = f"{min(whole.keys)}[{position}]"
            raise errors.MissingKeyError(f"{key!r} is not stored in {sources.url}", key=key)

        def moved(values: Shape, length: int) -> Shape:
            return (length or position, *values)

        return _viewed(whole, whole.shape[1:], moved, lambda out: out[None, ...])

    return made


def transposed(rule: Rule) -> Rule:
    """Return the rule for a tensor whose last two axes are exchanged."""

    def made(fields: Fields, sources: Sources) -> SourceTensor:
        whole = sources.made(rule, fields)
        _size(whole, -2, "transposed")
        shape = _exchanged(whole.shape)
        return _viewed(whole, shape, _exchanged, lambda out: out.swapaxes(-1, -2))

    return made


def _require_numbers(groups: int, **numbers: int) -> None:
    """Raise :class:`ArgumentError` unless all are whole numbers, and ``groups`` at least 1."""
    require_number("groups", groups)
    for name, number in numbers.items():
        if not isinstance(number, Integral):
            raise errors.ArgumentError(f"{name}={number!r:.100} in a rule must be a whole number")


def _filled(template: str, fields: Fields) -> str:
    """Return a template with the values of its fields."""
    try:
        return template.format_map(fields)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        unknown = f"the field {error}, which the key of the rule does not have"
        what = unknown if isinstance(error, KeyError) else f"a field that is no name ({error})"
        raise errors.ArgumentError(
            f"the template {template!r} of a rule has {what}; a key such as "
            "'layers.{layer}.weight', or stack(..., over='layer'), gives the value of {layer}"
        ) from None


def _size(source: SourceTensor, axis: int, rule: str) -> int:
    """Return the size of a source along an axis that a rule needs."""
    if not -len(source.shape) <= axis < len(source.shape):
        key = min(source.keys)
        raise errors.ShapeMismatchError(
            f"key {key!r} has shape {source.shape}, and {rule} in a rule needs its axis {axis}; "
            "correct the rule, or let its template match fewer keys",
            key=key,
        )
    return source.shape[axis]


def _even(size: int, parts: int, source: SourceTensor) -> int:
    """Return the size of one of equal parts."""
    if parts < 1 or size % parts:
        key = sorted(source.keys)[0]
        raise errors.ShapeMismatchError(
            f"key {key!r} has shape {source.shape}, and {size} elements are not {parts} equal "
            "parts; correct the sizes or groups of the rule",
            key=key,
        )
    return size // parts


@dataclass(frozen=True)
class Sources:
    """The tensors in the files, and the rules.

    Attributes:
        arrays: name -> stored tensor.
        url: URL of the files, for error texts.
        rules: template of a key -> rule.
        ties: name of a tied weight that was left out at the save -> the name that is stored.
        block_shape: shape of the blocks that have one scale; ``None``: scales are not applied.
    """

    arrays: Mapping[str, ArrayMeta]
    url: str
    rules: Mapping[str, Rule]
    ties: Mapping[str, str]
    block_shape: tuple[int, ...] | None

    def of(self, key: str, dtype: torch.dtype) -> SourceTensor:
        """Return the source of a tensor of the state dict.

        Raises:
            MissingKeyError: a stored tensor is missing.
        """
        fields: Fields = {"": dtypes.zarr_name(dtype)}
        for template, rule in self.rules.items():
            if found := _pattern(template).fullmatch(key):
                return self.made(rule, {**fields, **found.groupdict()})
        return self._stored(key, fields[""])

    def made(self, rule: Rule, fields: Fields) -> SourceTensor:
        """Return the source that a rule describes."""
        if isinstance(rule, str):
            return self._stored(_filled(rule, fields), fields[""])
        if not callable(rule):
            text = f"{rule!r:.100} in a rule is neither the name of a tensor nor a rule"
            raise errors.ArgumentError(f"{text}; see shardstore.hf.rules")
        return rule(fields, self)

    def _stored(self, key: str, dtype: str) -> SourceTensor:
        if key not in self.arrays:
            raise errors.MissingKeyError(f"{key!r} is not stored in {self.url}", key=key)
        array = self.arrays[key]
        scales = [self.arrays[key + end] for end in SCALE_SUFFIXES if key + end in self.arrays]
        is_cast = array.dtype.startswith("float8") and re.fullmatch("b?float(16|32|64)", dtype)
        if is_cast and scales and self.block_shape is not None:
            return _quantised(array, scales[0], self.block_shape, dtype)
        return _stored(array)


@lru_cache(maxsize=1024)
def _pattern(template: str) -> re.Pattern[str]:
    """Return the pattern of the keys of a template."""
    texts = re.split(r"\{(\w+)\}", template)
    fields = texts[1::2]
    if len(set(fields)) < len(fields) or not all(map(str.isidentifier, fields)):
        raise errors.ArgumentError(
            f"the template {template!r} of a rule has the fields {fields}; give each another name, "
            "which begins with a letter"
        )
    return re.compile(
        "".join(f"(?P<{t}>[^.]+)" if n % 2 else re.escape(t) for n, t in enumerate(texts))
    )


# -- sources ---------------------------------------------------------------------------------------


def _stored(array: ArrayMeta) -> SourceTensor:
    """Return a stored tensor."""
    keys = frozenset([array.key])
    return SourceTensor(array.shape, array.dtype, keys, lambda box, out: iter([(array, box, out)]))


def _joined(axis: int, runs: Sequence[tuple[SourceTensor, int, int]]) -> SourceTensor:
    """Return runs of sources (source, start, length), joined along an axis."""
    one = runs[0][0]
    axis %= len(one.shape)
    keys = one.keys.union(*(source.keys for source, _, _ in runs))
    for source, _, _ in runs:
        if (source.dtype, _with(source.shape, axis, 0)) != (one.dtype, _with(one.shape, axis, 0)):
            kind: type[errors.CheckpointingException] = errors.ShapeMismatchError
            if source.dtype != one.dtype:
                kind = errors.DTypeMismatchError
            raise kind(
                f"keys {sorted(keys)[:4]} have shapes {one.shape} and {source.shape} and data "
                f"types {one.dtype} and {source.dtype}, and do not fit together along axis {axis}; "
                "correct the rule",
                key=min(keys),
            )

    shape = _with(one.shape, axis, sum(length for _, _, length in runs))
    origin = (0,) * len(shape)

    def regions(box: Box, out: Any) -> Regions:
        position = 0
        for source, first, length in runs:
            run = Box(_with(origin, axis, position), _with(shape, axis, length))
            if part := box.intersect(run):
                inner = part.relative_to(_with(origin, axis, position - first))
                yield from source.regions(inner, out[(..., *part.relative_to(box.offset).slices)])
            position += length

    return SourceTensor(shape, one.dtype, keys, regions)


def _viewed(
    source: SourceTensor,
    shape: Shape,
    moved: Callable[[Shape, int], Shape],
    view: Callable[[Any], Any],
) -> SourceTensor:
    """Return a source in another shape.

    Args:
        source: the source.
        shape: the other shape.
        moved: turns the offset of a box (with 0) and its shape (with 1) into those of the source.
        view: turns a destination into one of the shape of the source.
    """

    def regions(box: Box, out: Any) -> Regions:
        return source.regions(Box(moved(box.offset, 0), moved(box.shape, 1)), view(out))

    return SourceTensor(shape, source.dtype, source.keys, regions)


def _exchanged(values: Shape, _: int = 0) -> Shape:
    return (*values[:-2], values[-1], values[-2])


def _with(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis + 1 :])


def _quantised(array: ArrayMeta, scale: ArrayMeta, block: Shape, dtype: str) -> SourceTensor:
    """Return a stored tensor that is multiplied by scales: along each axis there is one for each
    block (DeepSeek-V3, "FP8 Weights"), for each position, or for all. Axes that the scales lack are
    the last ones. Scales of bytes are exponents (OCP Microscaling Formats, "E8M0")."""
    if not scale.dtype.startswith(("float", "bfloat", "uint8")):
        raise errors.DTypeMismatchError(
            f"key {array.key!r} is stored with scales, but {scale.key!r} has data type "
            f"{scale.dtype}: load it as it is stored (dequantize=None), and apply the scales",
            key=array.key,
        )
    axes = len(array.shape)
    edges = ((1,) * axes + tuple(block))[len(block) :]
    counts = tuple(-(-n // edge) for n, edge in zip(array.shape, edges, strict=True))
    given = scale.shape + (1,) * (axes - len(scale.shape))
    # Number of scales along an axis -> positions that have the same; blocks count first.
    known = [{n: 1, 1: n, c: e} for n, c, e in zip(array.shape, counts, edges, strict=True)]
    edges = tuple(fit[n] for n, fit in zip(given, known, strict=False) if n in fit)
    if not len(edges) == len(given) == axes:
        raise errors.ShapeMismatchError(
            f"key {array.key!r} of shape {array.shape} in blocks of {block} has {counts} scales, "
            f"but {scale.key!r} has shape {scale.shape}; give dequantize= the shape of a block "
            "(weight_block_size in config.json), or None",
            key=array.key,
        )

    def regions(box: Box, out: Any) -> Regions:
        blocks = [
            torch.arange(offset, offset + length, device="cpu") // edge
            for offset, length, edge in zip(*box, edges, strict=True)
        ]
        first = tuple(int(one[0]) for one in blocks)
        count = tuple(int(one[-1]) + 1 - n for one, n in zip(blocks, first, strict=True))
        scales = torch.empty(count, dtype=dtypes.torch_dtype(scale.dtype), device="cpu")
        held = Box(first[: len(scale.shape)], count[: len(scale.shape)])
        yield scale, held, dtypes.as_numpy(scales).reshape(held.shape)
        target = out if isinstance(out, torch.Tensor) else dtypes.as_tensor(out)
        inner = [one - n for one, n in zip(blocks, first, strict=True)]
        if scale.dtype == "uint8":
            scales = scales.view(torch.float8_e8m0fnu)
        yield array, box, Scaled(target, scales, inner)

    return SourceTensor(array.shape, dtype, frozenset([array.key, scale.key]), regions)


class Scaled:
    """The destination of quantised values: a tensor that gets the values times their scales.

    Args:
        out: the tensor.
        scales: the scale of each block.
        blocks: for each axis the number of the block of each position.
    """

    def __init__(
        self, out: torch.Tensor, scales: torch.Tensor, blocks: Sequence[torch.Tensor]
    ) -> None:
        self._out, self._scales, self._blocks = out, scales, blocks
        self.shape, self.nbytes = out.shape, out.nbytes
        self.device, self.is_cpu = out.device, out.is_cpu

    def __getitem__(self, where: Any) -> Scaled:
        """Return a part: an ellipsis, and a slice for each axis."""
        slices = where[1:]
        blocks = [block[one] for block, one in zip(self._blocks, slices, strict=True)]
        return Scaled(self._out[where], self._scales, blocks)

    def copy_(self, values: torch.Tensor) -> None:
        """Fill the tensor with scaled values."""
        if not values.dim():
            self._out.copy_(values.float() * self._scales.float())
            return
        rows = max(1, SCALED_ELEMENTS * len(values) // max(1, values.numel()))
        known = (
            torch.arange(256, dtype=torch.uint8, device="cpu").view(values.dtype).float().numpy()
        )
        codes = values.view(torch.uint8).numpy()
        for start in range(0, len(values), rows):
            part = slice(start, start + rows)
            scales = self._scales.float()
            for axis, block in enumerate(self._blocks):
                scales = scales.index_select(axis, block[part] if axis == 0 else block)
            # A third of the time of values[part].float().
            self._out[part].copy_(scales.mul_(torch.from_numpy(known.take(codes[part]))))
