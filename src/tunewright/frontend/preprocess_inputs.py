"""Conversion of pictures from the form of a camera or OpenCV to the form that a network was trained on.

The conversion becomes nodes in front of the input, and so it is compiled, fused and tuned with the model. The caller's
bytes go to the device unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InputError
from ..ir.graph import Graph, Value
from ..ir.types import Dim, DType, TensorType

#: names of element types that are accepted beside numpy's
DTYPES = {"u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16", "f16": "float16", "f32": "float32"}
LAYOUTS = ("NHWC", "NCHW", "HWC", "CHW")
MODES = ("linear", "nearest", "cubic")


@dataclass(frozen=True)
class Preprocess:
    """The form in which an input comes, and the conversion before the network.

    The steps, in this order: transpose the axes to the network's order, reverse the channels, resize, then ``(x - mean)
    / scale``.

    >>> frames = Preprocess(dtype="u8", layout="HWC", reverse_channels=True, mean=(123.7, 116.3, 103.5), scale=57.4)
    >>> compiled = core.compile_model("model.onnx", preprocess={"x": frames})
    >>> compiled({"x": cv2.imread("photo.jpg")})
    """

    #: element type: ``u8``, ``f32`` and so on, or numpy's name
    dtype: Any = "u8"
    #: order of the axes: NHWC or NCHW; HWC or CHW is a single picture without a batch axis
    layout: str = "NHWC"
    #: one number for all channels, or one for each in the network's order of channels
    mean: float | Sequence[float] | None = None
    scale: float | Sequence[float] | None = None
    #: for a network that takes RGB when the caller has BGR, or the other way round
    reverse_channels: bool = False
    #: how to resize pictures to the network's size: linear, nearest or cubic
    resize: str | None = None
    #: height and width of the pictures before resizing; None: any
    size: tuple[int, int] | None = None
    #: the network's order of axes: NCHW or NHWC
    model_layout: str = "NCHW"

    @staticmethod
    def parse(text: str) -> Preprocess:
        """Parse the form that the command line uses.

        >>> Preprocess.parse("u8,hwc,reverse,resize=linear,size=480x640,mean=123.7:116.3:103.5,scale=57.4")
        """
        found: dict[str, Any] = {}
        for word in text.split(","):
            field = _parse_part(word)
            if field is None:
                hint = "for example u8,nhwc,reverse,mean=123.7:116.3:103.5,scale=58.4:57.1:57.4 or u8,hwc,resize=linear"
                raise InputError(f"{word!r} is not a part of a preprocessing", where="--preprocess", hint=hint)
            found[field[0]] = field[1]
        return Preprocess(**found)


def _parse_part(word: str) -> tuple[str, Any] | None:
    """Return the field that a part of the text sets, and its value; None for an unknown part."""
    key, equals, value = (part.strip() for part in word.partition("="))
    if key.lower() == "resize":
        return "resize", value.lower() or "linear"
    return _parse_value(key.lower(), value, word) if equals else _parse_flag(key)


def _parse_flag(key: str) -> tuple[str, Any] | None:
    if key.lower() in {*DTYPES, *DTYPES.values()}:
        return "dtype", key.lower()
    if key.upper() in LAYOUTS:
        return "layout", key.upper()
    return ("reverse_channels", True) if key.lower() in ("reverse", "reverse_channels") else None


def _parse_value(key: str, value: str, word: str) -> tuple[str, Any] | None:
    if key in ("mean", "scale"):
        return key, [_number(v, word) for v in value.split(":")]
    if key == "size":
        return key, tuple(_whole(v, word) for v in value.lower().split("x"))
    return (key, value.upper()) if key == "model_layout" else None


def preprocessed(graph: Graph, given: Mapping[str, Preprocess]) -> Graph:
    """Return a copy of a graph whose inputs come as ``given`` says. Types behind the inputs are reset."""
    graph = graph.clone()
    inputs = {v.name: v for v in graph.inputs}
    for name, how in given.items():
        if name not in inputs:
            raise InputError(f"there is no input {name!r}", hint=f"the inputs are {', '.join(inputs)}")
        if not isinstance(how, Preprocess):
            raise InputError(f"{how!r} is not a Preprocess", where=f"input {name!r}")
        _Steps(graph, inputs[name], how).build()
    graph.sort()
    for node in graph.nodes:
        for value in node.outputs:
            value.type = None
    return graph


class _Steps:
    """Builds the nodes between an input as it comes and the network."""

    def __init__(self, graph: Graph, value: Value, how: Preprocess) -> None:
        self.graph, self.value, self.how = graph, value, how
        self.where = f"input {value.name!r}"
        self.layout, self.target = str(how.layout).upper(), str(how.model_layout).upper()
        if self.layout not in LAYOUTS:
            raise self.error(f"layout {how.layout!r} is not one of {', '.join(LAYOUTS)}")
        if self.target not in LAYOUTS[:2]:
            raise self.error(f"model_layout {how.model_layout!r} is not one of {', '.join(LAYOUTS[:2])}")
        if how.resize is not None and how.resize not in MODES:
            raise self.error(f"resize {how.resize!r} is not one of {', '.join(MODES)}")
        type = value.type
        if not isinstance(type, TensorType) or type.shape is None or len(type.shape) != 4:
            raise self.error(f"{type} is not a batch of pictures")
        self.type, self.dtype = type, self._dtype()
        #: sizes by axis, as the network takes them
        self.sizes: dict[str, Dim] = dict(zip(self.target, type.shape, strict=True))
        if "N" not in self.layout and self.sizes["N"] not in (1, None) and not isinstance(self.sizes["N"], str):
            raise self.error(f"the model takes a batch of {self.sizes['N']}, not one of 1", "set layout NHWC or NCHW")

    def build(self) -> None:
        how, last = self.how, self.value
        readers = list(last.uses)
        is_output = self.graph.is_output(last)
        # Compute in float32: integers cannot hold the results, and half precision has too few digits.
        arithmetic = how.resize is not None or how.mean is not None or how.scale is not None
        if arithmetic and not self.type.dtype.is_float:
            raise self.error(f"mean, scale and resize are for networks of floats, and this one takes {self.type.dtype}")
        last.type = TensorType(self.dtype, self._shape())
        if "N" not in self.layout:
            last = self.node("Unsqueeze", last, self.graph.constant(np.array([0], np.int64)))
        batched = self.layout if "N" in self.layout else f"N{self.layout}"
        if batched != self.target:
            last = self.node("Transpose", last, perm=tuple(batched.index(axis) for axis in self.target))
        if how.reverse_channels:
            order = np.arange(self._channels("reverse_channels"))[::-1].astype(np.int64)
            last = self.node("Gather", last, self.graph.constant(order), axis=self.target.index("C"))
        if arithmetic:
            last = self.cast(last, self.dtype, DType.FLOAT32)
        if how.resize is not None:
            last = self._resized(last)
        if how.mean is not None:
            last = self.node("Sub", last, self._constant("mean", how.mean))
        if how.scale is not None:
            last = self.node("Div", last, self._constant("scale", how.scale))
        last = self.cast(last, DType.FLOAT32 if arithmetic else self.dtype, self.type.dtype)
        for node, i in readers:
            self.graph.set_input(node, i, last)
        if is_output:
            self.graph.outputs = [last if v is self.value else v for v in self.graph.outputs]

    def node(self, op: str, *inputs: Value | None, **attrs: Any) -> Value:
        return self.graph.add(op, inputs, attrs, name=self.graph.fresh(f"{self.value.name}/{op.lower()}")).output

    def cast(self, value: Value, have: DType, want: DType) -> Value:
        return value if have is want else self.node("Cast", value, to=want.onnx_code)

    def _dtype(self) -> DType:
        given = self.how.dtype
        try:
            found = DType.of_numpy(np.dtype(DTYPES.get(given.lower(), given) if isinstance(given, str) else given))
        except (TypeError, KeyError, ValueError):
            raise self.error(f"dtype {given!r} is unknown", f"for example {', '.join(DTYPES)}") from None
        if not (found.is_float or found.is_integer):
            raise self.error(f"dtype {given!r} is not a number type")
        return found

    def _shape(self) -> tuple[Dim, ...]:
        sizes = dict(self.sizes)
        if self.how.resize is not None:
            for axis in "HW":
                if not isinstance(sizes[axis], int):
                    raise self.error(
                        "resize needs a fixed input size of the network", "set it first with Model.reshape"
                    )
            sizes |= {"H": f"{self.value.name}_height", "W": f"{self.value.name}_width"}
        if self.how.size is not None:
            if self.how.resize is None:
                raise self.error("size has no effect without resize", "give resize=, or Model.reshape")
            if len(self.how.size) != 2 or any(not isinstance(n, int) or n < 1 for n in self.how.size):
                raise self.error(f"size {self.how.size!r} is not a height and a width")
            sizes |= dict(zip("HW", self.how.size, strict=True))
        return tuple(sizes[axis] for axis in self.layout)

    def _resized(self, value: Value) -> Value:
        """Resize like OpenCV's INTER_LINEAR, with pixel centres at halves, but keep float results."""
        assert self.how.resize is not None
        sizes = np.array([self.sizes["H"], self.sizes["W"]], np.int64)
        axes = (self.target.index("H"), self.target.index("W"))
        attrs: dict[str, Any] = {"mode": self.how.resize, "coordinate_transformation_mode": "half_pixel", "axes": axes}
        if self.how.resize == "nearest":
            attrs |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        elif self.how.resize == "cubic":
            attrs["cubic_coeff_a"] = -0.75
        return self.node("Resize", value, None, None, self.graph.constant(sizes), **attrs)

    def _channels(self, what: str) -> int:
        count = self.sizes["C"]
        if not isinstance(count, int):
            raise self.error(f"{what} needs a fixed number of channels", "set it with Model.reshape")
        return count

    def _constant(self, what: str, given: float | Sequence[float]) -> Value:
        try:
            numbers = np.asarray(given, np.float32).reshape(-1)
        except (TypeError, ValueError):
            raise self.error(f"{what} {given!r} is neither a number nor a list of numbers") from None
        if not np.isfinite(numbers).all() or (what == "scale" and not numbers.all()):
            raise self.error(f"{what} {given!r} must be finite, and a scale must not be 0")
        if numbers.size != 1 and numbers.size != self._channels(what):
            raise self.error(f"{what} has {numbers.size} numbers for {self.sizes['C']} channels")
        return self.graph.constant(numbers.reshape([-1 if axis == "C" else 1 for axis in self.target]))

    def error(self, what: str, hint: str = "") -> InputError:
        return InputError(what, where=self.where, hint=hint)


def _number(text: str, word: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{text!r} in {word!r} is not a number", where="--preprocess") from None


def _whole(text: str, word: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{text!r} in {word!r} is not a whole number", where="--preprocess") from None
