"""Operations of com.microsoft on quantised tensors that are not products: element-wise, concatenation, softmax,
pooling.

Scales and zero points are one number each, and are read when a kernel runs. Each formula rounds where its definition
does. Operations that must not be fused into one multiply-add are two statements.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater
from tunewright.ir.types import PLAIN, DType, TensorType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor

from ..elementwise.elementwise import Walk
from ..source import window
from ..source.base import CSolver, both
from ..source.emit import EmittedLaunch, In, Out, Source
from ..source.window import Window
from .quantize import LEAST, MS, TO_INTEGER, chunk_of, to_integer

BYTES = frozenset({DType.INT8, DType.UINT8})


class _Quantised(CSolver):
    """The base of the solvers here: bytes, with one scale and one zero point for each tensor."""

    dtypes = BYTES | {DType.FLOAT32, DType.BOOL, DType.INT32}
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "takes no epilogue"
        for i in self.parameters(problem):
            type = problem.input(i)
            if isinstance(type, TensorType) and type.is_static and type.size != 1:
                return f"input {i}, {type}, is not one number"
        return self.misfit(problem)

    @abstractmethod
    def parameters(self, problem: Problem) -> Sequence[int]:
        """The inputs that are scales and zero points."""

    def misfit(self, problem: Problem) -> str | None:
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"least": [1 << 10, 1 << 12, LEAST]})

    def default(self, problem: Problem, target: Target) -> Config:
        return {"least": 1 << 12}


def _parameters(source: Source, problem: Problem, names: Mapping[str, int]) -> None:
    """Declares floats of these names from inputs; those of absent inputs are 0."""
    for name, i in names.items():
        type = problem.input(i)
        if type is None:
            source.add(f"f32 {name} = 0.0f;")
        else:
            source.buffer(f"p{i}", tensor(type).dtype, In(i))
            source.add(f"f32 {name} = (f32)*p{i};")


@dataclass(frozen=True)
class Formula:
    """An element-wise operation: its operands and parameters, and the C text."""

    #: the operation with the same broadcasting, and the data inputs in its order
    like: str
    data: tuple[int, ...]
    parameters: Mapping[str, int]
    #: statements before the loop, and statements that compute ``f32 v`` from a, b, c
    before: str
    each: str


_UNARY = {"s": 1, "z": 2, "ys": 3, "yz": 4}
_BINARY = {"as": 1, "az": 2, "bs": 4, "bz": 5, "cs": 6, "cz": 7}
FORMULAS = {
    MS + "QLinearAdd": Formula(
        "Add", (0, 3), _BINARY,
        "f32 left = as / cs, right = bs / cs, l = left * az, r = right * bz, lr = l + r, fixed = cz - lr;",
        "f32 v = f32_fma((f32)a, left, f32_fma((f32)b, right, fixed));",
    ),
    MS + "QLinearMul": Formula(
        "Mul", (0, 3), _BINARY, "f32 ratio = as * bs / cs;",
        "f32 p = ((f32)a - az) * ((f32)b - bz); f32 q = p * ratio; f32 v = q + cz;",
    ),
    MS + "QLinearSigmoid": Formula("Relu", (0,), _UNARY, "", "f32 x = ((f32)a - z) * s; f32 v = f32_sigmoid(x) / ys;"),
    MS + "QLinearLeakyRelu": Formula(
        "Relu", (0,), _UNARY, "", "f32 x = ((f32)a - z) * s; f32 n = x * ALPHA; f32 v = (x >= 0.0f ? x : n) / ys;"
    ),
    MS + "QLinearWhere": Formula(
        "Where", (0, 1, 4), {"xs": 2, "xz": 3, "ys": 5, "wz": 6, "zs": 7, "yz": 8}, "",
        "f32 x = ((f32)b - xz) * xs, y = ((f32)c - wz) * ys; f32 v = (a ? x : y) / zs;",
    ),
}  # fmt: skip


class QLinearElementwise(_Quantised):
    """Operands broadcast; the innermost dimension is a loop over contiguous memory."""

    family = "qlinear_elementwise"
    ops = frozenset(FORMULAS)
    layouts = frozenset({"plain", "blocked"})

    def parameters(self, problem: Problem) -> Sequence[int]:
        return list(FORMULAS[problem.op].parameters.values())

    def misfit(self, problem: Problem) -> str | None:
        data = [tensor(problem.inputs[i]).dtype for i in FORMULAS[problem.op].data]
        if any(d not in BYTES | {DType.BOOL} for d in data) or tensor(problem.outputs[0]).dtype not in BYTES:
            return "works on bytes"
        out = tensor(problem.outputs[0])
        whole = [tensor(problem.inputs[i]) for i in FORMULAS[problem.op].data]
        if any(t.layout != PLAIN for t in [out, *whole]) and any(
            (t.layout, t.shape) != (out.layout, out.shape) for t in whole
        ):
            return "in blocks nothing broadcasts"
        return None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        formula, out = FORMULAS[problem.op], tensor(problem.outputs[0])
        data = tuple(tensor(problem.inputs[i]) for i in formula.data)
        if out.layout != PLAIN:  # All operands have one shape; they are handled element by element, in memory order.
            data = tuple(TensorType(t.dtype, (math.prod(t.physical),)) for t in data)
            out = TensorType(out.dtype, data[0].shape)
        alike = replace(
            problem, op=formula.like, inputs=data, outputs=(out,), attrs={}, constant=(False,) * len(data), values=()
        )
        walk = Walk.of(alike)
        source = Source("qlinear", self.specialise)
        source.function(TO_INTEGER)
        if problem.op.endswith("LeakyRelu"):
            source.numbers(ALPHA=float(problem.attrs.get("alpha", 0.01)))
        for name, i, type in zip("abc", formula.data, data, strict=False):
            source.buffer(f"{name}_", type.dtype, In(i))
        _parameters(source, problem, formula.parameters)
        source.buffer("out", out.dtype, Out())
        chunk = chunk_of(out.size, target, int(config["least"]))
        *outer, inner = walk.dims
        source.dims(SIZE=out.size, CHUNK=chunk, INNER=inner)
        where, each = [], []
        for k, n in enumerate(outer):
            source.dims(**{f"N{k}": n})
        for name, strides in zip("abc", walk.strides.values(), strict=False):
            for k in range(len(outer)):
                source.dims(**{f"{name.upper()}{k}": strides[k]})
            below = ["1", *(f"N{k}" for k in range(1, len(outer)))]
            parts = [
                f"row / ({' * '.join(below[k + 1 :]) or '1'}) % N{k} * {name.upper()}{k}" for k in range(len(outer))
            ]
            moves = strides[-1] != 0
            where.append(f"int {name}_at = {' + '.join(parts) or '0'}{' + first' if moves else ''};")
            each.append(f"{source.compute(f'{name}_')} {name} = {name}_[{name}_at{' + i' if moves else ''}];")
        zero = "0.0f" if "cs" in formula.parameters else "yz"
        source.add(f"""
{formula.before}
int begin = GID(0) * CHUNK, stop = begin + CHUNK < SIZE ? begin + CHUNK : SIZE;
while (begin < stop) {{
  int row = begin / INNER, first = begin - row * INNER;
  int count = INNER - first < stop - begin ? INNER - first : stop - begin;
  {" ".join(where)}
  for (int i = 0; i < count; i++) {{
    {" ".join(each)}
    {formula.each}
    out[begin + i] = {to_integer("v", zero, out.dtype, True)};
  }}
  begin += count;
}}""")
        return [source.call([-(-out.size // chunk)])]


class QLinearConcat(_Quantised):
    """One launch for each tensor, which requantises it and writes it to its place."""

    family = "qlinear_concat"
    ops = frozenset({MS + "QLinearConcat"})

    def parameters(self, problem: Problem) -> Sequence[int]:
        return [i for i in range(len(problem.inputs)) if i < 2 or i % 3 != 2]

    def misfit(self, problem: Problem) -> str | None:
        data = [tensor(problem.inputs[i]).dtype for i in range(2, len(problem.inputs), 3)]
        return None if all(d in BYTES for d in [*data, tensor(problem.outputs[0]).dtype]) else "works on bytes"

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        out, calls, offset = tensor(problem.outputs[0]), [], 0
        axis = int(problem.attrs["axis"]) % len(out.dims)
        pitch = math.prod(out.dims[axis:])
        for i in range(2, len(problem.inputs), 3):
            type = tensor(problem.inputs[i])
            run = math.prod(type.dims[axis:])
            rows = type.size // run if run else 0
            source = Source("requantize", self.specialise)
            source.function(TO_INTEGER)
            source.buffer("x", type.dtype, In(i))
            _parameters(source, problem, {"s": i + 1, "z": i + 2, "ys": 0, "yz": 1})
            source.buffer("y", out.dtype, Out())
            chunk = chunk_of(type.size, target, int(config["least"]))
            source.dims(SIZE=type.size, CHUNK=chunk, RUN=run, PITCH=pitch, OFFSET=offset)
            source.add(f"""
