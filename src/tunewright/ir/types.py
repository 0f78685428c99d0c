"""Types of values: `DType`, `Layout`, `TensorType`, `SequenceType`, `OptionalType`. Frozen, hashable, printable."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import ml_dtypes
import numpy as np

from .symbolic import WHOLE, SymArray, SymInt, hint, same

#: A dimension: a number, a name (equal names mean equal sizes), or None (unknown). While a plan is made for a class of
#: shapes, a number may be a `SymInt`.
Dim: TypeAlias = int | str | None
Shape: TypeAlias = tuple[Dim, ...]
#: largest rank that every supported numpy allows
MAX_RANK = 32


class DType(enum.Enum):
    """Element types. `onnx_code` is ONNX's number; `numpy` is the dtype of an element (sub-byte types unpacked)."""

    FLOAT32 = "float32"
    UINT8 = "uint8"
    INT8 = "int8"
    UINT16 = "uint16"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    STRING = "string"
    BOOL = "bool"
    FLOAT16 = "float16"
    FLOAT64 = "float64"
    UINT32 = "uint32"
    UINT64 = "uint64"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    BFLOAT16 = "bfloat16"
    FLOAT8E4M3FN = "float8_e4m3fn"
    FLOAT8E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8E5M2 = "float8_e5m2"
    FLOAT8E5M2FNUZ = "float8_e5m2fnuz"
    UINT4 = "uint4"
    INT4 = "int4"
    FLOAT4E2M1 = "float4_e2m1fn"
    FLOAT8E8M0 = "float8_e8m0fnu"
    UINT2 = "uint2"
    INT2 = "int2"
    FLOAT6E2M3 = "float6_e2m3fn"
    FLOAT6E3M2 = "float6_e3m2fn"

    @property
    def numpy(self) -> np.dtype:
        return _NUMPY[self]

    @property
    def onnx_code(self) -> int:
        """The number in onnx.TensorProto.DataType (the members above are in that order)."""
        return _CODES[self]

    @property
    def itemsize(self) -> int:
        return _NUMPY[self].itemsize

    @property
    def is_float(self) -> bool:
        return "float" in self.value

    @property
    def is_integer(self) -> bool:
        return "int" in self.value

    @staticmethod
    def of_onnx(code: int) -> DType:
        """Return the type with this ONNX number. Raises KeyError for an unknown number."""
        return _OF_CODE[code]

    @staticmethod
    def of_numpy(dtype: np.dtype) -> DType:
        """Return the type of a numpy dtype. Raises KeyError if ONNX has no such type."""
        if dtype.kind in "OUST":
            return DType.STRING
        found: DType = _OF_NUMPY[dtype]
        return found

    def __str__(self) -> str:
        return self.value


_CODES = {dtype: code for code, dtype in enumerate(DType, start=1)}
_OF_CODE = {code: dtype for dtype, code in _CODES.items()}


def _numpy_dtype(dtype: DType) -> np.dtype:
    if dtype is DType.STRING:
        return np.dtype(object)
    try:
        found: np.dtype = np.dtype(getattr(ml_dtypes, dtype.value, dtype.value))
        return found
    except TypeError:  # an older ml_dtypes does not know the narrowest types; the rest works without them
        return np.dtype(np.void)


_NUMPY = {d: _numpy_dtype(d) for d in DType}
_OF_NUMPY = {n: d for d, n in _NUMPY.items() if n.kind not in "O" and n != np.dtype(np.void)}


