"""Convert a problem into a command line and back: ``tunewright driver conv --input 'float32[1,64,56,56]' ...``.

Operations are grouped into classes, and each class is a sub-command. An option names an input, an attribute, or the
fused steps; attributes have the names and kinds of ONNX's schemas. Problems that options cannot express are given as
JSON to ``tunewright driver op --problem``. `solvers.problem_json` checks the parsed problem; mistakes raise
`InputError`.

An input is written as ``TYPE``. A trailing ``!`` makes it constant, and ``=VALUE`` makes its value part of the problem.
``_`` is an absent input. Weights, biases and the like are constant unless a ``~`` marks them as computed.
"""

from __future__ import annotations

import base64
import difflib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunewright import ops
from tunewright.errors import InputError, TunewrightError
from tunewright.ir.types import DType, Layout, TensorType, Type
from tunewright.ops.base import Operand
from tunewright.ops.infer import MISTAKES
from tunewright.solvers import problem_json
from tunewright.solvers.base import Array, Problem

from .command_form import CLASSES, CONSTANT, FLOAT, FLOATS, INT, INTS, PLAIN, STRING, STRINGS, class_of, form

#: Maximum characters of a command: shells accept no longer argument.
LONGEST = 100_000
_PROGRAM = ("tunewright", "driver")
#: Options of the driver that do not describe the problem, and whether a value follows.
_RUNNING = {"-d": True, "--device": True, "-c": True, "--config": True, "--seconds": True, "--tune": False,
            "--warm": False, "--json": False}  # fmt: skip
_MARK = " ".join(_PROGRAM) + " "

_INPUT = re.compile(r"([a-z0-9_]+\[[0-9,]*\](?:@[a-z0-9]+)?)?([!~]?)(?:=(.*))?", re.DOTALL)
_STEP = re.compile(r"\s*([A-Za-z_][\w.:]*)\s*(?:\(([^()]*)\))?\s*")
#: Errors that inference raises for a problem that makes no sense.
_SENSELESS = (*MISTAKES, AssertionError, TunewrightError)
_TYPE_FORM = "a type is like float32[1,64,56,56]@blocked8"


# ---- from a problem to a command -------------------------------------------------------------------------------------


def to_command(problem: Problem) -> list[str]:
    """Return the words of the command that describes a static problem over tensors.

    Raises `InputError` if no command can.
    """
    data = problem_json.to_json(problem)
    title = class_of(problem.op)
    words = [*_PROGRAM, title, *_options(problem, data, CLASSES[title].default)]
    if not _is(problem, words):
        words = [*_PROGRAM, "op", "--problem", json.dumps(data, separators=(",", ":"))]
        if not _is(problem, words):
            raise InputError("cannot be told in a command", where=problem.key()[:200])
    if sum(map(len, words)) > LONGEST:
        raise InputError(f"is more than {LONGEST:,} characters long as a command", where=problem.key()[:200])
    return words


def to_line(problem: Problem) -> str:
    """Return the command as one line that can be pasted into a shell."""
    return shlex.join(to_command(problem))


def _is(problem: Problem, words: Sequence[str]) -> bool:
    """Whether the words describe exactly this problem."""
    try:
        return from_arguments(words[2], words[3:]) == problem
    except InputError:
        return False


def _options(problem: Problem, data: Mapping[str, Any], default: str | None) -> Iterator[str]:
    if problem.op != default:
        yield from _option("op", problem.op)
    values = dict(problem.values)
    roles = form(problem.op).roles
    first = len(problem.inputs) - problem.operands
    fits = first <= len(roles)
    for i, type in enumerate(data["inputs"]):
        name = "operand" if i >= first else roles[i] if fits else "input"
        # a missing input before a named one need not be written
        if type is not None or name in ("input", "operand") or not any(data["inputs"][i + 1 : first]):
            yield from _option(name, _input_text(name, type, problem.constant[i], values.get(i)))
    kinds = form(problem.op).kinds
    for name, value in data["attrs"].items():
        option, text = name.replace("_", "-"), _attr_text(value, kinds.get(name))
        if text is not None and option not in roles:
            yield from _option(option, text)
        else:
            yield from _option("attr", f"{name}={json.dumps(value)}")
    if problem.epilogue:
        yield from _option("epilogue", " | ".join(_step_text(n, s) for n, s in enumerate(data["epilogue"])))
    if problem.outputs != _inferred(problem):
        for type in data["outputs"]:
            yield from _option("output", "_" if type is None else type)


