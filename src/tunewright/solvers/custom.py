"""A user's kernels in OpenCL C: CONFIG_FILE names XML files that describe how to launch them.

The files are those of OpenVINO's custom layers for GPUs; docs/custom-kernels.md lists the supported parts. A layer's
kernel has priority over all others wherever it accepts the tensors. It is not tuned: its author has chosen its
parameters.
"""

from __future__ import annotations

import ast
import json
import logging
import operator
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices import build_options
from ..devices.base import Device, Target
from ..devices.c_device import CDevice
from ..devices.c_kernel import CKernel, In, Out, Text
from ..devices.native import opencl_c
from ..errors import ExecutionError, SettingsError
from ..ir.types import DType, TensorType
from ..settings import Settings, write_dump
from .base import Config, Kernel, Problem, Solver, tensor, why_not_type

if TYPE_CHECKING:
    from xml.etree import ElementTree

LOG = logging.getLogger("tunewright")

_TYPES = {
    DType.FLOAT32: "float", DType.FLOAT64: "double", DType.INT32: "int", DType.INT64: "long", DType.UINT32: "uint",
    DType.UINT64: "ulong", DType.INT16: "short", DType.UINT16: "ushort", DType.INT8: "char", DType.UINT8: "uchar",
    DType.BOOL: "uchar",
}  # fmt: skip
_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
#: the axes by their names in formulas; the size of a missing axis is 1
_AXES = {4: "BFYX", 5: "BFZYX"}


@dataclass(frozen=True)
class CustomLayer:
    """The description of one operation in a file."""

    name: str
    entry: str
    #: the text of its sources
    text: str
    #: macro -> (attribute, default, is a list)
    defines: tuple[tuple[str, str, str, bool], ...]
    #: argument -> (is an output, number)
    tensors: tuple[tuple[int, bool, int], ...]
    worksizes: tuple[str, ...]
    local: tuple[str, ...]
    #: (is an output, number) of the tensor whose dimensions the formulas use
    over: tuple[bool, int]


def read(files: str) -> dict[str, CustomLayer]:
    """The layers of CONFIG_FILE by operation. Raises SettingsError where a file cannot be used."""
    from xml.etree import ElementTree

    found: dict[str, CustomLayer] = {}
    for name in shlex.split(files):
        path = Path(name)
        try:
            # A file without a root element may contain several layers.
            root = ElementTree.fromstring(f"<all>{_without_head(path.read_text(encoding='utf-8'))}</all>")
            for element in root.iter("CustomLayer"):
                layer = _layer(element, path.parent)
                found[layer.name] = layer
        except (OSError, ElementTree.ParseError, ValueError) as error:
            raise SettingsError(f"{path} cannot be used: {error}", where="CONFIG_FILE") from None
    return found


def _without_head(text: str) -> str:
    """An XML file without its declaration, so that the content can become part of another element."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("it defines entities")
    return text.partition("?>")[2] if text.lstrip().startswith("<?xml") else text


def _layer(element: ElementTree.Element, folder: Path) -> CustomLayer:
    name = element.get("name")
    kernel, sizes = element.find("Kernel"), element.find("WorkSizes")
    if not name or kernel is None or not kernel.get("entry"):
        raise ValueError("a CustomLayer needs a name, and a Kernel with an entry")
    if element.get("type", "SimpleGPU") != "SimpleGPU":
        raise ValueError(f"{name}: type {element.get('type')!r} is not SimpleGPU")
    if element.find("Buffers/Data") is not None:
        raise ValueError(f"{name}: Data buffers are not supported; weights of ONNX are inputs: use a Tensor")
    sources = [folder / (source.get("filename") or "") for source in kernel.findall("Source")]
    if not sources:
        raise ValueError(f"{name}: its Kernel has no Source")
    options = [option for e in element.iter("CompilerOptions") for option in e.get("options", "").split()]
    unused = [option for option in options if not option.startswith("-D")]
    if unused:
        LOG.warning("CONFIG_FILE: %s: the options %s are not used", name, " ".join(unused))
    head = "".join(f"#define {' '.join(o.removeprefix('-D').split('=', 1))}\n" for o in options if o not in unused)
    defines = tuple(
        (e.get("name", ""), e.get("param", ""), e.get("default", ""), e.get("type", "").endswith("[]"))
        for e in kernel.findall("Define")
    )
    tensors = tuple(
        (int(e.get("arg-index", -1)), _kind(e.get("type", "")), int(e.get("port-index", 0)))
        for e in element.iterfind("Buffers/Tensor")
        if _format(e.get("format", "BFYX"))
    )
    if sorted(at for at, _, _ in tensors) != list(range(len(tensors))):
        raise ValueError(f"{name}: its Tensors must have the arg-indices 0 to {len(tensors) - 1}")
    kind, _, number = (sizes.get("dim", "output") if sizes is not None else "output").partition(",")
    return CustomLayer(
        name, kernel.get("entry", ""), head + "\n".join(map(_source, sources)), defines,
        tensors, _list(sizes, "global") or ("X", "Y", "B*F"), _list(sizes, "local"), (_kind(kind), int(number or 0)),
    )  # fmt: skip


def _source(path: Path) -> str:
    """A file's text, with its name in front for messages of the compiler."""
    return f"#line 1 {json.dumps(path.name, ensure_ascii=False)}\n{path.read_text(encoding='utf-8')}"


