"""TensorProto -> numpy. Lengths are checked before memory is allocated; external data stays in the model's folder."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from ..errors import LimitError, ModelError
from ..ir.types import MAX_RANK, DType
from ..settings import Settings
from .external import ExternalFiles
from .protobuf_messages import onnx

Array: TypeAlias = np.ndarray[Any, Any]

#: bits per element of types that are packed into bytes, with the first element in the lowest bits
_PACKED = {
    **dict.fromkeys((DType.UINT2, DType.INT2), 2),
    **dict.fromkeys((DType.UINT4, DType.INT4, DType.FLOAT4E2M1), 4),
    **dict.fromkeys((DType.FLOAT6E2M3, DType.FLOAT6E3M2), 6),
}
#: the typed field that holds a tensor's elements, and the type of its entries; int32_data for all other types
_FIELDS: dict[DType, tuple[str, Any]] = {
    DType.FLOAT32: ("float_data", np.float32),
    DType.COMPLEX64: ("float_data", np.float32),
    DType.FLOAT64: ("double_data", np.float64),
    DType.COMPLEX128: ("double_data", np.float64),
    DType.INT64: ("int64_data", np.int64),
    DType.UINT32: ("uint64_data", np.uint64),
    DType.UINT64: ("uint64_data", np.uint64),
}


def declared_bytes(tensor: onnx.TensorProto) -> int:
    """Return the bytes that a tensor's shape declares, before any check; 0 if the type is unknown."""
    try:
        itemsize = DType.of_onnx(tensor.data_type).itemsize
    except KeyError:
        return 0
    return max(0, int(math.prod(tensor.dims))) * itemsize


def to_array(
    tensor: onnx.TensorProto, files: ExternalFiles, settings: Settings, where: str, raw: Array | None = None
) -> Array:
    """Return the tensor as a read-only array. Raises ModelError that names the tensor if anything about it is wrong.

    ``raw``: its raw_data, if that was read separately.
    """
    try:
        dtype = DType.of_onnx(tensor.data_type)
    except KeyError:
        raise ModelError(f"element type {tensor.data_type} is unknown", where=where) from None
    dims = tuple(tensor.dims)
    count = _count(dims, dtype.itemsize, settings, where)
    if tensor.HasField("segment"):
        raise ModelError("is split into segments, which is not supported", where=where)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        flat = _from_bytes(_external(tensor, _raw_bytes(dtype, count, where), files, where), dtype, count)
    elif raw is not None or tensor.HasField("raw_data"):
        data = np.frombuffer(tensor.raw_data, np.uint8) if raw is None else raw
        _fits(data.size, _raw_bytes(dtype, count, where), "bytes of raw_data", dims, where)
        flat = _from_bytes(data, dtype, count)
    elif dtype is DType.STRING:
        _fits(len(tensor.string_data), count, "strings", dims, where)
        flat = _strings(tensor, where)
    else:
        flat = _from_field(tensor, dtype, count, dims, where)
    array = flat.reshape(dims)
    array.flags.writeable = False
    return array


def sparse_to_array(sparse: onnx.SparseTensorProto, files: ExternalFiles, settings: Settings, where: str) -> Array:
    """Convert a sparse tensor to a dense array."""
    values = to_array(sparse.values, files, settings, f"{where}, values")
    indices = to_array(sparse.indices, files, settings, f"{where}, indices")
    dims = tuple(sparse.dims)
    size = _count(dims, values.itemsize, settings, where)
    if values.ndim != 1 or indices.dtype != np.int64 or indices.shape not in ((len(values),), (len(values), len(dims))):
        raise ModelError(
            f"rank {len(dims)}, values {list(values.shape)} and indices {list(indices.shape)} do not fit together",
            where=where,
        )
    if indices.ndim == 2:
        if indices.size and (np.any(indices < 0) or np.any(indices >= np.asarray(dims))):
            raise ModelError(f"an index lies outside of shape {list(dims)}", where=where)
        indices = np.ravel_multi_index(tuple(indices.T), dims) if indices.size else indices.reshape(-1)
    elif indices.size and not (indices.min() >= 0 and indices.max() < size):
        raise ModelError(f"an index lies outside of shape {list(dims)}", where=where)
    dense = np.full(size, "", object) if values.dtype == object else np.zeros(size, values.dtype)
    dense[indices] = values
    return dense.reshape(dims)