int begin = GID(0) * CHUNK, stop = begin + CHUNK < SIZE ? begin + CHUNK : SIZE;
while (begin < stop) {{
  int row = begin / RUN, first = begin - row * RUN, to = row * PITCH + OFFSET + first;
  int count = RUN - first < stop - begin ? RUN - first : stop - begin;
  for (int i = 0; i < count; i++) {{
    f32 v = ((f32)x[begin + i] - z) * s;
    y[to + i] = {to_integer("v / ys", "yz", out.dtype, True)};
  }}
  begin += count;
}}""")
            calls.append(source.call([-(-type.size // chunk) if rows else 0]))
            offset += run
        return calls


class QLinearSoftmax(_Quantised):
    """Handles rows along an axis one after the other: the maximum, the sum of exponentials, the quotients."""

    family = "qlinear_softmax"
    ops = frozenset({MS + "QLinearSoftmax"})

    def parameters(self, problem: Problem) -> Sequence[int]:
        return [1, 2, 3, 4]

    def misfit(self, problem: Problem) -> str | None:
        x = tensor(problem.inputs[0])
        return None if x.dtype in BYTES and x.dtype is tensor(problem.outputs[0]).dtype else "works on bytes"

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x = tensor(problem.inputs[0])
        axis = int(problem.attrs.get("axis", -1)) % greater(len(x.dims), 1)
        one = int(problem.attrs["opset"]) >= 13
        length = x.dims[axis] if one else math.prod(x.dims[axis:])
        inner = math.prod(x.dims[axis + 1 :]) if one else 1
        rows = x.size // length if length else 0
        source = Source("qlinear_softmax", self.specialise)
        source.function(TO_INTEGER)
        source.buffer("x", x.dtype, In(0))
        _parameters(source, problem, {"s": 1, "z": 2, "ys": 3, "yz": 4})
        source.buffer("y", x.dtype, Out())
        least = greater(1, int(config["least"]) // greater(length, 1))
        source.dims(ROWS=rows, LEAST=least, LENGTH=length)
        at = "k"
        if inner > 1:
            source.dims(INNER=inner)
            at = "k * INNER"
        source.add(f"""