def _kind(text: str) -> bool:
    """Whether the text names an output. Raises ValueError for other words than input and output."""
    if text not in ("input", "output"):
        raise ValueError(f"{text!r} is not input or output")
    return text == "output"


def _format(text: str) -> bool:
    if text.upper() not in ("BFYX", "ANY"):
        raise ValueError(f"format {text!r} is not BFYX or ANY")
    return True


def _list(element: ElementTree.Element | None, name: str) -> tuple[str, ...]:
    text = "" if element is None else element.get(name, "")
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def evaluate(formula: str, sizes: Mapping[str, int]) -> int:
    """The value of a formula such as ``B*F``: whole numbers, names, + - * / % and brackets."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and node.id.upper() in sizes:
            return sizes[node.id.upper()]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise SettingsError(f"formula {formula!r} may use integers, + - * / %, {', '.join(sizes)}", where="CONFIG_FILE")

    try:
        return value(ast.parse(formula, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError) as error:
        raise SettingsError(f"formula {formula!r} cannot be read: {error}", where="CONFIG_FILE") from None


class CustomSolver(Solver):
    """The solver of one layer of CONFIG_FILE."""

    language = "c"
    rank = -1

    def __init__(self, layer: CustomLayer, settings: Settings) -> None:
        self.layer, self.settings = layer, settings
        self.id, self.ops = f"custom.{layer.name}", frozenset({layer.name})

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if problem.op != self.layer.name:
            return f"solves {self.layer.name}"
        if problem.epilogue:
            return "takes nothing fused"
        if not problem.is_static:
            return "shapes are not known"
        for type in [*problem.inputs, *problem.outputs]:
            reason = why_not_type(type, frozenset(_TYPES), frozenset({"plain"}))
            if reason is not None:
                return reason
            if type is not None and len(tensor(type).dims) > max(_AXES):
                return f"{type} has more than {max(_AXES)} dimensions"
        for _, output, number in self.layer.tensors:
            there = problem.outputs if output else problem.inputs
            if number >= len(there) or there[number] is None:
                return f"there is no {'output' if output else 'input'} {number}"
        return None

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        """The layer's text, with macros for its tensors and attributes in front."""
        layer, grid, local = self.layer, self.grid(problem), self.local(problem)
        lines = [f"#define NUM_INPUTS {len(problem.inputs)}"]
        lines += _array("GLOBAL_WORKSIZE", grid) + (_array("LOCAL_WORKSIZE", local) if local else [])
        for _, output, number in layer.tensors:
            lines += _about(f"{'OUTPUT' if output else 'INPUT'}{number}", _type(problem, output, number))
        for name, attribute, default, several in layer.defines:
            value = problem.attrs.get(attribute, default)
            if several or isinstance(value, tuple | list | np.ndarray):
                parts = default.split(",") if value is default else np.asarray(value).reshape(-1).tolist()
                lines += _array(name, parts, "float" if any(isinstance(p, float) for p in parts) else "int")
            else:
                lines.append(f"#define {name} {value}")
        return "\n".join([*lines, "", layer.text])

    def grid(self, problem: Problem) -> tuple[int, ...]:
        """The number of work-items of a launch in each dimension."""
        return self._sizes(self.layer.worksizes, problem)

    def local(self, problem: Problem) -> tuple[int, ...]:
        """The sizes of a work-group; empty: the runtime may choose."""
        return self._sizes(self.layer.local, problem)

    def _sizes(self, formulas: Sequence[str], problem: Problem) -> tuple[int, ...]:
        type = _type(problem, *self.layer.over)
        sizes = {"B": 1, "F": 1, "Z": 1, "Y": 1, "X": 1} | dict(zip(_axes(type), _dims(type), strict=True))
        found = tuple(evaluate(formula, sizes) for formula in formulas)
        if len(found) > 3 or min(found, default=0) < 0:
            raise SettingsError(f"{self.layer.name}: {list(found)} are no work sizes", where="CONFIG_FILE")
        return found

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        assert isinstance(device, CDevice)
        text = self.source(problem, config, device.target)
        if self.settings.dump_kernels:
            folder = Path(self.settings.sources_dumps_dir or ".")
            sizes = "x".join(map(str, self.grid(problem)))
            write_dump("DUMP_KERNELS", folder / f"{self.layer.name.replace('::', '.')}-{sizes}.cl", text)
        return CustomKernel(self, problem, device, text)


