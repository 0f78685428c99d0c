"""Document 002 step by step, by environment variables alone: incremental tuning, both exhaustive methods, post tuning.

The knowledge bases, the lookup and the policy are the real ones; `load` stands for a program that meets problems, and
measures nothing: what a search would add is made up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from faults.tuning_files import measurement, problem, target
from tunewright.knowledge import open_databases
from tunewright.knowledge.record import to_line
from tunewright.settings import Settings
from tunewright.solvers.base import solvers
from tunewright.tuning.lookup import KnowledgeLayer, Lookup
from tunewright.tuning.policy import decide

#: sizes of problems: two that ship with the system, two that nobody knows, one next to a known one
SHIPPED, NEW, NEAR = (64, 512), (4096, 32768), (96,)
EVERY = (*SHIPPED, *NEW, *NEAR)
FINDS = ("NORMAL", "FAST", "HYBRID", "DYNAMIC_HYBRID")


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation whose system knowledge base knows some problems; no variable is set."""
    for name in list(os.environ):
        if name.startswith("TUNEWRIGHT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    data = tmp_path / "installed" / "data"
    data.mkdir(parents=True)
    (data / "system.jsonl").write_text("".join(to_line(measurement("MatMul", n, rank=1)) + "\n" for n in SHIPPED))
    monkeypatch.setattr(open_databases, "SHIPPED", data)
    monkeypatch.setattr(open_databases, "_OPEN", {})
    return data


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch):
    """``export(NAME=value)`` and, with None, ``unset NAME``."""

    def change(**variables: str | Path | None) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(f"TUNEWRIGHT_{name}", raising=False)
            else:
                monkeypatch.setenv(f"TUNEWRIGHT_{name}", str(value))

    return change


def load(sizes: Sequence[int], searched_rank: int = 2) -> dict[int, str]:
    """A new process meets problems: for each, who answers in the end; "search" where a search came first."""
    open_databases._OPEN.clear()
    settings = Settings.from_environment()
    made, user, here = decide(settings), open_databases.open_user(settings), target()
    lookup = Lookup([KnowledgeLayer("user", user), KnowledgeLayer("system", open_databases.open_system(settings))])
    heuristic = (open_databases.system_folder(settings) / "system.jsonl").exists()  # it lies beside the entries
    answers = {}
    for n in sizes:
        posed = problem("MatMul", n)
        if made.delete:
            user.remove([r.digest for r in user if r.key.problem == posed.key()])
        best = lookup.ask(posed, here, solvers(), lambda s, posed=posed: s.why_not(posed, here)).best
        if made.wanted(best.match.kind if best else None, from_heuristic=best is None and heuristic):
            assert made.strategy(posed.op) is not None
            user.add([measurement("MatMul", n, rank=searched_rank)])
            answers[n] = "search"
        else:
            answers[n] = f"{best.layer} {best.match.kind}" if best else "heuristic" if heuristic else "default"
    return answers


def known(folder: Path) -> set[str]:
    """The problems that a user's knowledge base holds."""
    open_databases._OPEN.clear()
    database = open_databases.open_user(Settings.make({"USER_DB_PATH": str(folder)}, Settings()))
    return {record.key.problem for record in database}


def keys(sizes: Sequence[int]) -> set[str]:
    return {problem("MatMul", n).key() for n in sizes}


def test_by_default_nothing_is_tuned() -> None:
    answers = load(EVERY)
    assert [answers[n] for n in SHIPPED] == ["system exact"] * 2
    assert [answers[n] for n in NEW] == ["heuristic"] * 2
    assert [answers[n] for n in NEAR] == ["system provisional"]
    assert known(open_databases.user_folder(Settings())) == set()


@pytest.mark.parametrize("enforce", ["3", "SEARCH"])
def test_incremental_tuning(enforce: str, tmp_path: Path, export) -> None:
    """ "Tuning is conducted once for each missing shape and the results are saved to the user DB." """
    export(FIND_ENFORCE=enforce, USER_DB_PATH=tmp_path / "user")
    first = load(EVERY)
    assert [first[n] for n in SHIPPED] == ["system exact"] * 2
    assert [first[n] for n in (*NEW, *NEAR)] == ["search"] * 3
    assert known(tmp_path / "user") == keys((*NEW, *NEAR))
    again = load(EVERY)
    assert [again[n] for n in (*NEW, *NEAR)] == ["user exact"] * 3
    assert [again[n] for n in SHIPPED] == ["system exact"] * 2


def test_the_default_folder_is_the_users_own(tmp_path: Path, export) -> None:
    export(FIND_ENFORCE=3)
    assert open_databases.user_folder(Settings.from_environment()).is_relative_to(tmp_path / "home")
    load(NEW)
    assert load(NEW) == dict.fromkeys(NEW, "user exact")


@pytest.mark.parametrize("find", [None, *FINDS])
def test_exhaustive_method_1(find: str | None, tmp_path: Path, installed: Path, export) -> None:
    """ "Redirecting the system DB path causes [it] to miss system entries and heuristic models, forcing a user DB entry
    to be generated. Each unique configuration is tuned exactly once." """
    before = (installed / "system.jsonl").read_bytes()
    export(FIND_ENFORCE=3, USER_DB_PATH=tmp_path / "user", FIND_MODE=find)
    export(SYSTEM_DB_PATH=os.environ["TUNEWRIGHT_USER_DB_PATH"])
    assert open_databases.system_folder(Settings.from_environment()) == tmp_path / "user"
    far = (*SHIPPED, *NEW)  # far from each other: no answer is provisional, so that FIND_MODE makes no difference
    assert load(far) == dict.fromkeys(far, "search")
    assert load((*far, *far)) == dict.fromkeys(far, "user exact")
    assert known(tmp_path / "user") == keys(far)
    assert (installed / "system.jsonl").read_bytes() == before


