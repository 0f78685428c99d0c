"""Converts a `Problem` to JSON and back, for other processes, knowledge bases and other machines.

Input is untrusted: the reader checks every field, and raises `InputError` for any mistake.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import InputError
from ..ir.graph import Fused
from ..ir.types import MAX_RANK, DType, Layout, TensorType, Type
from .base import Array, Problem, is_value

Json: TypeAlias = Any

#: Limits of the objects that a file can describe.
MOST_INPUTS, MOST_STEPS, MOST_ATTRS, MOST_ELEMENTS, DEEPEST = 4096, 256, 256, 1 << 22, 8
_TYPE = re.compile(r"([a-z0-9_]+)\[([0-9,]*)\](?:@(nhwc|blocked[0-9]{1,4}))?")


def to_json(problem: Problem) -> dict[str, Json]:
    """The JSON of a static problem over tensors."""
    return {
        "op": problem.op,
        "inputs": [None if t is None else _type_text(t) for t in problem.inputs],
        "outputs": [None if t is None else _type_text(t) for t in problem.outputs],
        "attrs": {k: _encode(v) for k, v in sorted(problem.attrs.items())},
        "epilogue": [
            {"op": s.op, "args": list(s.args), "attrs": {k: _encode(v) for k, v in sorted(s.attrs.items())}}
            for s in problem.epilogue
        ],
        "operands": problem.operands,
        "constant": [i for i, c in enumerate(problem.constant) if c],
        "values": [[i, _encode(v)] for i, v in problem.values],
    }


def from_json(data: Json) -> Problem:
    """The problem of this JSON. Raises InputError, which names the mistake."""
    given = _dict(data, "a problem", {"op", "inputs", "outputs", "attrs", "epilogue", "operands", "constant", "values"})
    inputs = tuple(_type(t) for t in _list(given["inputs"], "inputs", MOST_INPUTS))
    outputs = tuple(_type(t) for t in _list(given["outputs"], "outputs", MOST_INPUTS))
    constants = {_index(i, len(inputs), "constant") for i in _list(given["constant"], "constant", MOST_INPUTS)}
    operands = _index(given["operands"], len(inputs) + 1, "operands")
    op = _text(given["op"], "op")
    values = []
    for pair in _list(given["values"], "values", MOST_INPUTS):
        i, encoded = _list(pair, "a value", 2, 2)
        at, array = _index(i, len(inputs), "a value"), _decode(encoded)
        type = inputs[at]
        if not isinstance(array, np.ndarray) or not is_value(op, at, array) or at not in constants:
            raise _wrong(f"input {at} has no such value")
        if not isinstance(type, TensorType) or TensorType.of(array) != type:
            raise _wrong(f"the value of input {at} is not of its type")
        values.append((at, array))
    steps = tuple(_step(s, len(inputs), n) for n, s in enumerate(_list(given["epilogue"], "epilogue", MOST_STEPS)))
    constant = tuple(i in constants for i in range(len(inputs)))
    problem = Problem(op, inputs, outputs, _attrs(given["attrs"]), steps, operands, constant, tuple(values))
    try:
        problem.key()
    except (ValueError, TypeError, OverflowError):  # long lists that are not arrays
        raise _wrong("its attributes have no text") from None
    return problem


def _type_text(type: Type) -> str:
    if not isinstance(type, TensorType) or not type.is_static:
        raise InputError(f"{type} has no static shape", where="a problem")
    return str(type)


def _wrong(what: str) -> InputError:
    return InputError(what, where="a problem")


def _dict(data: Json, what: str, keys: set[str]) -> Mapping[str, Json]:
    if not isinstance(data, dict) or set(data) != keys:
        raise _wrong(f"{what} has the members {', '.join(sorted(keys))}")
    return data


def _list(data: Json, what: str, most: int, least: int = 0) -> Sequence[Json]:
    if not isinstance(data, list) or not least <= len(data) <= most:
        raise _wrong(f"{what} is not a list of {least} to {most} elements")
    return data


def _text(data: Json, what: str) -> str:
    if not isinstance(data, str) or not 0 < len(data) <= 200:
        raise _wrong(f"{what} is not a name")
    return data


def _index(data: Json, end: int, what: str) -> int:
    if not isinstance(data, int) or isinstance(data, bool) or not 0 <= data < end:
        raise _wrong(f"{what}: {data!r} is not a number below {end}")
    return data


def _type(data: Json) -> TensorType | None:
    if data is None:
        return None
    found = _TYPE.fullmatch(data) if isinstance(data, str) and len(data) < 1000 else None
    if found is None:
        raise _wrong(f"{str(data)[:80]!r} is not a type like float32[1,64,56,56]@blocked8")
    try:
        dtype = DType(found[1])
        dims = tuple(int(d) for d in found[2].split(",")) if found[2] else ()
    except ValueError:
        raise _wrong(f"{data!r} is not a type") from None
    layout = Layout.parse(found[3]) if found[3] else Layout()
    too_flat = layout.name != "plain" and len(dims) < 2
    if len(dims) > MAX_RANK or math.prod(dims) > 1 << 62 or too_flat or (layout.name == "blocked" and not layout.block):
        raise _wrong(f"there is no tensor {data}")
    return TensorType(dtype, dims, layout)


def _step(data: Json, inputs: int, number: int) -> Fused:
    given = _dict(data, "a fused step", {"op", "args", "attrs"})
    args = []
    for arg in _list(given["args"], "arguments", MOST_INPUTS):
        if not isinstance(arg, int) or isinstance(arg, bool) or not ~number <= arg < inputs:
            raise _wrong(f"{arg!r} is no argument of fused step {number}")
        args.append(arg)
    return Fused(_text(given["op"], "op"), tuple(args), _attrs(given["attrs"]))


def _attrs(data: Json) -> dict[str, Any]:
    if not isinstance(data, dict) or len(data) > MOST_ATTRS:
        raise _wrong("attributes are a mapping")
    return {_text(k, "an attribute"): _decode(v) for k, v in data.items()}


def _encode(value: Any) -> Json:
    """The JSON of a value. Arrays, bytes, tuples and floats that are not finite become objects with one member.

    The name of the member is their kind.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            raise InputError("has an attribute of strings in an array", where="a problem")
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": [DType.of_numpy(value.dtype).value, list(value.shape), data]}
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"tuple": [_encode(v) for v in value]}
    if isinstance(value, list):
        return [_encode(v) for v in value]
    raise InputError(f"has an attribute of type {value.__class__.__name__}", where="a problem")