class CustomKernel(CKernel):
    """The kernel of one layer for tensors of certain types."""

    def __init__(self, solver: CustomSolver, problem: Problem, device: CDevice, text: str) -> None:
        grid, local, layer, entry = solver.grid(problem), solver.local(problem), solver.layer, solver.layer.entry
        if device.dialect == "c":
            text = opencl_c.complete(text, entry, len(layer.tensors), grid, local)
            entry = opencl_c.ENTRY
        args = tuple(Out(number) if output else In(number) for _, output, number in sorted(layer.tensors))
        calls = [Text(entry, grid, args, "", (), text, local=local)] if all(grid) else []
        super().__init__(solver.id, problem, device, calls, {})

    @cached_property
    def programs(self) -> list[Any]:
        try:
            with build_options.waiting():
                return [self.device.build(text) for text in self.texts]
        except ExecutionError as error:
            hint = error.hint or (opencl_c.REMEDY if self.device.dialect == "c" else "")
            raise SettingsError(opencl_c.readable(error.what), where="CONFIG_FILE", hint=hint) from None


def _type(problem: Problem, output: bool, number: int) -> TensorType:
    return tensor((problem.outputs if output else problem.inputs)[number])


def _axes(type: TensorType) -> str:
    return _AXES[max(4, len(type.dims))]


def _dims(type: TensorType) -> tuple[int, ...]:
    """Four or five sizes: the dimensions of the tensor, then ones."""
    return type.dims + (1,) * (len(_axes(type)) - len(type.dims))


def _about(name: str, type: TensorType) -> list[str]:
    """The macros of a tensor, with the names that OpenVINO uses."""
    dims = _dims(type)
    pitches = [int(np.prod(dims[i + 1 :])) for i in range(len(dims))]
    none = [0] * len(dims)
    return [
        *_array(f"{name}_DIMS", dims), *_array(f"{name}_PITCHES", pitches), *_array(f"{name}_LOWER_PADDING", none),
        *_array(f"{name}_UPPER_PADDING", none), f"#define {name}_TYPE {_TYPES[type.dtype]}",
        f"#define {name}_FORMAT_{_axes(type)}", f"#define {name}_OFFSET 0",
    ]  # fmt: skip


def _array(name: str, values: Sequence[Any], kind: str = "size_t") -> list[str]:
    return [f"#define {name} ({kind}[]){{ {', '.join(map(str, values))} }}", f"#define {name}_SIZE {len(values)}"]