def test_exhaustive_method_2(tmp_path: Path, installed: Path, export) -> None:
    """FIND_ENFORCE 4: every shape is tuned, known or not, as often as it is met."""
    before = (installed / "system.jsonl").read_bytes()
    export(FIND_ENFORCE=4, USER_DB_PATH=tmp_path / "user")
    for _ in range(2):
        assert load(EVERY) == dict.fromkeys(EVERY, "search")
    assert known(tmp_path / "user") == keys(EVERY)
    assert (installed / "system.jsonl").read_bytes() == before


@pytest.mark.parametrize("method", [1, 2])
def test_post_tuning(method: int, tmp_path: Path, export) -> None:
    """ "Unset [...] to return to the default behavior. The tuning entries created in the user database directory are
    preferred over the system entries. This path must continue to point to the newly created database files." """
    user = tmp_path / "user"
    export(FIND_MODE="NORMAL", FIND_ENFORCE=3 if method == 1 else 4, USER_DB_PATH=user)
    export(SYSTEM_DB_PATH=user if method == 1 else None)
    assert load(EVERY) == dict.fromkeys(EVERY, "search")
    export(FIND_MODE=None, FIND_ENFORCE=None, SYSTEM_DB_PATH=None)
    settings = Settings.from_environment()
    assert decide(settings) == decide(Settings()) and open_databases.system_folder(settings) != user
    assert load(EVERY) == dict.fromkeys(EVERY, "user exact")
    # a shape that was not tuned is answered as before, and not tuned
    assert load([10**6]) == {10**6: "heuristic"}
    export(USER_DB_PATH=None)
    assert load(SHIPPED) == dict.fromkeys(SHIPPED, "system exact")


def test_when_all_is_tuned_the_variables_make_no_difference(tmp_path: Path, export) -> None:
    """ "The behavior when these are set is expected to be the same as the default when all shapes are tuned." """
    export(FIND_ENFORCE=3, USER_DB_PATH=tmp_path / "user")
    load(EVERY)
    default = {}
    for find in FINDS:
        for enforce in (None, "1", "2", "3"):
            export(FIND_MODE=find, FIND_ENFORCE=enforce)
            default[find, enforce] = load(EVERY)
    assert len({str(answers) for answers in default.values()}) == 1


def test_db_clean_deletes_in_the_users_knowledge_base_alone(tmp_path: Path, installed: Path, export) -> None:
    export(FIND_ENFORCE=4, USER_DB_PATH=tmp_path / "user")
    load(EVERY)
    export(FIND_ENFORCE=5)
    assert load(SHIPPED) == dict.fromkeys(SHIPPED, "system exact")
    assert known(tmp_path / "user") == keys((*NEW, *NEAR))
    assert len((installed / "system.jsonl").read_text().splitlines()) == len(SHIPPED)


def test_tuning_that_is_switched_off_still_answers(tmp_path: Path, export) -> None:
    export(FIND_ENFORCE=3, USER_DB_PATH=tmp_path / "user")
    load(NEW)
    export(FIND_ENFORCE=4)
    for switched_off in ({"TUNING_MODE": "TUNING_DISABLED"}, {"TUNING_MODE": None, "AUTO_TUNE_MODE": "NO_TUNE"}):
        export(**switched_off)
        assert load(NEW) == dict.fromkeys(NEW, "user exact")
        assert "wins over FIND_ENFORCE 4" in decide(Settings.from_environment()).warnings[0]


# ---- TUNE_BANK_PATH, as document 004 has it -------------------------------------------------------------------------


def test_tune_bank_path_is_the_same_folder(tmp_path: Path, export) -> None:
    export(FIND_ENFORCE=3, TUNE_BANK_PATH=tmp_path / "bank")
    load(NEW)
    assert known(tmp_path / "bank") == keys(NEW)
    export(TUNE_BANK_PATH=None, USER_DB_PATH=tmp_path / "bank", FIND_ENFORCE=None)
    assert load(NEW) == dict.fromkeys(NEW, "user exact")


def test_user_db_path_wins_with_a_warning(tmp_path: Path, export) -> None:
    export(FIND_ENFORCE=3, TUNE_BANK_PATH=tmp_path / "bank", USER_DB_PATH=tmp_path / "user")
    load(NEW)
    assert known(tmp_path / "user") == keys(NEW) and not (tmp_path / "bank").exists()
    warnings = decide(Settings.from_environment()).warnings
    assert len(warnings) == 1 and "TUNE_BANK_PATH" in warnings[0] and "USER_DB_PATH is used" in warnings[0]


def test_an_unset_variable_in_method_1_is_an_error_not_a_folder(export) -> None:
    """``SYSTEM_DB_PATH="$USER_DB_PATH"`` without the other: it must not silently tune nothing, or the wrong folder."""
    from tunewright.errors import SettingsError

    export(FIND_ENFORCE=3, SYSTEM_DB_PATH="")
    with pytest.raises(SettingsError, match="SYSTEM_DB_PATH is empty"):
        Settings.from_environment()