def _decode(data: Json, depth: int = 0) -> Any:
    if data is None or isinstance(data, bool | str | int | float):
        return data
    if depth > DEEPEST:
        raise _wrong("an attribute is nested too deeply")
    if isinstance(data, list):
        return [_decode(v, depth + 1) for v in data]
    if isinstance(data, dict) and len(data) == 1:
        ((kind, content),) = data.items()
        if kind == "float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if kind == "bytes":
            return _bytes(content)
        if kind == "tuple" and isinstance(content, list):
            return tuple(_decode(v, depth + 1) for v in content)
        if kind == "array":
            return _array(content)
    raise _wrong(f"{str(data)[:80]} is no value of an attribute")


def _bytes(data: Json) -> bytes:
    if not isinstance(data, str):
        raise _wrong("bytes are text in base64")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise _wrong("bytes are text in base64") from None


def _array(data: Json) -> Array:
    name, shape, content = _list(data, "an array", 3, 3)
    dims = [_index(d, MOST_ELEMENTS, "a dimension") for d in _list(shape, "a shape", MAX_RANK)]
    try:
        dtype = DType(name).numpy
    except ValueError:
        raise _wrong(f"{name!r} is no element type") from None
    raw = _bytes(content)
    if dtype.hasobject or dtype.itemsize * math.prod(dims) != len(raw):
        raise _wrong("an array's bytes do not fit its shape")
    return np.frombuffer(raw, dtype).reshape(dims)
