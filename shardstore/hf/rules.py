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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from shardstore.errors import (
    ArgumentError,
    DTypeMismatchError,
    MissingKeyError,
    ShapeMismatchError,
)
from shardstore.loading.plan import missing_key
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Shape

SCALE_SUFFIX = "_scale_inv"
SCALED_ELEMENTS = 1024 * 1024
"""Number of elements that are multiplied by their scales at a time."""

Regions: TypeAlias = Iterator[tuple[ArrayMeta, Box, Any]]
"""Regions of stored tensors, each with its destination."""


class Source(Protocol):
    """A tensor that is made of stored tensors.

    Attributes:
        shape: its shape.
        dtype: Zarr name of its data type.
        keys: names of the stored tensors.
    """

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> str: ...
    @property
    def keys(self) -> frozenset[str]: ...

    def regions(self, box: Box, out: Any) -> Regions:
        """Yield the regions of stored tensors that fill ``out``, an array or tensor of the box's
        shape."""


Fields: TypeAlias = Mapping[str, str]
Rule: TypeAlias = "str | Callable[[Fields, Sources], Source]"


# -- rules -----------------------------------------------------------------------------------------


def concat(*rules: Rule, axis: int = 0, groups: int = 1) -> Rule:
    """Return the rule for tensors that are joined along an axis, as in fused QKV weights.

    Args:
        *rules: the parts, in order.
        axis: the axis.
        groups: number of equal groups into which each part is cut. The result has the first group
            of each part, then the second of each. Megatron-Core's fused QKV has a group for each
            key-value head.
    """

    def made(fields: Fields, sources: Sources) -> Source:
        parts = [sources.made(rule, fields) for rule in rules]
        sizes = [_even(part.shape[axis], groups, part) for part in parts]
        runs = [(p, n * g, n) for g in range(groups) for p, n in zip(parts, sizes, strict=True)]
        return _Joined(axis % len(parts[0].shape), runs)

    return made


def part(rule: Rule, number: int, sizes: Sequence[int], *, axis: int = 0, groups: int = 1) -> Rule:
    """Return the rule for one part of a fused tensor, the reverse of :func:`concat`.

    Args:
        rule: the fused tensor.
        number: position of the part among the parts.
        sizes: sizes of all parts along the axis, or their ratio, as numbers of heads.
        axis: the axis.
        groups: see :func:`concat`.
    """

    def made(fields: Fields, sources: Sources) -> Source:
        whole = sources.made(rule, fields)
        unit = _even(whole.shape[axis], groups * sum(sizes), whole)
        first, length = unit * sum(sizes[:number]), unit * sizes[number]
        starts = (group * unit * sum(sizes) + first for group in range(groups))
        return _Joined(axis % len(whole.shape), [(whole, start, length) for start in starts])

    return made


def stack(rule: Rule, over: str) -> Rule:
    """Return the rule for tensors that are stacked along a new first axis, as in grouped experts.

    Args:
        rule: the tensors.
        over: the field that has the values 0, 1, 2, ... as long as such tensors are stored.
    """

    def made(fields: Fields, sources: Sources) -> Source:
        found: list[Source] = []
        try:
            while True:
                found.append(sources.made(rule, {**fields, over: str(len(found))}))
        except MissingKeyError:
            if not found:
                raise
        return _Joined(0, [(_Unsqueezed(one), 0, 1) for one in found])

    return made


def index(rule: Rule, at: str | int) -> Rule:
    """Return the rule for one element of the first axis, the reverse of :func:`stack`.

    Args:
        rule: the stacked tensor.
        at: position along its first axis; a text is a template.
    """

    def made(fields: Fields, sources: Sources) -> Source:
        whole = sources.made(rule, fields)
        position = int(str(at).format_map(fields))
        if position >= whole.shape[0]:
            raise missing_key(f"{sorted(whole.keys)[0]}[{position}]", {}, sources.url)
        return _Indexed(whole, position)

    return made


