"""`kb embed` and `kb extract`: what tuning found, inside the model file. Others pass over it, and it is checked."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunewright import Core, tools
from tunewright.errors import InputError
from tunewright.knowledge import database, embedded
from tunewright.knowledge.embedded import KEY, EmbeddedDatabase, embed, text_of
from tunewright.knowledge.open_databases import open_user
from tunewright.knowledge.record import Measurement, Ratio, to_line
from tunewright.measure.base import Regime
from tunewright.plugins.single import open_device
from tunewright.search.space import Config
from tunewright.testing.database import random_records
from tunewright.tuning import evidence
from tunewright.tuning.tuner import Origin

pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")
X = {"x": np.random.default_rng(0).standard_normal((24, 96), np.float32)}


def model():
    weights = [numpy_helper.from_array(np.random.default_rng(1).standard_normal((96, 64), np.float32), "w")]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in (("x", [24, 96]), ("y", [24, 64])))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"], name="m")], "g", [x], [y], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(made, {"author": "somebody", "note": "kept"})
    return made


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "kb"))
    onnx.save(model(), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.fixture
def call(capsys):
    def run(*words):
        code = tools.execute([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def tuned(file):
    """As if tuning had found another config for the only layer: its candidate."""
    core = Core()
    compiled = core.compile_model(str(file))
    compiled(X)
    ((problem, device, choice),) = compiled.env.tuner.chosen.values()
    config = next(c for c in choice.solver.space(problem, device.target) if c != Config(choice.config))
    default = (choice.solver.id, choice.config)
    made = evidence.measurement(
        problem,
        device.target,
        choice.solver,
        config,
        evidence.ContestSamples([1e-3, 2e-3], 0.0, Ratio(1.5, 1.4, 1.6, 30), Ratio.one(), True, default),
        Regime("cold", 4, 100),
        {},
    )
    open_user(core.settings).add([made])
    return made


def choice(path, **settings):
    compiled = Core({"USER_DB_PATH": "/nonexistent", **settings}).compile_model(str(path))
    compiled(X)
    ((_, _, found),) = compiled.env.tuner.chosen.values()
    return found


def test_what_is_embedded_serves_another_machine_when_it_may(file, call, tmp_path):
    made = tuned(file)
    code, out, _ = call("kb", "embed", file, "-o", tmp_path / "tuned.onnx")
    assert code == 0 and out.startswith("1 measurement (")
    assert choice(tmp_path / "tuned.onnx").origin is not Origin.MODEL, "only when the user says so"
    used = choice(tmp_path / "tuned.onnx", USE_EMBEDDED="YES")
    assert (used.origin, used.config) == (Origin.MODEL, made.config)
    proto = onnx.load(str(tmp_path / "tuned.onnx"))
    (by_bytes,) = compiled_of(proto.SerializeToString())
    assert by_bytes.origin is Origin.MODEL, "a model that has no file, too"


def compiled_of(data):
    compiled = Core({"USER_DB_PATH": "/nonexistent", "USE_EMBEDDED": "YES"}).compile_model(data)
    compiled(X)
    return [found for _, _, found in compiled.env.tuner.chosen.values()]


def test_others_pass_over_it_and_everything_else_stays(file, call):
    before = file.read_bytes()
    want = onnx.load(str(file))
    tuned(file)
    assert call("kb", "embed", file)[0] == 0
    found = onnx.load(str(file))
    onnx.checker.check_model(found)
    props = {p.key: p.value for p in found.metadata_props}
    assert props.keys() == {"author", "note", KEY} and props["note"] == "kept"
    assert file.read_bytes().startswith(before), "no byte of the model has changed"
    del found.metadata_props[:]
    del want.metadata_props[:]
    assert found == want
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, X)[0], Core().compile_model(str(file))(X)["y"], rtol=1e-4, atol=1e-4)


def test_embedding_again_replaces_and_removing_restores(file, call):
    before = file.read_bytes()
    tuned(file)
    for _ in range(2):
        assert call("kb", "embed", file)[0] == 0
    assert len(list(EmbeddedDatabase(file))) == 1
    assert sum(p.key == KEY for p in onnx.load(str(file)).metadata_props) == 1
    assert call("kb", "embed", file, "--remove")[0] == 0 and file.read_bytes() == before


def test_extracting_is_an_import(file, call, tmp_path, monkeypatch):
    made = tuned(file)
    assert call("kb", "embed", file)[0] == 0
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "other"))
    code, out, _ = call("kb", "extract", file, "--dry-run", "--json")
    assert code == 0 and json.loads(out)["new"] == 1 and not (tmp_path / "other").exists()
    assert call("kb", "extract", file)[0] == 0
    assert [r.digest for r in open_user(Core().settings)] == [made.digest]
    assert choice(file, USER_DB_PATH=str(tmp_path / "other")).origin is Origin.USER
    assert call("kb", "extract", file, "-o", tmp_path / "r.jsonl")[0] == 0
    assert (tmp_path / "r.jsonl").read_text() == to_line(made) + "\n"


def test_a_damaged_line_is_named_and_left_out(file, call, monkeypatch, caplog):
    made = tuned(file)
    assert call("kb", "embed", file)[0] == 0
    data = file.read_bytes()
    at = data.index(made.digest.encode()) + 300
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    monkeypatch.setattr(database, "_told", set())
    assert choice(file, USE_EMBEDDED="YES").origin is not Origin.MODEL
    assert any("is damaged" in r.getMessage() and "kb extract" in r.getMessage() for r in caplog.records)
    code, _, err = call("kb", "extract", file)
    assert code == 1 and "line 1" in err


def test_another_processor_is_refused_like_any_import(file, call):
    (foreign, *_) = (r for r in random_records(0, 20) if isinstance(r, Measurement))
    embed(file, file, [foreign])
    code, _, err = call("kb", "extract", file)
    assert code == 2 and "--any-processor" in err
    assert call("kb", "extract", file, "--any-processor")[0] == 0


def test_weights_in_other_files_stay_where_they_are(file, call, tmp_path):
    tuned(file)
    onnx.save(model(), tmp_path / "split.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    weights = (tmp_path / "weights.bin").read_bytes()
    assert call("kb", "embed", tmp_path / "split.onnx", "-o", tmp_path / "two.onnx")[0] == 0
    assert (tmp_path / "weights.bin").read_bytes() == weights
    assert len(list(EmbeddedDatabase(tmp_path / "two.onnx"))) == 1
    Core().compile_model(str(tmp_path / "two.onnx"))(X)
    (tmp_path / "sub").mkdir()
    code, _, err = call("kb", "embed", tmp_path / "split.onnx", "-o", tmp_path / "sub" / "m.onnx")
    assert code == 2 and "weights in external files" in err


def test_there_is_a_bound(file, monkeypatch):
    records = [r for r in random_records(1, 40) if isinstance(r, Measurement)]
    monkeypatch.setattr(embedded, "MOST_BYTES", 10_000)
    fitting = embedded.within(records, embedded.MOST_BYTES)
    assert 0 < len(fitting) < len(records) and embed(file, file, fitting) <= 10_000
    with pytest.raises(InputError, match="are more than 10,000"):
        embed(file, file, records)
    assert len(list(EmbeddedDatabase(file))) == len(fitting), "what was there is there"


def test_mistakes_are_clear(file, call, tmp_path):
    assert "the knowledge base has no measurements of its layers" in call("kb", "embed", file)[2]
    assert "carries no measurements" in call("kb", "extract", file)[2]
    (tmp_path / "no.onnx").write_bytes(b"<xml>no model</xml>")
    for command in ("embed", "extract"):
        code, _, err = call("kb", command, tmp_path / "no.onnx")
        assert code == 2 and "no.onnx" in err and "Traceback" not in err


@pytest.mark.parametrize("seed", range(40))
def test_hostile_files_raise_nothing_else(tmp_path, seed):
    rng = np.random.default_rng(seed)
    data = bytearray(model().SerializeToString())
    for _ in range(rng.integers(1, 8)):
        data[rng.integers(len(data))] = rng.integers(256)
    data = bytes(data[: rng.integers(1, len(data) + 1)]) + rng.bytes(int(rng.integers(0, 12)))
    (tmp_path / "m.onnx").write_bytes(data)
    try:
        assert text_of(tmp_path / "m.onnx") == ""
    except InputError as error:
        assert "is no ONNX file" in str(error)


def test_python_does_the_same(file, tmp_path):
    made = tuned(file)
    core = Core()
    compiled = core.compile_model(str(file))
    compiled(X)
    assert core.embed(compiled, file, output=tmp_path / "out.onnx") == 1
    other = Core({"USER_DB_PATH": str(tmp_path / "other")})
    with pytest.raises(InputError, match="has no measurements"):
        other.embed(compiled, file)
    assert other.extract(tmp_path / "out.onnx") == [made]
    assert list(open_user(other.settings)) == [made]