def _option(name: str, text: str) -> tuple[str, ...]:
    """Join name and value into one word if the value could be mistaken for an option."""
    return (f"--{name}={text}",) if text.startswith("-") else (f"--{name}", text)


def _input_text(name: str, type: str | None, constant: bool, value: Array | None) -> str:
    if type is None:
        return "_"
    if value is not None:
        return f"{'' if value.dtype == np.int64 else type}={json.dumps(value.tolist())}"
    return type + ("" if constant == (name in CONSTANT) else "!" if constant else "~")


def _attr_text(value: Any, kind: int | None) -> str | None:
    """Write an attribute as the value of its option; None if the text could not be read back."""
    if isinstance(value, dict) and set(value) == {"tuple"}:
        value = value["tuple"]
    many = isinstance(value, list)
    items = [x["float"] if isinstance(x, dict) and set(x) == {"float"} else x for x in (value if many else [value])]
    wanted = {FLOAT: float, FLOATS: float, INT: int, INTS: int, STRING: str, STRINGS: str}
    if kind not in wanted or many != (kind in (FLOATS, INTS, STRINGS)):
        return None
    if not all(type(x) in (wanted[kind], str) for x in items):
        return None
    text = ",".join(repr(x) if isinstance(x, float) else str(x) for x in items)
    return text or None


def _step_text(number: int, step: Mapping[str, Any]) -> str:
    """Write a fused step: ``Add(@, 3)``, or just ``Relu`` when the last result is its only argument.

    ``@`` is the main result, ``@k`` the result of step k, a number an input.
    """
    args = ", ".join(str(a) if a >= 0 else f"@{~a or ''}" for a in step["args"])
    attrs = json.dumps(step["attrs"]) if step["attrs"] else ""
    return f"{step['op']}{'' if step['args'] == [~number] else f'({args})'}{attrs}"


# ---- from a command to a problem -------------------------------------------------------------------------------------


def from_line(line: str) -> Problem | None:
    """Parse the problem of a command within a line of text, such as a log line; None if it contains no command."""
    begin = line.find(_MARK)
    if begin < 0 or line.lstrip().startswith("#"):
        return None
    try:
        words = shlex.split(line[begin + len(_MARK) :])
    except ValueError as error:
        raise InputError(f"cannot be read: {error}", where=line[:200].strip()) from None
    if not words:
        return None
    return from_arguments(words[0], list(_posing(words[1:])))


def _posing(words: Sequence[str]) -> Iterator[str]:
    """Yield the words that describe the problem, without the options that say where and how to run it."""
    waiting = iter(words)
    for word in waiting:
        name, equals, _ = word.partition("=")
        if name in _RUNNING:
            if _RUNNING[name] and not equals:
                next(waiting, None)
            continue
        yield word


def from_arguments(title: str, arguments: Sequence[str]) -> Problem:
    """Build the problem from the options of a sub-command. Raises `InputError` naming the wrong option."""
    if title not in CLASSES:
        raise InputError(f"there is no class {title!r}", hint=f"the classes are {', '.join(CLASSES)}")
    given = list(_pairs(arguments))
    texts = [text for name, text in given if name == "problem"]
    if texts:
        if len(given) > 1 or title != "op":
            raise InputError("stands alone, behind `driver op`", where="--problem")
        return problem_json.from_json(_json(texts[0], "--problem"))
    named = [text for name, text in given if name == "op"]
    op = named[-1] if named else CLASSES[title].default
    if op is None:
        raise InputError(f"{title} is many operations", where="--op is missing", hint=f"as in {CLASSES[title].example}")
    if ops.lookup(op) is None:
        hint = _close(op, ops.names()) or "outside of ONNX's own domain it is domain::Name"
        raise InputError(f"there is no operation {op}", where="--op", hint=hint)
    if title not in ("op", class_of(op)):
        raise InputError(f"{op} is not of the class {title}", where="--op", hint=f"tunewright driver {class_of(op)}")
    options = _ProblemOptions(op)
    for name, text in given:
        options.add(name, text)
    return options.problem()


@dataclass(frozen=True)
class _Input:
    """An input as its text describes it."""

    type: str | None
    constant: bool = False
    #: encoded as `serial` encodes an array
    value: dict[str, Any] | None = None


