"""Data types that zarr-python lacks: bfloat16 and the 8-bit floats, over ``ml_dtypes``.

Defines the zarr data types of the names below, in both Zarr formats, so that plain zarr opens and
creates such arrays. Importing this module registers them; doing so again changes nothing. It
imports neither torch, TensorStore, nor anything else of this package: zarr loads it by entry point,
and an entry point that fails to import breaks every data type look-up of zarr.

Two entry point groups lead here. ``zarr.data_type`` is loaded by zarr from 3.4.1 on. Earlier ones
load only foreign buffer classes, when they first need a buffer: for them ``zarr.ndbuffer`` names
zarr's own :class:`NDBuffer` in this module. So ``zarr.open_group`` works with nothing imported;
only where zarr is older and the very first call opens an array by its own path, import this module.

Source: the registered data types, https://github.com/zarr-developers/zarr-extensions (data-types),
and the Zarr v3 specification, section "Fill value representation".

Data round-trips bit for bit, NaN payloads included. Limits of others show through:

- zarr-python as the *writer* leaves out a chunk that equals the fill value and for most of these
  types takes -0.0 for 0.0 in doing so: ``array.write_empty_chunks`` of ``zarr.config`` keeps it.
- zarr-python as the writer of Zarr *v2* cannot pass these types through numcodecs' Blosc (it takes
  zstd, zlib or no compressor); it reads what others compressed so.
- TensorStore 0.1 misreads a *fill value* of ``float8_e8m0fnu`` given as a number. It is therefore
  written as a hexadecimal string in Zarr v3, which all readers take the same way.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeGuard

import ml_dtypes
import numpy as np
from zarr.core.buffer.cpu import NDBuffer as NDBuffer
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry

if TYPE_CHECKING:
    from zarr.core.common import JSON, ZarrFormat
    from zarr.core.dtype.common import DTypeJSON
    from zarr.core.dtype.wrapper import TBaseDType

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class _MLFloat(ZDType[np.dtype[Any], np.generic], HasItemSize):
    """What all these types share; a subclass gives the scalar type."""

    _scalar: ClassVar[type[np.generic]]
    _nan_bits: ClassVar[int]
    _has_infinity: ClassVar[bool]
    # Fill values are numbers where every reader takes the number for the same bits.
    _numbers_agree: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        cls.dtype_cls = type(np.dtype(cls._scalar))
        cls._zarr_v3_name = cls._scalar.__name__
        nan, infinity = np.array([math.nan, math.inf]).astype(cls._scalar)
        cls._nan_bits, cls._has_infinity = cls._bits(nan), math.isinf(float(infinity))

    @property
    def item_size(self) -> int:
        """Size of one element in bytes."""
        return np.dtype(self._scalar).itemsize

    @classmethod
    def from_native_dtype(cls, dtype: TBaseDType) -> Self:
        """Return the zarr data type of a numpy one; DataTypeValidationError where it is not this
        one."""
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"{dtype!r} is not the numpy type {cls._zarr_v3_name}")
        return cls._from_byte_order(dtype.byteorder)

    @classmethod
    def _from_byte_order(cls, order: str) -> Self:
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        """Return the numpy data type, from ``ml_dtypes``."""
        return np.dtype(self._scalar)

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> Self:
        return cls._named(data, isinstance(data, Mapping) and data.get("name"), 2)

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        # Specification, "Extension points": a name alone stands for an object with just that name.
        if isinstance(data, Mapping):
            return cls._named(data, not data.get("configuration") and data.get("name"), 3)
        return cls._named(data, data, 3)

    @classmethod
    def _named(cls, data: object, name: object, zarr_format: int) -> Self:
        if name == cls._zarr_v3_name:
            return cls()
        kind = f"the Zarr v{zarr_format} data type {cls._zarr_v3_name}"
        raise DataTypeValidationError(f"{data!r} is not {kind}")

    def to_json(self, zarr_format: ZarrFormat) -> Any:
        """The registered name; Zarr v2 uses the same, as TensorStore and Megatron-Core write it,
        and means little endian by it, so that big is refused."""
        if zarr_format == 3:
            return self._zarr_v3_name
        if getattr(self, "endianness", "little") == "big":
            raise ValueError("Zarr v2 has no name for big-endian bfloat16: use little endian")
        return {"name": self._zarr_v3_name, "object_codec_id": None}

    def _check_scalar(self, data: object) -> TypeGuard[str | float | np.generic]:
        if isinstance(data, np.generic):  # one that is a real number: no complex, date, bytes
            return np.can_cast(data.dtype, np.float64, "same_kind")
        return isinstance(data, str | int | float) and not isinstance(data, bool)

    def cast_scalar(self, data: object) -> np.generic:
        """Return a number, numpy scalar, or string as in array metadata, as a scalar of this type.

        Scalars of this type keep their bits; numbers are rounded as ``ml_dtypes`` rounds them.

        Raises:
            TypeError: ``data`` is none of these.
            ValueError: a string that the Zarr v3 specification does not allow for this type.
        """
        if isinstance(data, np.ndarray) and data.ndim == 0:
            data = data[()]
        if type(data) is self._scalar:
            return data
        if isinstance(data, str):
            return self._from_text(data)
        if self._check_scalar(data):
            return self._from_number(float(data))
        raise TypeError(
            f"{data!r} of type {type(data).__name__} cannot be a {self._zarr_v3_name} value: "
            'give a number, "NaN", or the bits as a string like "0x7f"'
        )

    def default_scalar(self) -> np.generic:
        """Return the value whose bits are all zero; that is 0 where the type has one."""
        return self._from_bits(0)

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> np.generic:
        """Return a fill value of array metadata: a number, ``"NaN"``, an infinity, or bits in
        hexadecimal.

        Raises:
            TypeError: not a number or string.
            ValueError: a string that is none of those, or an infinity where the type has none.
        """
        if zarr_format == 2 and isinstance(data, str) and data not in _SPECIAL:
            # TensorStore would take "0x7f" for the number 127 here: refuse, not differ.
            raise ValueError(
                f"fill value {data!r} of a Zarr v2 array of {self._zarr_v3_name}: "
                'expected a number, "NaN", "Infinity" or "-Infinity"'
            )
        return self.cast_scalar(data)

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> float | str:
        """Return the fill value as array metadata gives it, exact to the bit.

        Raises:
            TypeError, ValueError: as :meth:`cast_scalar`; and a NaN other than the type's ``"NaN"``
                in Zarr v2, which has no way to write it.
        """
        scalar = self.cast_scalar(data)
        bits = self._bits(scalar)
        if bits == self._nan_bits:
            return "NaN"
        number = float(scalar)
        as_text = f"0x{bits:0{2 * self.item_size}x}"
        if zarr_format == 3 and (math.isnan(number) or not self._numbers_agree):
            return as_text
        if math.isnan(number):
            raise ValueError(
                f"fill value {as_text} of {self._zarr_v3_name} is a NaN that Zarr v2 cannot write: "
                'use "NaN", or Zarr v3'
            )
        if math.isinf(number):
            return "Infinity" if number > 0 else "-Infinity"
        return 0.0 if bits == 0 else number

    @classmethod
    def _from_bits(cls, bits: int) -> np.generic:
        data = bits.to_bytes(np.dtype(cls._scalar).itemsize, sys.byteorder)
        scalar: np.generic = np.frombuffer(data, cls._scalar)[0]
        return scalar

    @classmethod
    def _bits(cls, scalar: np.generic) -> int:
        return int.from_bytes(np.array(scalar, cls._scalar).tobytes(), sys.byteorder)

    @classmethod
    def _from_text(cls, text: str) -> np.generic:
        digits = 2 * np.dtype(cls._scalar).itemsize
        if text == "NaN" or (text in _SPECIAL and cls._has_infinity):
            return cls._from_number(_SPECIAL[text])
        if re.fullmatch(f"0x0*[0-9a-fA-F]{{1,{digits}}}", text):
            return cls._from_bits(int(text, 16))
        infinities = ', "Infinity", "-Infinity"' if cls._has_infinity else " (no infinities)"
        raise ValueError(
            f'{text!r} is no value of {cls._zarr_v3_name}: expected a number, "NaN"{infinities}, '
            f'or {digits} hexadecimal digits after "0x"'
        )

    @classmethod
    def _from_number(cls, number: float) -> np.generic:
        if number == 0 and math.copysign(1, number) > 0:
            return cls._from_bits(0)
        if math.isnan(number):
            return cls._from_bits(cls._nan_bits)
        scalar: np.generic = np.dtype(cls._scalar).type(number)
        return scalar


@dataclass(frozen=True, kw_only=True)
class BFloat16(_MLFloat, HasEndianness):
    """``bfloat16``: 1 sign, 8 exponent, 7 mantissa bits; the only one here with a byte order."""

    _scalar = ml_dtypes.bfloat16

    @classmethod
    def _from_byte_order(cls, order: str) -> Self:
        native = np.dtype("=u2").newbyteorder(order)  # type: ignore[arg-type]
        return cls(endianness="little" if native == np.dtype("<u2") else "big")

    def to_native_dtype(self) -> np.dtype[Any]:
        """Return the numpy data type, in this byte order."""
        native: np.dtype[Any] = np.dtype(self._scalar)
        # Only the machine's own order gives the dtype object that ml_dtypes itself hands out.
        return native if self.endianness == sys.byteorder else native.newbyteorder()


class Float8E4M3FN(_MLFloat):
    """``float8_e4m3fn``: 1 sign, 4 exponent, 3 mantissa bits; no infinities."""

    _scalar = ml_dtypes.float8_e4m3fn


class Float8E5M2(_MLFloat):
    """``float8_e5m2``: 1 sign, 5 exponent, 2 mantissa bits."""

    _scalar = ml_dtypes.float8_e5m2


class Float8E4M3FNUZ(_MLFloat):
    """``float8_e4m3fnuz``: as e4m3 with no infinities, no -0 and one NaN."""

    _scalar = ml_dtypes.float8_e4m3fnuz


class Float8E5M2FNUZ(_MLFloat):
    """``float8_e5m2fnuz``: as e5m2 with no infinities, no -0 and one NaN."""

    _scalar = ml_dtypes.float8_e5m2fnuz


class Float8E8M0FNU(_MLFloat):
    """``float8_e8m0fnu``: powers of two from 2**-127 to 2**127 and NaN; no sign, no zero.

    The fill value 0, TensorStore's default, stands for the bits 0x00, as it does there.
    """

    _scalar = ml_dtypes.float8_e8m0fnu
    _numbers_agree = False


DATA_TYPES: tuple[type[_MLFloat], ...] = tuple(_MLFloat.__subclasses__())


def register() -> None:
    """Make zarr know these data types; a name that is registered already is left as it is."""
    for data_type in DATA_TYPES:
        if data_type._zarr_v3_name not in data_type_registry.contents:
            data_type_registry.register(data_type._zarr_v3_name, data_type)


register()
