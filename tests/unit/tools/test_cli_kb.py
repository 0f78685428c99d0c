"""`tunewright kb`: what it shows, what it moves, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from helpers.kb_records import FOREIGN, NULL, exact, fault, here, measurement, problem
from tunewright import tools
from tunewright.errors import TunewrightError
from tunewright.knowledge.database import MemoryDatabase
from tunewright.knowledge.open_databases import open_user
from tunewright.knowledge.record import to_line
from tunewright.knowledge.shared import SharedDatabase
from tunewright.knowledge.sqlite import SqliteDatabase
from tunewright.knowledge.system import write_lines
from tunewright.plugins.single import open_device
from tunewright.search.base import Status
from tunewright.settings import Settings
from tunewright.solvers.base import solvers
from tunewright.tools.kb.view import config_text, known, problem_text, safe, sparkline
from tunewright.tuning.evidence import EXTENT
from tunewright.tuning.lookup import KnowledgeLayer, Lookup

COMMANDS = ("path", "list", "show", "stats", "diff", "merge", "export", "import", "verify", "prune", "repair", "train",
            "log", "embed", "extract")  # fmt: skip
CONV = problem("Relu", (1, 64, 56, 56), ("Neg", "Abs"))


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Knowledge bases of the test alone: user, system, and 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "user"))
    monkeypatch.setenv("TUNEWRIGHT_SYSTEM_DB_PATH", str(tmp_path / "system"))
    (tmp_path / "system").mkdir()


@pytest.fixture
def call(capsys):
    """Runs `tunewright kb` in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        code = tools.execute(["kb", *(str(a) for a in arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def user():
    return open_user(Settings.from_environment())


def system(tmp_path, *records):
    write_lines(tmp_path / "system" / "system.jsonl", records)


def digests(records):
    return {r.digest for r in records}


def flat(text):
    """Without the line breaks of a narrow table."""
    return " ".join(text.split())


# ---- the group -----------------------------------------------------------------------------------------------------


def test_the_group_lists_its_commands(call):
    code, out, err = call()
    assert code == 0 and not err
    assert all(f" {name} " in out for name in COMMANDS)
    assert call("--help")[1].strip() == out.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_fits_80_columns(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert f"Example: tunewright kb {command}" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("lst", "No such command 'lst'"),
        ("list --count 0", "Input should be greater than or equal to 1"),
        ("list --layer mine", "'mine' is not one of 'all', 'user', 'system'"),
        ("list --config USER_DB_PAHT=x", "did you mean USER_DB_PATH?"),
        ("list --config USER_DB_PATH=", "USER_DB_PATH is empty"),
        ("show", "Missing argument"),
        ("show feedface", "feedface: matches no record and no problem"),
        ("diff user", "Missing argument 'B'"),
        ("diff user nowhere", "nowhere: there is no such file"),
        ("merge nowhere.jsonl", "nowhere.jsonl: there is no such file"),
        ("import nowhere.jsonl", "nowhere.jsonl: there is no such file"),
        ("import records.csv", "records.csv: its suffix is neither .jsonl nor .json"),
        ("export records.csv", "records.csv: its suffix is neither .jsonl nor .json"),
        ("export no/folder/x.jsonl", "there is no folder no/folder"),
        ("export x.jsonl", "kb export: no record matches"),
        ("export x.json", "kb export: no answer matches"),
        ("prune", "kb prune: say what to drop"),
        ("prune --older-than 9999999999", "9999999999 days are too many"),
        ("verify --device TPU", "there is no device 'TPU'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(call, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*arguments.split())
    assert code == 2 and not out
    assert err.startswith("tunewright: ") and err.count("\n") == 1
    assert message in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["system"], "a mistake makes nothing"


# ---- looking -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["path", "list", "list --faults", "stats", "log", "diff user system"])
def test_looking_makes_nothing(call, tmp_path, command):
    code, out, err = call(*command.split())
    assert code == 0 and out and not err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["system"]


def test_path(call, user, tmp_path):
    code, out, _ = call("path")
    assert code == 0
    assert str(tmp_path / "user") in out and "not there yet" in out
    user.add([measurement()])
    system(tmp_path, measurement(where=FOREIGN), fault())
    code, out, _ = call("path", "--json")
    found = json.loads(out)
    assert found["user"]["mode"] == "SQLITE" and found["user"]["read_only"] is None and found["user"]["records"] == 1
    assert found["system"]["records"] == 2 and found["system"]["bytes"] > 1000
    assert found["user"]["path"] == str(tmp_path / "user")
    code, out, _ = call("path", "-c", f"USER_DB_PATH={tmp_path / 'net'}", "-c", "USER_DB_MODE=SHARED")
    assert code == 0 and str(tmp_path / "net") in out and "SHARED" in out


def test_list_shows_who_answers(call, user, tmp_path):
    slow = measurement(CONV, config={"tile": 4}, gain=(1.2, 1.1, 1.3))
    fast = measurement(CONV, config={"tile": 8}, gain=(1.5, 1.4, 1.6))
    loser = measurement(problem("Abs"), config={"tile": 2}, gain=(0.9, 0.8, 1.0))
    other = measurement(problem("Exp"), where=FOREIGN, solver="triton.exp", config={"block": 64})
    user.add([slow, fast, loser])
    system(tmp_path, measurement(CONV, config={"tile": 16}, gain=(3.0, 2.9, 3.1)), other)
    code, out, err = call("list")
    assert code == 0 and not err
    assert "null.any tile=8" in out and "1.50x" in out and "1.40-1.60" in out
    assert "tile=16" not in out, "the user's answer stands above the system's"
    assert "the default stays: not faster" in flat(out)
    assert "Imagined GPU 9000 (gpu, 132 units), Imagined" in out
    assert "3 problems, 2 answers" in out
    assert fast.digest[:10] in out and max(map(len, out.splitlines())) <= 80
    rows = {row["problem"]: row for row in json.loads(call("list", "--json")[1])}
    row = rows[CONV.key()]
    assert row["answer"] == {"solver": "null.any", "config": {"tile": 8}}
    assert row["gain"] == {"median": 1.5, "low": 1.4, "high": 1.6, "pairs": 20}
    assert (row["layer"], row["record"], row["measurements"]) == ("user", fast.digest, 3)
    assert row["where"]["processor"] == "nothing"
    assert rows[problem("Abs").key()]["answer"] is None
    assert rows[problem("Exp").key()]["layer"] == "system"


@pytest.mark.parametrize(
    ("options", "ops"),
    [
        ("", "Abs Exp Relu"),
        ("--op relu", "Relu"),
        ("--op Rel", ""),
        ("--device GPU", "Exp"),
        ("--device GPU.0", "Exp"),
        ("--processor imagined", "Exp"),
        ("--solver triton", "Exp"),
        ("--layer user", "Abs Relu"),
        ("--layer system", "Exp"),
        ("--op exp --device cpu", ""),
    ],
)
def test_filters(call, user, tmp_path, options, ops):
    user.add([measurement(), measurement(problem("Abs"))])
    system(tmp_path, measurement(problem("Exp"), FOREIGN, "triton.exp"))
    rows = json.loads(call("list", "--json", *options.split())[1])
    assert " ".join(sorted(row["problem"].partition("(")[0] for row in rows)) == ops


def test_a_filter_by_solver_does_not_change_the_answer(call, user):
    user.add([measurement(gain=(2.0, 1.9, 2.1)), measurement(solver="other.any", gain=(1.5, 1.4, 1.6))])
    assert json.loads(call("list", "--json", "--solver", "other")[1]) == []


def test_rows_are_limited_and_the_rest_is_counted(call, user):
    user.add([measurement(problem(shape=(n,))) for n in range(1, 8)])
    _, out, _ = call("list", "--count", 3)
    assert out.count("null.any") == 3 and "and 4 more rows (--count 7, or --json)" in out


def test_the_quarantine(call, user):
    user.add([measurement(config={"tile": 8}), fault(config={"tile": 8}, status=Status.WRONG, why="off by 1 %")])
    user.add([fault(problem("Abs"), where=FOREIGN, solver="triton.abs", status=Status.TIMEOUT, why="20 s")])
    _, out, _ = call("list", "--faults")
    assert "off by 1 %" in out and "wrong" in out and "2 faults" in out
    rows = json.loads(call("list", "--faults", "--json", "--device", "gpu")[1])
    assert [(row["status"], row["why"]) for row in rows] == [("TIMEOUT", "20 s")]
    _, out, _ = call("list")
    assert "the default stays: barred: wrong on 2026-11-15" in flat(out)


def test_a_default_that_was_confirmed_is_called_one(call, user):
    user.add([measurement(gain=(1.0, 1.0, 1.0), default=("null.any", ()))])
    _, out, _ = call("list")
    assert "null.any, the default: nothing is faster" in flat(out) and "1.00" not in out
    assert "1 problem, 1 answer, 0 of them faster than the default" in out


def test_what_a_short_search_left_open_says_how_far_it_came(call, user):
    made = measurement(gain=(1.0, 1.0, 1.0), default=("null.any", ()), confirmed=False)
    about = {**made.evidence.environment, EXTENT: "3 of 540 candidates were compared"}
    short = dataclasses.replace(made, evidence=dataclasses.replace(made.evidence, environment=about))
    user.add([short, measurement(config={"tile": 8}, gain=(1.1, 0.9, 1.2))])
    _, out, _ = call("list")
    assert "the default stays: open, 3 of 540 candidates" in flat(out) and "were compared" in flat(out)
    assert max(map(len, out.splitlines())) <= 80


def test_show_a_record(call, user):
    record = measurement(CONV, config={"tile": 8})
    user.add([record])
    code, out, _ = call("show", record.digest[:6])
    assert code == 0
    for text in (CONV.key(), "tile=8", "1.50x (1.40 to 1.60) over null.slow", "confirmed", "1.00x (0.99 to 1.01)",
                 "cold, 3 copies, 1.0 MiB", "quartiles", "▁▅█", "load before 0.10", "20 samples"):  # fmt: skip
        assert text in flat(out), text
    assert record.digest in out, "in one piece at 80 columns"
    assert max(map(len, out.splitlines())) <= 80
    found = json.loads(call("show", record.digest, "--json")[1])
    assert found["records"][0]["digest"] == record.digest
    assert found["records"][0]["evidence"]["samples"] == list(record.evidence.samples)


def test_show_orders_the_records_of_a_problem_and_says_why(call, user, tmp_path):
    records = {
        "best": exact(CONV, {}, "NULL", gain=(2.0, 1.9, 2.1)),
        "elsewhere": measurement(CONV, FOREIGN, "null.any", gain=(9.0, 8.0, 10.0)),
        "gone": measurement(CONV, solver="no.such", gain=(8.0, 7.0, 9.0)),
        "old": exact(CONV, {}, "NULL", gain=(3.0, 2.9, 3.1), date="2026-01-01T00:00:00Z"),
        "open": exact(CONV, {"tile": 1}, "NULL", confirmed=False),
    }
    user.add(records.values())
    system(tmp_path, exact(CONV, {}, "NULL", gain=(5.0, 4.9, 5.1)))
    code, out, _ = call("show", "Relu", "--device", "NULL", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["problem"] == CONV.key() and len(found["records"]) == 6
    assert found["records"][0]["digest"] == records["best"].digest
    worth = {r["digest"]: r["worth"]["NULL"] for r in found["records"]}
    assert worth[records["best"].digest] == "answers, exact"
    assert "another device, processor" in worth[records["elsewhere"].digest]
    assert worth[records["gone"].digest] == "there is no such solver here"
    assert worth[records["old"].digest] == f"{records['best'].digest[:10]} counts for this candidate"
    assert worth[records["open"].digest] == "not confirmed on samples of its own"
    _, out, _ = call("show", "Relu(f32[1,64,56,56])", "--device", "NULL")
    assert out.index(records["best"].digest) < min(out.index(r.digest) for k, r in records.items() if k != "best")


def test_show_asks_where_something_was_measured(call, user, monkeypatch):
    """A record of another way to run on this machine is exact there, whether that is named or not."""
    from tunewright.plugins import single

    record = exact(CONV, {}, "NULL")
    user.add([record])
    monkeypatch.setattr(single, "visible", lambda alternatives=False: ["CPU.HOST", *(["NULL"] * alternatives)])
    named = json.loads(call("show", record.digest, "-d", "NULL", "--json")[1])["records"][0]["worth"]
    found = json.loads(call("show", record.digest, "--json")[1])["records"][0]["worth"]
    assert named == {"NULL": "answers, exact"} and found["NULL"] == named["NULL"] and "miss" in found["CPU.HOST"]
    out = flat(call("show", record.digest)[1])
    assert "NULL: answers, exact" in out and "asked about NULL:" in out and "asked about CPU.HOST:" in out


def test_show_asks_for_as_many_threads_as_a_stream_has(call, user):
    _, out, _ = call("show", _recorded(user), "-d", "CPU")
    _, less, _ = call("show", _recorded(user), "-d", "CPU", "-c", f"NUM_STREAMS={open_device('CPU').target.units}")
    assert ", 1 unit," in less and f"{open_device('CPU').target.units} unit" in out


def _recorded(user):
    record = measurement(CONV)
    user.add([record])
    return record.digest


def test_show_names_an_answer_of_a_neighbouring_shape(call, user):
    near, posed = exact(problem(shape=(4, 3)), {}, "NULL"), problem(shape=(2, 3))
    user.add([near, measurement(posed, solver="no.such")])
    code, out, err = call("show", posed.key(), "--device", "NULL")
    assert code == 0 and f"on NULL {near.digest[:10]} answers, provisional: another problem" in err
    assert near.digest not in out


def test_show_needs_one_problem(call, user):
    user.add([measurement(problem(shape=(n,))) for n in (1, 2)])
    code, _, err = call("show", "relu")
    assert code == 2 and "2 problems fit: Relu(f32[1]) -> f32[1]; Relu(f32[2]) -> f32[2]" in err
    assert call("show", problem(shape=(1,)).key())[0] == 0


def test_show_a_fault_and_a_problem_that_cannot_be_posed(call, user):
    bad = fault(why="signal 11")
    broken = dataclasses.replace(measurement(), problem={"op": "Relu"})
    user.add([bad, broken])
    code, out, err = call("show", "Relu")
    assert code == 0 and "crashed: signal 11" in out and "cannot be posed" in err
    code, out, _ = call("show", bad.digest[:8])
    assert code == 0 and bad.digest in out and broken.digest not in out


def test_stats(call, user, tmp_path):
    user.add([measurement(), measurement(problem("Abs"), gain=(2.5, 2.4, 2.6))])
    user.add([measurement(confirmed=False, config={"t": 1})])
    user.add([fault(status=Status.WRONG, config={"t": 2})])
    system(tmp_path, measurement(problem("Exp"), FOREIGN))
    found = json.loads(call("stats", "--json")[1])
    assert found["layers"]["user"] == {
        "measurements": 3, "confirmed": 2, "problems": 2, "answers": 2, "faster_than_default": 2, "median_gain": 2.0,
        "faults": 1, "surveys": 0, "candidates_seen": 0, "damage": 0,
    }  # fmt: skip
    assert found["records_by"]["op"] == {"Relu": 3, "Abs": 1, "Exp": 1}
    assert found["records_by"]["fault"] == {"wrong": 1}
    assert found["records_by"]["processor"] == {"nothing (null)": 4, "Imagined GPU 9000 (gpu)": 1}
    _, out, _ = call("stats")
    assert "2.00x" in out and "Imagined GPU 9000 (gpu)" in out


def test_log(call, user):
    for n in range(5):
        user.note("tuned", f"problem {n}")
    _, out, _ = call("log", "--count", 2)
    assert "3 earlier lines (--count 5)" in out
    assert out.index("problem 3") < out.index("problem 4") and "problem 2" not in out
    assert [e["what"] for e in json.loads(call("log", "--json", "-n", 1)[1])] == ["problem 4"]


def test_output_is_stable_and_plain_in_a_pipe(call, user):
    user.add([measurement(CONV, config={"tile": n}, gain=(1 + n / 10, 1, 3)) for n in range(9)])
    for command in ("list", "stats", "show Relu --device NULL", "path"):
        first = call(*command.split())
        assert first == call(*command.split()) and "\x1b" not in first[1]


def test_text_of_a_record_cannot_steer_the_terminal(call, user):
    user.add([fault(why="\x1b[2J\x07bell", solver="evil\x1b]0;title\x07")])
    user.add([measurement(where=dataclasses.replace(NULL, processor="\x1b[31mred"))])
    for command in ("list", "list --faults", "stats", "show Relu"):
        _, out, err = call(*command.split())
        assert "\x1b" not in out + err and "\x07" not in out + err
    code, _, err = call("merge", "system", "user")
    assert code == 2 and "\x1b" not in err


# ---- moving --------------------------------------------------------------------------------------------------------


SOFTMAX = problem("Softmax", (8, 1000))


def configs():
    """Some configs that a kernel of this machine has for SOFTMAX."""
    device = open_device("CPU.NATIVE")
    solver = next(s for s in solvers() if s.id == "opencl.softmax")
    return list(solver.space(SOFTMAX, device.target))


@pytest.fixture
def mine():
    """Records of this machine: a kernel with parameters, one without, a fault."""
    fast, slow, bad, *_ = configs()
    return [
        exact(SOFTMAX, fast),
        exact(SOFTMAX, slow, gain=(1.1, 1.05, 1.2)),
        exact(problem(), {}, "CPU.HOST"),
        fault(where=here("CPU.NATIVE"), solver="opencl.softmax", config=bad),
    ]


def test_merge_is_a_union_and_says_what_it_added(call, user, mine, tmp_path):
    SqliteDatabase(tmp_path / "a").add(mine[:2])
    SharedDatabase(tmp_path / "b").add(mine[1:3])
    write_lines(tmp_path / "c.jsonl", mine[3:])
    code, out, _ = call("merge", tmp_path / "a", tmp_path / "b", tmp_path / "c.jsonl", "--dry-run")
    assert code == 0 and "4 records would be added" in out and not list(user)
    code, out, err = call("merge", tmp_path / "a", tmp_path / "b", tmp_path / "c.jsonl")
    assert code == 0 and not err
    assert digests(user) == digests(mine) and "4 records added to" in out
    assert "0 records added" in call("merge", tmp_path / "a")[1]
    assert [(e.action, e.what.partition(" from ")[0]) for e in user.events()] == [("merged", "4 records")]
    assert call("diff", "user", tmp_path / "a" / "kb.sqlite")[0] == 1


def test_what_moves_tells_programs_too(call, user, mine, tmp_path):
    write_lines(tmp_path / "x.jsonl", mine)
    for command in ("merge", "import"):
        found = json.loads(call(command, tmp_path / "x.jsonl", "--dry-run", "--json")[1])
        assert (found["new"], found["damaged"], found["dry_run"]) == (4, 0, True)
        assert [(row["processor"], row["device"], row["new"]) for row in found["sources"]] == [
            (here().processor, "cpu", 1),
            (here("CPU").processor, "cpu", 3),
        ]
    user.add(mine)
    found = json.loads(call("prune", "--faults", "--dry-run", "--json")[1])
    assert (found["by"], found["dropped"], found["of"]) == ({"faults": 1}, 1, 4) and len(list(user)) == 4


def test_merge_in_any_order_gives_the_same(call, mine, tmp_path):
    write_lines(tmp_path / "a.jsonl", mine[:3])
    write_lines(tmp_path / "b.jsonl", mine[1:])
    for folder, order in (("one", "ab"), ("two", "ba"), ("three", "abab")):
        for name in order:
            assert call("merge", tmp_path / f"{name}.jsonl", "-c", f"USER_DB_PATH={tmp_path / folder}")[0] == 0
    for other in ("two", "three"):
        code, out, _ = call("diff", tmp_path / "one", tmp_path / other)
        assert code == 0 and "the answers agree" in out


@pytest.mark.parametrize("command", ["merge", "import"])
def test_another_processor_is_refused_unless_told(call, user, mine, tmp_path, command):
    write_lines(tmp_path / "x.jsonl", [*mine, measurement(problem("Exp"), FOREIGN), fault(where=FOREIGN)])
    code, out, err = call(command, tmp_path / "x.jsonl")
    assert code == 2 and not out
    assert "x.jsonl: holds 2 records of Imagined GPU 9000 (gpu), and this machine has" in err
    assert here().processor in err and "nothing was taken (--any-processor" in err
    assert not list(user) and not (tmp_path / "user").exists()
    code, out, _ = call(command, tmp_path / "x.jsonl", "--any-processor")
    assert code == 0 and len(list(user)) == 6
    assert "Imagined GPU 9000 (gpu)" in out


def test_a_sibling_with_the_same_processor_is_taken(call, user, tmp_path):
    """Other versions of driver or runtime are no other processor."""
    write_lines(tmp_path / "x.jsonl", [measurement(where=dataclasses.replace(here(), software="numpy 9", units=1))])
    assert call("merge", tmp_path / "x.jsonl")[0] == 0 and len(list(user)) == 1


def test_export_and_import_of_records(call, user, mine, tmp_path):
    user.add(mine)
    code, out, _ = call("export", tmp_path / "x.jsonl")
    assert code == 0 and "3 measurements, 1 fault, 0 surveys in" in out
    code, _, err = call("export", tmp_path / "x.jsonl")
    assert code == 2 and "exists already" in err
    there = ["-c", f"USER_DB_PATH={tmp_path / 'other'}"]
    code, out, _ = call("import", tmp_path / "x.jsonl", *there)
    assert code == 0 and "4 records added" in out
    assert digests(SqliteDatabase(tmp_path / "other")) == digests(mine)
    call("export", tmp_path / "y.jsonl", *there)
    assert (tmp_path / "x.jsonl").read_bytes() == (tmp_path / "y.jsonl").read_bytes()
    assert call("export", tmp_path / "z.jsonl", "--op", "Softmax", "--solver", "opencl")[0] == 0
    assert len((tmp_path / "z.jsonl").read_text().splitlines()) == 3 - 1


def test_export_and_import_of_a_tuning_file(call, user, mine, tmp_path):
    user.add(mine)
    code, _, err = call("export", tmp_path / "x.json")
    assert code == 0, err
    sections = json.loads((tmp_path / "x.json").read_text())
    (section,) = sections.values()
    kernels = sorted(entry[0] for name, entry in section.items() if name != "keys")
    assert kernels == ["host.reference", "opencl.softmax"]
    there = ["-c", f"USER_DB_PATH={tmp_path / 'other'}"]
    code, _, err = call("import", tmp_path / "x.json", *there)
    assert code == 0, err
    taken = digests(SqliteDatabase(tmp_path / "other"))
    assert taken == {mine[0].digest, mine[2].digest}, "the answers alone"
    assert call("diff", tmp_path / "x.json", tmp_path / "other")[0] == 0


def test_damaged_lines_are_named_and_left_out(call, user, mine, tmp_path):
    lines = [to_line(r) for r in mine]
    lines[1] = lines[1].replace('"confirmed":true', '"confirmed":false')
    lines.insert(2, "")
    lines.insert(3, "nonsense")
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
    code, out, err = call("import", tmp_path / "x.jsonl")
    assert code == 1
    assert "line 2: the digest does not match the content" in err and "line 4: " in err and err.count("note: ") == 2
    assert digests(user) == {mine[i].digest for i in (0, 2, 3)}
    assert "3 records added" in out and "left out as damaged: 2" in flat(out)
    (tmp_path / "y.jsonl").write_text("nonsense\n" * 50)
    code, out, err = call("import", tmp_path / "y.jsonl")
    assert code == 1 and "and 40 other" in err and err.count("\n") == 11


HOSTILE = {
    "empty.jsonl": b"",
    "binary.jsonl": bytes(range(256)) * 8,
    "deep.jsonl": b"[" * 100_000,
    "numbers.jsonl": b'{"digest": 1e999, "record": NaN}\n',
    "long.jsonl": b'{"digest":"' + b"a" * 3_000_000,
    "nul.jsonl": b"\0" * 1000,
    "list.json": b"[]",
    "deep.json": b'{"a":' * 100_000,
    "text.json": b"not JSON",
    "openvino.json": b'{"72": {"1234567": ["some_kernel", 3]}}',
    "kb.sqlite": b"SQLite format 3\0" + b"\xff" * 5000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_clear_errors(call, user, tmp_path, name):
    (tmp_path / name).write_bytes(HOSTILE[name])
    command = "merge" if name == "kb.sqlite" else "import"
    code, _, err = call(command, tmp_path / name)
    assert code in ((0,) if name == "empty.jsonl" else (1, 2))
    assert name.startswith("empty") or "tunewright: " in err or "note: " in err
    assert "Traceback" not in err and not list(user)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "system"]), "nothing else is touched"


@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.soak)])
def test_mutated_imports(call, user, mine, tmp_path, count):
    rng = random.Random(0)
    whole = "".join(f"{to_line(r)}\n" for r in mine).encode()
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        (tmp_path / "x.jsonl").write_bytes(data)
        code, _, err = call("import", tmp_path / "x.jsonl")
        assert code in (0, 1, 2) and "Traceback" not in err
    assert digests(user) <= digests(mine), "nothing but what was written is ever taken"


def test_a_folder_that_cannot_be_written(call, mine, tmp_path):
    (tmp_path / "file").write_text("")
    write_lines(tmp_path / "x.jsonl", mine)
    code, _, err = call("merge", tmp_path / "x.jsonl", "-c", f"USER_DB_PATH={tmp_path / 'file'}")
    assert code == 2 and "cannot be written" in err and err.count("\n") == 1


def test_diff(call, user, mine, tmp_path):
    better = exact(SOFTMAX, configs()[-1], gain=(3.0, 2.9, 3.1))
    user.add(mine)
    write_lines(tmp_path / "x.jsonl", [mine[0], mine[2], better])
    code, out, _ = call("diff", "user", tmp_path / "x.jsonl")
    assert code == 1 and max(map(len, out.splitlines())) <= 80
    assert "1 problem with other answers" in flat(out)
    for side, record in (("A", mine[0]), ("B", better)):
        assert f"{side}: opencl.softmax {config_text(record.config)} {record.evidence.gain.median:.2f}x" in flat(out)
    found = json.loads(call("diff", "user", tmp_path / "x.jsonl", "--json")[1])
    assert set(found["only_a"]) == {mine[1].digest, mine[3].digest} and found["only_b"] == [better.digest]
    assert found["answers"][0]["b"] == ["opencl.softmax", dict(better.config)]
    code, out, _ = call("diff", "user", "user")
    assert code == 0 and "the answers agree" in out


# ---- tending -------------------------------------------------------------------------------------------------------


def test_prune(call, user):
    old = measurement(date="2020-01-01T00:00:00Z")
    new = measurement(gain=(0.9, 0.8, 1.0))
    strange = measurement(problem("Abs"), solver="no.such", date="2021-01-01T00:00:00Z")
    bad = fault(date="2020-01-01T00:00:00Z")
    user.add([old, new, strange, bad])
    code, out, _ = call("prune", "--superseded", "--unknown-solvers", "--dry-run")
    assert code == 0 and "2 records would be dropped of 4" in out and len(list(user)) == 4
    assert call("prune", "--superseded")[0] == 0
    assert digests(user) == digests([new, strange, bad])
    code, out, _ = call("prune", "--faults", "--older-than", 100_000)
    assert code == 0 and "0 records dropped of 3" in out, "an age narrows what the others name"
    assert call("prune", "--faults", "--unknown-solvers", "--older-than", 30)[0] == 0
    assert digests(user) == {new.digest}
    assert call("prune", "--older-than", 0)[0] == 0 and not list(user)
    assert [e.action for e in user.events()] == ["pruned"] * 3


def test_prune_makes_shared_folders_compact(call, tmp_path):
    shared = ["-c", f"USER_DB_PATH={tmp_path / 'net'}", "-c", "USER_DB_MODE=SHARED"]
    for n in range(4):
        SharedDatabase(tmp_path / "net").add([measurement(problem(shape=(n + 1,)))])
    code, _, err = call("prune", "--older-than", 100_000, *shared)
    assert code == 0, err
    assert len(list(SharedDatabase(tmp_path / "net"))) == 4


# ---- the order of answers is the one of the lookup -----------------------------------------------------------------


def test_answers_are_those_of_the_lookup():
    """`list` asks no device; where keys fit exactly it must say what `Lookup` would."""
    from tunewright.search.space import Config, Space
    from tunewright.solvers.base import Problem, Solver

    class Any(Solver):
        id = "any"
        ops = None

        def why_not(self, problem, target):
            return None

        def space(self, problem, target):
            return Space({"tile": [1, 2, 3]})

        def compile(self, problem: Problem, config, device):
            raise AssertionError

    solver, device = Any(), open_device("NULL")
    rng = random.Random(1)
    posed = problem()
    for _ in range(200):
        layers = {}
        for name in ("user", "system"):
            layers[name] = MemoryDatabase(
                exact(
                    posed, {"tile": rng.randint(1, 3)}, "NULL", solver=solver, confirmed=rng.random() < 0.8,
                    gain=(g := rng.choice([0.9, 1.0, 1.1, 1.5]), g - 0.05 * rng.randint(0, 2), g + 0.1),
                    date=f"2026-01-0{rng.randint(1, 9)}T00:00:00Z", regime=rng.choice(["cold", "warm"]),
                    seconds=rng.choice([1e-4, 2e-4]), default=("any", {"tile": 1}),
                )
                for _ in range(rng.randint(0, 6))
            )  # fmt: skip
            if rng.random() < 0.2:
                layers[name].add([fault(posed, solver="any", config={"tile": rng.randint(1, 3)})])
        answer = Lookup([KnowledgeLayer(*pair) for pair in layers.items()]).ask(
            posed, device.target, [solver], lambda s: None, ("any", Config(tile=1))
        )
        rows = known(layers)
        mine = [(s.layer, s.record.digest) for row in rows for s in row.standings if not s.why]
        assert mine == [(f.layer, f.measurement.digest) for f in answer.found]


def test_texts():
    assert problem_text(CONV.key()) == "Relu(f32[1,64,56,56]) -> f32[1,64,56,56] | Neg | Abs"
    text = "Conv(float16[1,2]@nhwc, bfloat16[3]!, int64[2]!=[1, 2]) -> uint8[4] {a='}', b={c}} | Add(-1, 2){x=1}"
    assert problem_text(text).startswith("Conv(f16[1,2]@nhwc, bf16[3], i64[2]=[1, 2]) -> u8[4]")
    assert len(problem_text("x" * 1000)) < 200
    assert sparkline([1, 1, 1]) == "▁▁▁" and sparkline([1, 2]) == "▁█" and sparkline([]) == ""
    assert len(sparkline(range(256))) == 32
    assert safe("a\x1b\nb") == "a\\x1b\\x0ab"


def test_a_stored_problem_must_be_the_one_of_the_key():
    from tunewright.tools.kb.ask import pose

    assert pose(measurement()).key() == problem().key()
    with pytest.raises(TunewrightError, match="differs from its key"):
        pose(dataclasses.replace(measurement(), problem=measurement(problem("Abs")).problem))