def _count(dims: tuple[int, ...], itemsize: int, settings: Settings, where: str) -> int:
    """Return the number of elements of a shape. Raises if the shape is not acceptable."""
    if any(d < 0 for d in dims):
        raise ModelError(f"has a negative dimension: {_shape(dims)}", where=where)
    if len(dims) > MAX_RANK:
        raise LimitError(f"has {len(dims)} dimensions", where=where, hint=f"no more than {MAX_RANK} are supported")
    count = math.prod(dims)
    # numpy multiplies the other dimensions even if one is zero
    if math.prod(max(1, d) for d in dims) * itemsize > settings.max_tensor_bytes:
        raise LimitError(
            f"has shape {_shape(dims)}, {count * itemsize:,} bytes",
            where=where,
            hint=f"the limit is MAX_TENSOR_BYTES = {settings.max_tensor_bytes:,}",
        )
    return count


def _shape(dims: tuple[int, ...]) -> str:
    return str(list(dims)) if len(dims) <= 16 else f"[{', '.join(map(str, dims[:16]))}, ... {len(dims)} dimensions]"


def _fits(got: int, want: int, what: str, dims: tuple[int, ...], where: str) -> None:
    if got != want:
        raise ModelError(f"has {got:,} {what}, but its shape {_shape(dims)} needs {want:,}", where=where)


def _raw_bytes(dtype: DType, count: int, where: str) -> int:
    """Return the bytes that ``count`` elements take in a file."""
    if dtype is DType.STRING:
        raise ModelError("strings cannot be stored in raw or external data", where=where)
    return -(-count * _PACKED[dtype] // 8) if dtype in _PACKED else count * dtype.itemsize


def _external(tensor: onnx.TensorProto, nbytes: int, files: ExternalFiles, where: str) -> Array:
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if not isinstance(location, str):
        raise ModelError("the name of its external file is not text", where=where)
    offset, length = (_number(entries, key, default, where) for key, default in (("offset", 0), ("length", nbytes)))
    _fits(length, nbytes, "bytes of external data", tuple(tensor.dims), where)
    return files.read(location, offset, nbytes, where)


def _number(entries: dict[str, str], key: str, default: int, where: str) -> int:
    text = entries.get(key)
    if text is None:
        return default
    # int() alone would accept signs, blanks and underscores, and take quadratic time for a million digits
    if not isinstance(text, str) or len(text) > 19 or not (text.isascii() and text.isdigit()):
        raise ModelError(f"{key} of its external data is not a number of bytes: {str(text)[:40]!r}", where=where)
    return int(text)


def _from_bytes(data: Array, dtype: DType, count: int) -> Array:
    """Convert the bytes of a file to elements: little endian, narrow types packed."""
    bits = _PACKED.get(dtype)
    if bits is not None:
        if bits == 6:
            table = np.unpackbits(data, bitorder="little")[: count * 6].reshape(count, 6)
            codes = np.packbits(table, axis=1, bitorder="little").reshape(-1)
        else:
            codes = ((data[:, None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8((1 << bits) - 1)).reshape(-1)[
                :count
            ]
        return codes.view(dtype.numpy)
    if dtype is DType.BOOL:
        return np.not_equal(data, 0)  # a byte may hold any value, an element only 0 or 1
    native = dtype.numpy.newbyteorder("<") if dtype.numpy.kind in "iufc" else dtype.numpy
    if data.ctypes.data % max(1, dtype.itemsize):
        data = data.copy()  # kernels rely on alignment
    return data.view(native).astype(dtype.numpy, copy=False)


def _from_field(tensor: onnx.TensorProto, dtype: DType, count: int, dims: tuple[int, ...], where: str) -> Array:
    """Read the elements from the typed field that belongs to the type."""
    field, entry = _FIELDS.get(dtype, ("int32_data", np.int32))
    entries = getattr(tensor, field)
    want = count * 2 if dtype in (DType.COMPLEX64, DType.COMPLEX128) else count
    packed = _PACKED.get(dtype) in (2, 4)  # an entry holds one byte; for 6-bit types it holds one element
    if packed:
        want = _raw_bytes(dtype, count, where)
    _fits(len(entries), want, f"entries in {field}", dims, where)
    data = np.array(entries, entry)
    if packed:
        return _from_bytes(data.astype(np.uint8), dtype, count)
    if dtype in _PACKED:
        return (data.astype(np.uint8) & np.uint8(0x3F)).view(dtype.numpy)
    if dtype in (DType.COMPLEX64, DType.COMPLEX128):
        return data.view(dtype.numpy)
    if field == "int32_data" and dtype.is_float:  # 8- and 16-bit floats are stored as their bit patterns
        return data.astype(np.uint16 if dtype.itemsize == 2 else np.uint8).view(dtype.numpy)
    return data.astype(dtype.numpy, copy=False)


def _strings(tensor: onnx.TensorProto, where: str) -> Array:
    try:
        texts = [s.decode() for s in tensor.string_data]
    except UnicodeDecodeError as error:
        raise ModelError(f"a string is not UTF-8: {error}", where=where) from None
    array = np.empty(len(texts), object)
    array[:] = texts
    return array