@dataclass(frozen=True)
class Layout:
    """How a tensor's logical dimensions are arranged in memory. Shapes in a `TensorType` are always logical (NC...)."""

    name: str = "plain"
    block: int = 0  # channels per block, for blocked layouts

    def physical(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the array that holds a tensor of these logical dimensions; the last block is padded."""
        if self.name == "nhwc":
            return (dims[0], *dims[2:], dims[1])
        if self.name == "blocked":
            return (dims[0], -(-dims[1] // self.block), *dims[2:], self.block)
        return dims

    @staticmethod
    def parse(text: str) -> Layout:
        """Parse what `str` of a layout prints."""
        name = text.rstrip("0123456789")
        return Layout(name, int(text[len(name) :] or 0))

    def __str__(self) -> str:
        return f"{self.name}{self.block or ''}"


PLAIN = Layout()
NHWC = Layout("nhwc")


def blocked(block: int) -> Layout:
    """Return the layout NC/b HW b: channels in blocks of ``block``, with the block innermost."""
    return Layout("blocked", block)


@dataclass(frozen=True)
class TensorType:
    """A tensor's element type, logical shape (None: not even the rank is known) and layout."""

    dtype: DType
    shape: Shape | None = None
    layout: Layout = PLAIN
    #: Whether every dimension is a number. Stored because it is asked very often.
    is_static: bool = field(init=False, repr=False, compare=False)
    #: whether the shape contains a `SymInt`
    is_symbolic: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape = self.shape or ()
        object.__setattr__(self, "is_static", self.shape is not None and all(isinstance(d, WHOLE) for d in shape))
        object.__setattr__(self, "is_symbolic", any(isinstance(d, SymInt) for d in shape))

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of a static type."""
        assert self.is_static, self
        return cast("tuple[int, ...]", self.shape)

    @property
    def size(self) -> int:
        """Number of elements of a static type."""
        return math.prod(self.dims)

    @property
    def physical(self) -> tuple[int, ...]:
        """The shape of the array that holds a tensor of this static type, in the order of the layout."""
        return self.layout.physical(self.dims)

    @property
    def nbytes(self) -> int:
        return math.prod(self.physical) * self.dtype.itemsize

    def with_shape(self, shape: Shape | None) -> TensorType:
        return TensorType(self.dtype, shape, self.layout)

    def with_layout(self, layout: Layout) -> TensorType:
        return TensorType(self.dtype, self.shape, layout)

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.shape, self.layout)

    @property
    def at_hand(self) -> TensorType:
        """The type with the sizes of the current example in place of symbols. It adds no guard."""
        if self.shape is None or not self.is_symbolic:
            return self
        return TensorType(self.dtype, tuple(hint(d) for d in self.shape), self.layout)

    def is_same(self, other: object) -> bool:
        """Whether both types are equal for every size of a class of shapes. A comparison with == narrows the class."""
        if not isinstance(other, TensorType) or (self.dtype, self.layout) != (other.dtype, other.layout):
            return False
        if self.shape is None or other.shape is None:
            return self.shape is other.shape
        return same(self.shape, other.shape)

    @staticmethod
    def of(array: np.ndarray) -> TensorType:
        if isinstance(array, SymArray):
            return TensorType(DType.INT64, tuple(array.shape))
        return TensorType(DType.of_numpy(array.dtype), tuple(array.shape))

    def __str__(self) -> str:
        shape = "[*]" if self.shape is None else "[" + ",".join("?" if d is None else str(d) for d in self.shape) + "]"
        return f"{self.dtype}{shape}" + ("" if self.layout == PLAIN else f"@{self.layout}")

    def __repr__(self) -> str:
        return f"TensorType({self})"  # users print a model's inputs


@dataclass(frozen=True)
class SequenceType:
    """A list of values of one type."""

    elem: Type | None = None
    is_static = False

    def __str__(self) -> str:
        return f"seq({self.elem or '?'})"


@dataclass(frozen=True)
class OptionalType:
    """A value or nothing (None)."""

    elem: Type | None = None
    is_static = False

    def __str__(self) -> str:
        return f"optional({self.elem or '?'})"


@dataclass(frozen=True)
class MapType:
    """A dictionary, or (in a sequence) a list of them; only ai.onnx.ml has it."""

    key: DType
    value: Type | None = None
    is_static = False

    def __str__(self) -> str:
        return f"map({self.key}, {self.value or '?'})"


Type: TypeAlias = TensorType | SequenceType | OptionalType | MapType


def signature(inputs: Mapping[str, Type | None], outputs: Mapping[str, Type | None]) -> str:
    """Describe inputs and outputs for display: x: float32[n,3] -> y: float32[n,2]."""
    left, right = (", ".join(f"{name}: {type or '?'}" for name, type in side.items()) for side in (inputs, outputs))
    return f"{left} -> {right}"


def merge_shapes(a: Shape | None, b: Shape | None) -> Shape | None:
    """Combine two descriptions of a shape. Numbers override names, names override None. Conflict: ValueError."""
    if a is None or b is None:
        return b if a is None else a
    if len(a) != len(b):
        raise ValueError(f"rank {len(a)} against {len(b)}")
    merged: list[Dim] = []
    for x, y in zip(a, b, strict=True):
        if isinstance(x, WHOLE) and isinstance(y, WHOLE) and x != y:
            raise ValueError(f"{x} against {y}")
        merged.append(x if isinstance(x, WHOLE) or y is None else y if isinstance(y, WHOLE) or x is None else x)
    return tuple(merged)