int begin = GID(0) * LEAST, end = begin + LEAST < ROWS ? begin + LEAST : ROWS;
f32 steps = __builtin_floorf(1.0f / ys);
for (int row = begin; row < end; row++) {{
  int first = {"row / INNER * INNER * LENGTH + row % INNER" if inner > 1 else "row * LENGTH"};
  i32 most = x[first];
  for (int k = 1; k < LENGTH; k++) most = x[first + {at}] > most ? x[first + {at}] : most;
  f32 top = ((f32)most - z) * s, sum = 0.0f;
  {{
    REASSOCIATE
    for (int k = 0; k < LENGTH; k++) {{
      f32 v = ((f32)x[first + {at}] - z) * s;
      sum += f32_exp(v - top);
    }}
  }}
  for (int k = 0; k < LENGTH; k++) {{
    f32 v = ((f32)x[first + {at}] - z) * s, share = f32_exp(v - top) / sum;
    y[first + {at}] = {to_integer("share * steps", "yz", x.dtype, True)};
  }}
}}""")
        return [source.call([-(-rows // least)])]


class QLinearPool(_Quantised):
    """Averages with channels first or last: of whole images in integers, of windows in floats, tap by tap."""

    family = "qlinear_pool"
    ops = frozenset({MS + "QLinearAveragePool", MS + "QLinearGlobalAveragePool"})

    def parameters(self, problem: Problem) -> Sequence[int]:
        return [1, 2, 3, 4]

    def misfit(self, problem: Problem) -> str | None:
        if tensor(problem.inputs[0]).dtype not in BYTES or tensor(problem.outputs[0]).dtype not in BYTES:
            return "works on bytes"
        return window.why_not(problem)

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, y = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        last = bool(problem.attrs.get("channels_last", 0))
        source = Source("qlinear_pool", self.specialise)
        source.function(TO_INTEGER)
        source.buffer("x", x.dtype, In(0))
        _parameters(source, problem, {"s": 1, "z": 2, "ys": 3, "yz": 4})
        source.buffer("y", y.dtype, Out())
        channels = x.dims[-1 if last else 1]
        pixels = x.size // greater(x.dims[0] * channels, 1)
        made = y.size // greater(x.dims[0] * channels, 1)
        least = greater(1, int(config["least"]) // greater(x.size // greater(y.size, 1), 1))
        source.dims(SIZE=y.size, LEAST=least, CHANNELS=channels, PIXELS=pixels, MADE=made)
        place, at = ("i % CHANNELS", "i / CHANNELS % MADE"), "image * CHANNELS * PIXELS + channel + ({}) * CHANNELS"
        if not last:
            place, at = ("i / MADE % CHANNELS", "i % MADE"), "(image * CHANNELS + channel) * PIXELS + {}"
        body = self._whole(at.format("p")) if "Global" in problem.op else self._windows(source, problem, at, last)
        source.add(f"""
