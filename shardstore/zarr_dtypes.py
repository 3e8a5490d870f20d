"""Data types that zarr-python lacks: bfloat16 and the 8-bit floats of ``ml_dtypes``, and torch's
``float4_e2m1fn_x2``.

Importing this module registers the data types, so that plain zarr opens and creates arrays of them
in both Zarr formats. A second import changes nothing. The module imports neither torch nor
TensorStore nor any other module of this package. zarr loads it through an entry point, and an entry
point that fails to import breaks every look-up of a data type in zarr.

Two groups of entry points name this module. zarr 3.4.1 and later load ``zarr.data_type``. Earlier
releases load only entry points for buffer classes, when they first need a buffer. For them,
``zarr.ndbuffer`` names zarr's own :class:`NDBuffer` in this module. So ``zarr.open_group`` works
without an import. With zarr before 3.4.1, import this module if the first call opens an array by
the array's own path.

Source: the registered data types, https://github.com/zarr-developers/zarr-extensions (data-types),
and the Zarr v3 specification, section "Fill value representation".

Values are stored bit for bit, including NaN payloads. Other libraries have these limits:

- zarr-python does not write a chunk that equals the fill value. For most of these types it takes
  -0.0 for 0.0 in this comparison. ``array.write_empty_chunks`` in ``zarr.config`` makes it write
  all chunks.
- zarr-python cannot write these types to Zarr v2 through numcodecs' Blosc; zstd, zlib and no
  compressor work. It reads arrays that other programs compressed with Blosc.
- TensorStore 0.1 misreads a *fill value* of ``float8_e8m0fnu`` that is a number. In Zarr v3 it is
  therefore written as a hexadecimal string, which all readers interpret in the same way.
- ``float4_e2m1fn_x2`` is not registered, and programs without this package refuse it. To create an
  array with zarr, give the name; zarr refuses the NumPy type as ambiguous.
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
from zarr.dtype import ZDType, data_type_registry

try:
    from zarr.errors import DataTypeValidationError  # type: ignore[attr-defined]
except ImportError:  # before zarr 3.2
    from zarr.dtype import DataTypeValidationError

if TYPE_CHECKING:
    from zarr.core.common import JSON, ZarrFormat
    from zarr.core.dtype.common import DTypeJSON
    from zarr.core.dtype.wrapper import TBaseDType


@dataclass(frozen=True, kw_only=True)
class _MLFloat(ZDType[np.dtype[Any], np.generic], HasItemSize):
    """Base of these data types.

    Args:
        scalar: scalar type of a subclass, or its fields.
        numbers_agree: whether every reader converts a fill value given as a number to the same
            bits.
    """

    _native: ClassVar[np.dtype[Any]]
    _numbers_agree: ClassVar[bool]
    _forms: ClassVar[str] = 'a number, "NaN", or the bits as a string like "0x7f"'

    def __init_subclass__(cls, scalar: Any, numbers_agree: bool = True) -> None:
        cls._native, cls._numbers_agree = np.dtype(scalar), numbers_agree
        cls.dtype_cls = type(cls._native)
        (cls._zarr_v3_name,) = cls._native.names or (scalar.__name__,)

    @property
    def item_size(self) -> int:
        """Size of one element in bytes."""
        return self._native.itemsize

    @classmethod
    def from_native_dtype(cls, dtype: TBaseDType) -> Self:
        """Return this data type for a NumPy data type.

        Raises:
            DataTypeValidationError: it is another NumPy data type.
        """
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"{dtype!r} is not the numpy type {cls._zarr_v3_name}")
        if not issubclass(cls, HasEndianness):
            return cls()
        return cls(endianness={"<": "little", ">": "big"}.get(dtype.byteorder, sys.byteorder))

    def to_native_dtype(self) -> np.dtype[Any]:
        """Return the NumPy data type of ``ml_dtypes``, in this byte order."""
        # newbyteorder() would make another object than the dtype of ml_dtypes.
        is_native = getattr(self, "endianness", sys.byteorder) == sys.byteorder
        return self._native if is_native else self._native.newbyteorder()

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        # Specification, "Extension points": a string stands for an object with only this name.
        name: object = data
        if isinstance(data, Mapping) and not data.get("configuration"):
            name = data.get("name")
        if name != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not the data type {cls._zarr_v3_name}")
        return cls()

    _from_json_v2 = _from_json_v3

    def to_json(self, zarr_format: ZarrFormat) -> Any:
        """Return the registered name for array metadata.

        Zarr v2 uses the same name, as TensorStore and Megatron-Core do. It means little endian.

        Raises:
            ValueError: big-endian bfloat16 in Zarr v2, which has no name for it.
        """
        if zarr_format == 3:
            return self._zarr_v3_name
        if getattr(self, "endianness", "little") == "big":
            raise ValueError("Zarr v2 has no name for big-endian bfloat16: use little endian")
        return {"name": self._zarr_v3_name, "object_codec_id": None}

    def _check_scalar(self, data: object) -> TypeGuard[str | float | np.generic]:
        if isinstance(data, np.generic):  # real numbers only: no complex values, dates or bytes
            return np.can_cast(data.dtype, np.float64, "same_kind")
        return isinstance(data, str | int | float) and not isinstance(data, bool)

    def cast_scalar(self, data: object) -> np.generic:
        """Convert a number, a NumPy scalar, or a string of array metadata to a scalar of this type.

        Scalars of this type keep their bits; numbers are rounded as ``ml_dtypes`` rounds them.

        Raises:
            TypeError: ``data`` is of another type.
            ValueError: the Zarr v3 specification does not allow the string for this type.
        """
        if isinstance(data, np.ndarray) and data.ndim == 0:
            data = data[()]
        if isinstance(data, str):
            data = self._from_text(data)
        if isinstance(data, np.generic) and data.dtype == self._native:
            return data
        if not self._check_scalar(data):
            raise TypeError(
                f"{data!r} of type {type(data).__name__} cannot be a {self._zarr_v3_name} value: "
                f"give {self._forms}"
            )
        number = float(data)
        if number == 0 and math.copysign(1, number) > 0:
            return self._from_bits(0)
        number = math.nan if math.isnan(number) else number  # one NaN, whatever its sign
        scalar: np.generic = self._native.type(number)
        return scalar

    def default_scalar(self) -> np.generic:
        """Return the value whose bits are all zero. It is 0, unless the type has no zero."""
        return self._from_bits(0)

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> np.generic:
        """Parse a fill value of array metadata: a number, ``"NaN"``, an infinity, or hexadecimal
        bits (Zarr v3 only).

        Raises:
            TypeError: the value is neither a number nor a string.
            ValueError: it is another string, or an infinity and the type has no infinities.
        """
        value = self._from_text(data, zarr_format) if isinstance(data, str) else data
        return self.cast_scalar(value)

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> float | str:
        """Return the form of a fill value in array metadata. It keeps every bit of the value.

        Raises:
            TypeError: see :meth:`cast_scalar`.
            ValueError: see :meth:`cast_scalar`; also for a NaN with other bits than ``"NaN"`` in
                Zarr v2, which cannot express it.
        """
        scalar = self.cast_scalar(data)
        bits, number = self._bits(scalar), float(scalar)
        if bits == self._bits(self.cast_scalar(math.nan)):
            return "NaN"
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

    def _from_bits(self, bits: int) -> np.generic:
        # Over bytes, because zarr hashes fill values and writable structured scalars have no hash.
        element = bits.to_bytes(self.item_size, sys.byteorder)
        scalar: np.generic = np.frombuffer(element, self._native)[0]
        return scalar

    def _bits(self, scalar: np.generic) -> int:
        return int(np.array([scalar], self._native).view(f"u{self.item_size}")[0])

    def _from_text(self, text: str, zarr_format: ZarrFormat = 3) -> float | np.generic:
        digits = 2 * self.item_size
        has_infinity = math.isinf(self._native.type(math.inf))
        if text == "NaN" or (text in ("Infinity", "-Infinity") and has_infinity):
            return float(text)
        # TensorStore reads "0x7f" in Zarr v2 as the number 127.
        if zarr_format == 3 and re.fullmatch(f"0x0*[0-9a-fA-F]{{1,{digits}}}", text):
            return self._from_bits(int(text, 16))
        infinities = ', "Infinity", "-Infinity"' if has_infinity else " (no infinities)"
        raise ValueError(
            f'{text!r} is not a {self._zarr_v3_name} value: expected a number, "NaN"{infinities}, '
            f'or {digits} hexadecimal digits after "0x" (not in Zarr v2)'
        )


@dataclass(frozen=True, kw_only=True)
class BFloat16(_MLFloat, HasEndianness, scalar=ml_dtypes.bfloat16):
    """``bfloat16``: 1 sign, 8 exponent, 7 mantissa bits. The other types here are single bytes."""


class Float8E4M3FN(_MLFloat, scalar=ml_dtypes.float8_e4m3fn):
    """``float8_e4m3fn``: 1 sign, 4 exponent, 3 mantissa bits; no infinities."""


class Float8E5M2(_MLFloat, scalar=ml_dtypes.float8_e5m2):
    """``float8_e5m2``: 1 sign, 5 exponent, 2 mantissa bits."""


class Float8E4M3FNUZ(_MLFloat, scalar=ml_dtypes.float8_e4m3fnuz):
    """``float8_e4m3fnuz``: 1 sign, 4 exponent, 3 mantissa bits; no infinities, no -0, one NaN."""


class Float8E5M2FNUZ(_MLFloat, scalar=ml_dtypes.float8_e5m2fnuz):
    """``float8_e5m2fnuz``: 1 sign, 5 exponent, 2 mantissa bits; no infinities, no -0, one NaN."""


class Float8E8M0FNU(_MLFloat, scalar=ml_dtypes.float8_e8m0fnu, numbers_agree=False):
    """``float8_e8m0fnu``: powers of two from 2**-127 to 2**127 and NaN; no sign, no zero.

    The fill value 0, the default of TensorStore, means the bits 0x00, as in TensorStore.
    """


class Float4E2M1FNX2(_MLFloat, scalar=[("float4_e2m1fn_x2", "u1")]):
    """``float4_e2m1fn_x2``: two 4-bit floats in a byte, as torch stores them; the first one has the
    lower bits. Values are the bytes, in a NumPy type with one field of this name.

    Fill values are hexadecimal strings, such as ``"0x00"``, in both Zarr formats.
    """

    _forms = 'the byte as a string like "0x7f"'

    @classmethod
    def _check_native_dtype(cls, dtype: TBaseDType) -> TypeGuard[np.dtype[Any]]:
        return dtype == cls._native

    def _check_scalar(self, data: object) -> TypeGuard[str | float | np.generic]:
        return False

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> str:
        """Return the form of a fill value in array metadata.

        Raises:
            TypeError: the value is neither a byte of this type nor a string.
            ValueError: it is another string.
        """
        return f"0x{self._bits(self.cast_scalar(data)):02x}"

    def _from_text(self, text: str, zarr_format: ZarrFormat = 3) -> np.generic:
        if re.fullmatch("0x[0-9a-fA-F]{2}", text):
            return self._from_bits(int(text, 16))
        raise ValueError(f"{text!r} is not a {self._zarr_v3_name} value: give {self._forms}")


DATA_TYPES: tuple[type[_MLFloat], ...] = tuple(_MLFloat.__subclasses__())


def register() -> None:
    """Register these data types with zarr. A name that is already registered does not change."""
    for data_type in DATA_TYPES:
        if data_type._zarr_v3_name not in data_type_registry.contents:
            data_type_registry.register(data_type._zarr_v3_name, data_type)


register()