class _ProblemOptions:
    """Collects the options that describe a problem of one operation."""

    def __init__(self, op: str) -> None:
        self.op, self.roles, self.kinds = op, form(op).roles, form(op).kinds
        self.flags = {name.replace("_", "-"): name for name in self.kinds}
        self.main: dict[int, _Input] = {}
        self.operands: list[_Input] = []
        self.attrs: dict[str, Any] = {}
        self.outputs: list[str | None] = []
        self.epilogue: list[dict[str, Any]] = []
        self.counted = 0

    def add(self, name: str, text: str) -> None:
        """Add an option. Raises `InputError` if the operation has no such option, or if its text is malformed."""
        if name == "input":
            _set(self.main, self.counted, _input(name, text), name)
            self.counted += 1
        elif name in self.roles:
            _set(self.main, self.roles.index(name), _input(name, text), name)
        elif not (self._add_common(name, text) or name == "op"):
            self._add_flag(name, text)

    def _add_common(self, name: str, text: str) -> bool:
        """Add an option that all operations have. Returns whether it is one."""
        if name == "operand":
            self.operands.append(_input(name, text))
        if name == "output":
            self.outputs.append(None if text == "_" else text)
        if name == "epilogue":
            self.epilogue += _steps(text)
        if name == "attr":
            key, equals, value = text.partition("=")
            if not equals:
                raise InputError(f"{text!r} is not NAME=JSON", where="--attr", hint="for example --attr axis=1")
            _set(self.attrs, key, _json(value, f"--attr {key}"), key)
        return name in ("operand", "output", "epilogue", "attr")

    def _add_flag(self, name: str, text: str) -> None:
        """Add an option that is an attribute of the operation."""
        if name not in self.flags:
            own = [*self.roles, *self.flags]
            hint = _close(name, [*own, *PLAIN], "--") or f"it has {', '.join(f'--{n}' for n in own)}"
            raise InputError(f"{self.op} has no option --{name}", hint=hint)
        attribute = self.flags[name]
        _set(self.attrs, attribute, _attr(name, text, self.kinds[attribute]), name)

    def problem(self) -> Problem:
        """Return the problem. Without outputs, their types follow from the inputs."""
        inputs = [self.main.get(i, _Input(None)) for i in range(max(self.main, default=-1) + 1)] + self.operands
        problem = problem_json.from_json(
            {
                "op": self.op, "inputs": [x.type for x in inputs], "outputs": self.outputs, "attrs": self.attrs,
                "epilogue": self.epilogue, "operands": len(self.operands),
                "constant": [i for i, x in enumerate(inputs) if x.constant],
                "values": [[i, x.value] for i, x in enumerate(inputs) if x.value is not None],
            }
        )  # fmt: skip
        if self.outputs:
            return problem
        try:
            return replace(problem, outputs=(_infer(problem),))
        except InputError:
            raise
        except _SENSELESS as error:
            raise InputError(f"its inputs do not fit: {error or repr(error)}", where=self.op) from None


def _inferred(problem: Problem) -> tuple[TensorType, ...]:
    """Return the inferred type of the only result; empty if it cannot be inferred."""
    try:
        return (_infer(problem),)
    except _SENSELESS:
        return ()


def _infer(problem: Problem) -> TensorType:
    """Infer the type of the result, in the layout of the first input. Raises if it does not follow from the inputs."""
    values = dict(problem.values)
    inputs = [_operand(t, values.get(i)) for i, t in enumerate(problem.inputs)]
    results: list[Operand | None] = []
    steps = [(problem.op, inputs[: len(inputs) - problem.operands], problem.attrs)]
    for op, given, attrs in steps:
        spec = ops.lookup(op)
        if spec is None:
            raise ValueError(f"there is no operation {op}")
        found = spec.infer(given, attrs, 1)[0]
        results.append(_operand(found, None))
        if len(results) <= len(problem.epilogue):
            step = problem.epilogue[len(results) - 1]
            steps.append((step.op, [inputs[a] if a >= 0 else results[~a] for a in step.args], step.attrs))
    if not isinstance(found, TensorType) or not found.is_static:
        what = f"the result of {problem.op} does not follow from the types of its inputs"
        raise InputError(what, hint="say it with --output")
    first = problem.inputs[0] if problem.inputs else None
    layout = first.layout if isinstance(first, TensorType) and len(found.dims) > 1 else Layout()
    return replace(found, layout=layout)


def _operand(type: Type | None, value: Array | None) -> Operand | None:
    """Make the operand for inference, which does not know layouts."""
    if isinstance(type, TensorType):
        return Operand(replace(type, layout=Layout()), value)
    return None if type is None else Operand(type, value)