int begin = GID(0) * LEAST, end = begin + LEAST < SIZE ? begin + LEAST : SIZE;
for (int i = begin; i < end; i++) {{
  int channel = {place[0]}, pixel UNUSED = {place[1]}, image = i / (CHANNELS * MADE);
  {body}
  y[i] = {to_integer("v", "yz", y.dtype, True)};
}}""")
        return [source.call([-(-y.size // least)])]

    def _whole(self, at: str) -> str:
        return f"""
  i32 sum = 0;
  for (int p = 0; p < PIXELS; p++) sum += x[{at}];
  f32 count = (f32)PIXELS * ys, ratio = s / count;
  f32 v = (f32)(sum - (i32)z * PIXELS) * ratio;"""

    def _windows(self, source: Source, problem: Problem, at: str, last: bool) -> str:
        """Statements for windows. Like the reference, they add along the width first, then along height and depth."""
        first = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        x, y = (replace(t, shape=(t.dims[0], t.dims[-1], *t.dims[1:-1])) if last else t for t in first)
        attrs = {k: v for k, v in problem.attrs.items() if k != "channels_last"}
        win = Window.of(replace(problem, op="AveragePool", inputs=(x,), outputs=(y,), attrs=attrs, constant=(False,)))
        for k, axis in enumerate("DHW"):
            source.dims(**{f"IN_{axis}": win.input[k], f"OUT_{axis}": win.output[k], f"HEAD_{axis}": win.head[k]})
            source.dims(**{f"TAIL_{axis}": win.tail[k], f"TAPS_{axis}": win.kernel[k], f"STRIDE_{axis}": win.stride[k]})
            source.dims(**{f"DILATION_{axis}": win.dilation[k]})
        include = bool(problem.attrs.get("count_include_pad", 0))
        source.function("""
INLINE int counted(int at, int taps, int dilation, int low, int high) {
  int count = 0;
  for (int k = 0; k < taps; k++) count += at + k * dilation >= low && at + k * dilation < high;
  return count;
}""")
        counts = [
            f"counted({axis.lower()}, TAPS_{axis}, DILATION_{axis}, "
            + (f"-HEAD_{axis}, IN_{axis} + TAIL_{axis})" if include else f"0, IN_{axis})")
            for axis in "DHW"
        ]
        where = at.format("(id * IN_H + ih) * IN_W + iw")
        return f"""
  int w = pixel % OUT_W * STRIDE_W - HEAD_W, h = pixel / OUT_W % OUT_H * STRIDE_H - HEAD_H;
  int d = pixel / (OUT_W * OUT_H) * STRIDE_D - HEAD_D;
  f32 total = 0.0f;
  for (int kd = 0; kd < TAPS_D; kd++) {{
    int id = d + kd * DILATION_D;
    f32 plane = 0.0f;
    for (int kh = 0; kh < TAPS_H; kh++) {{
      int ih = h + kh * DILATION_H;
      f32 line = 0.0f;
      for (int kw = 0; kw < TAPS_W; kw++) {{
        int iw = w + kw * DILATION_W;
        if (id >= 0 && id < IN_D && ih >= 0 && ih < IN_H && iw >= 0 && iw < IN_W) {{
          f32 tap = ((f32)x[{where}] - z) * s;
          line = line + tap;
        }}
      }}
      plane += line;
    }}
    total += plane;
  }}
  f32 mean = total / (f32)({" * ".join(counts)}), v = mean / ys;"""


SOLVERS = (*both(QLinearElementwise), *both(QLinearConcat), *both(QLinearSoftmax), *both(QLinearPool))