def transposed(rule: Rule) -> Rule:
    """Return the rule for a tensor whose last two axes are exchanged."""
    return lambda fields, sources: _Transposed(sources.made(rule, fields))


def _even(size: int, parts: int, source: Source) -> int:
    """Return the size of one of equal parts."""
    if parts < 1 or size % parts:
        key = sorted(source.keys)[0]
        raise ShapeMismatchError(
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
        block_shape: shape of the blocks that have one scale; ``None``: scales are not applied.
    """

    arrays: Mapping[str, ArrayMeta]
    url: str
    rules: Mapping[str, Rule]
    block_shape: tuple[int, ...] | None

    def of(self, key: str, dtype: torch.dtype) -> Source:
        """Return the source of a tensor of the state dict.

        Raises:
            MissingKeyError: a stored tensor is missing.
        """
        fields: Fields = {"": dtypes.zarr_name(dtype)}
        for template, rule in self.rules.items():
            if found := _pattern(template).fullmatch(key):
                return self.made(rule, {**fields, **found.groupdict()})
        return self._stored(key, fields[""])

    def made(self, rule: Rule, fields: Fields) -> Source:
        """Return the source that a rule describes."""
        if not isinstance(rule, str):
            return rule(fields, self)
        try:
            return self._stored(rule.format_map(fields), fields[""])
        except KeyError as error:
            if isinstance(error, MissingKeyError):
                raise
            raise ArgumentError(
                f"the rule {rule!r} has the field {error}, which its key does not have; a key such "
                "as 'layers.{layer}.weight' gives the value of {layer}"
            ) from None

    def _stored(self, key: str, dtype: str) -> Source:
        if key not in self.arrays:
            more = " A `strict` mode other than assume_ok_unexpected leaves such keys out"
            raise missing_key(key, self.arrays, self.url, more)
        array, scale = self.arrays[key], self.arrays.get(key + SCALE_SUFFIX)
        if not array.dtype.startswith("float8") or dtype.startswith("float8"):
            return _Stored(array)
        if scale is None or self.block_shape is None:
            return _Stored(array)
        return _Quantised(array, scale, self.block_shape, dtype)


def _pattern(template: str) -> re.Pattern[str]:
    """Return the pattern of the keys of a template."""
    texts = re.split(r"\{(\w+)\}", template)
    return re.compile(
        "".join(f"(?P<{t}>[^.]+)" if n % 2 else re.escape(t) for n, t in enumerate(texts))
    )


# -- sources ---------------------------------------------------------------------------------------


class _Stored:
    """A stored tensor."""

    def __init__(self, array: ArrayMeta) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.keys = frozenset([array.key])

    def regions(self, box: Box, out: Any) -> Regions:
        yield self.array, box, out


class _Joined:
    """Runs of other sources, joined along an axis."""

    def __init__(self, axis: int, runs: Sequence[tuple[Source, int, int]]) -> None:
        self._axis, self._runs = axis, runs
        first = runs[0][0]
        self.dtype, self.keys = first.dtype, first.keys.union(*(one.keys for one, _, _ in runs))
        self.shape = _with(first.shape, axis, sum(length for _, _, length in runs))
        for one, _, _ in runs:
            if (one.dtype, _with(one.shape, axis, 0)) != (self.dtype, _with(self.shape, axis, 0)):
                keys, shapes = sorted(self.keys), [first.shape, one.shape]
                kind = DTypeMismatchError if one.dtype != self.dtype else ShapeMismatchError
                raise kind(
                    f"keys {keys[:4]} have shapes {shapes} and data types "
                    f"{[self.dtype, one.dtype]}, and do not fit together along axis {axis}; "
                    "correct the rule",
                    key=keys[0],
                )

    def regions(self, box: Box, out: Any) -> Regions:
        axis, position = self._axis, 0
        start, stop = box.offset[axis], box.end[axis]
        for source, first, length in self._runs:
            low, high = max(start, position), min(stop, position + length)
            if low < high:
                offset = _with(box.offset, axis, first + low - position)
                where = (..., *(slice(None),) * axis, slice(low - start, high - start))
                where += (slice(None),) * (len(box.shape) - axis - 1)
                inner = Box(offset, _with(box.shape, axis, high - low))
                yield from source.regions(inner, out[where])
            position += length


class _Unsqueezed:
    """A source with another first axis, of length 1."""

    def __init__(self, source: Source) -> None:
        self._source, self.dtype, self.keys = source, source.dtype, source.keys
        self.shape = (1, *source.shape)

    def regions(self, box: Box, out: Any) -> Regions:
        return self._source.regions(Box(box.offset[1:], box.shape[1:]), out[0, ...])


class _Indexed:
    """A source at one position of its first axis."""

    def __init__(self, source: Source, at: int) -> None:
        self._source, self.dtype, self.keys, self._at = source, source.dtype, source.keys, at
        self.shape = source.shape[1:]

    def regions(self, box: Box, out: Any) -> Regions:
        return self._source.regions(Box((self._at, *box.offset), (1, *box.shape)), out[None, ...])


class _Transposed:
    """A source with its last two axes exchanged."""

    def __init__(self, source: Source) -> None:
        self._source, self.dtype, self.keys = source, source.dtype, source.keys
        self.shape = _exchanged(source.shape)

    def regions(self, box: Box, out: Any) -> Regions:
        inner = Box(_exchanged(box.offset), _exchanged(box.shape))
        return self._source.regions(inner, out.swapaxes(-1, -2))


def _exchanged(values: Shape) -> Shape:
    return (*values[:-2], values[-1], values[-2])


def _with(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis + 1 :])


class _Quantised:
    """A stored tensor whose blocks are multiplied by scales (DeepSeek-V3, "FP8 Weights")."""

    def __init__(self, array: ArrayMeta, scale: ArrayMeta, block: Shape, dtype: str) -> None:
        self._array, self._scale, self.dtype, self.shape = array, scale, dtype, array.shape
        self.keys = frozenset([array.key, scale.key])
        self._block = (1,) * (len(array.shape) - len(block)) + tuple(block)
        counts = tuple(-(-n // b) for n, b in zip(array.shape, self._block, strict=False))
        if scale.shape != counts or len(self._block) != len(array.shape):
            raise ShapeMismatchError(
                f"key {array.key!r} of shape {array.shape} in blocks of {block} has {counts} "
                f"scales, but {scale.key!r} has shape {scale.shape}; give dequantize= the shape of "
                "a block (weight_block_size in config.json), or None",
                key=array.key,
            )

    def regions(self, box: Box, out: Any) -> Regions:
        first = tuple(o // b for o, b in zip(box.offset, self._block, strict=True))
        count = tuple(
            -(-end // b) - f for end, b, f in zip(box.end, self._block, first, strict=True)
        )
        scales = torch.empty(count, dtype=dtypes.torch_dtype(self._scale.dtype))
        yield self._scale, Box(first, count), dtypes.as_numpy(scales)
        blocks = [
            torch.arange(o, o + n) // b - f
            for o, n, b, f in zip(box.offset, box.shape, self._block, first, strict=True)
        ]
        target = out if isinstance(out, torch.Tensor) else dtypes.as_tensor(out)
        yield self._array, box, Scaled(target, scales, blocks)


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
        rows = max(1, SCALED_ELEMENTS * len(values) // max(1, values.numel()))
        for start in range(0, len(values), rows):
            part = slice(start, start + rows)
            scales = self._scales.float()
            for axis, block in enumerate(self._blocks):
                scales = scales.index_select(axis, block[part] if axis == 0 else block)
            self._out[part].copy_(values[part].float() * scales)