# ---- parsing of words ------------------------------------------------------------------------------------------------


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of ``--name value`` and ``--name=value``."""
    words = iter(arguments)
    for word in words:
        if not word.startswith("--") or len(word) < 3:
            raise InputError(f"{word!r} is not an option", hint="options are like --input 'float32[1,64]'")
        name, equals, text = word[2:].partition("=")
        value = text if equals else next(words, None)
        if value is None:
            raise InputError("has no value", where=word)
        yield name, value


def _input(name: str, text: str) -> _Input:
    if text == "_":
        return _Input(None)
    found = _INPUT.fullmatch(text.strip())
    if found is None or not (found[1] or found[3]):
        raise InputError(f"{text!r} is not a type", where=f"--{name}", hint=_TYPE_FORM)
    type, mark, value = found.groups()
    if type and type.partition("[")[0] not in (dtype.value for dtype in DType):
        hint = f"{_TYPE_FORM}; the element types are {', '.join(dtype.value for dtype in DType)}"
        raise InputError(f"{type.partition('[')[0]} is no element type", where=f"--{name}", hint=hint)
    if value is not None:
        return _valued(name, type, _json(value, f"--{name}"))
    return _Input(type, mark == "!" or (name in CONSTANT and mark != "~"))


def _valued(name: str, type: str | None, value: Any) -> _Input:
    """Parse an input whose value is part of the problem. Without a type it holds 64-bit integers."""
    kind = "int64" if type is None else type.partition("[")[0]
    try:
        dtype = DType(kind).numpy
        array = np.asarray(value, dtype)
        if type is None:
            if np.asarray(value).dtype.kind not in "iu" and array.size:
                raise ValueError("only whole numbers need no type")
            type = str(TensorType.of(array))
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        dims = [int(d) for d in type.partition("[")[2].partition("]")[0].split(",") if d]
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"{value!r} is no value of {type or kind}: {error}", where=f"--{name}") from None
    return _Input(type, True, {"array": [kind, dims, data]})


def _attr(name: str, text: str, kind: int) -> Any:
    """Parse the value of an attribute's option, and encode it as `serial` does."""
    many = kind in (FLOATS, INTS, STRINGS)
    items = [_item(name, item, kind) for item in (text.split(",") if many else [text])]
    return {"tuple": items} if many else items[0]


def _item(name: str, text: str, kind: int) -> Any:
    if kind in (STRING, STRINGS):
        return text
    try:
        if kind in (INT, INTS):
            return int(text)
        value = float(text)
        return value if math.isfinite(value) else {"float": repr(value)}
    except ValueError:
        what = "a whole number" if kind in (INT, INTS) else "a number"
        raise InputError(f"{text!r} is not {what}", where=f"--{name}") from None


def _steps(text: str) -> Iterator[dict[str, Any]]:
    """Parse ``Add(@, 3) | LeakyRelu{"alpha": 0.1}`` into steps as `serial` encodes them."""
    at, number = 0, 0
    while True:
        found = _STEP.match(text, at)
        if found is None:
            hint = "steps are like Add(@, 3) | Relu: @ is the result, 3 the fourth input"
            raise InputError(f"{text[at:][:80]!r} is no step", where="--epilogue", hint=hint)
        attrs: Any = {}
        at = found.end()
        if text.startswith("{", at):
            try:
                attrs, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                raise InputError(f"the attributes of {found[1]} are not JSON: {error}", where="--epilogue") from None
        yield {"op": found[1], "args": [~number] if found[2] is None else _arguments(found[2]), "attrs": attrs}
        rest = text[at:].lstrip()
        if not rest:
            return
        if not rest.startswith("|"):
            raise InputError(f"{rest[:80]!r} where | belongs", where="--epilogue")
        at, number = len(text) - len(rest) + 1, number + 1


def _arguments(text: str) -> list[int]:
    found = []
    for word in (w.strip() for w in text.split(",")) if text.strip() else ():
        if not re.fullmatch(r"@?[0-9]{1,6}|@", word):
            raise InputError(f"{word!r} is no argument", where="--epilogue", hint="@, @1 (a result) or 3 (an input)")
        found.append(~int(word[1:] or 0) if word.startswith("@") else int(word))
    return found


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{text[:80]!r} is not JSON: {error}", where=where) from None


def _set(into: dict[Any, Any], key: Any, value: Any, name: str) -> None:
    if key in into:
        raise InputError("is given twice", where=f"--{name}")
    into[key] = value


def _close(word: str, words: Sequence[str], prefix: str = "") -> str:
    found = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"did you mean {prefix}{found[0]}?" if found else ""
