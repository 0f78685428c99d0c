"""The HTML report: what it shows of a result file, that it needs nothing else, and that nothing in a file gets out."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from tunewright import InputError, tools
from tunewright.tools.tune.report import page
from tunewright.tools.tune.report_data import OPEN, parse
from tunewright.tuning.contest import ContestVerdict
from tunewright.tuning.result_file import SCHEMA

EVIL = "</title><script>alert(1)</script>\" onload='x' & \u202e\x1b[31m"


def trial(seconds, at, solver="opencl.conv", status="OK", why=""):
    return {"solver": solver, "config": {"nb": at}, "status": status, "why": why, "at": at, "seconds": seconds}


def layer(name, seconds, after=None, **members):
    return {
        "problem": f"Conv({name})", "op": "Conv", "command": f"tunewright driver conv --input '{name}'",
        "device": "CPU", "nodes": [name], "seconds": seconds, "after": seconds if after is None else after,
        "floor": seconds / 3, "bound": "arithmetic", "hope": seconds / 2, "budget": 5.0, "skipped": "",
        "reason": "no significant gain", "gain": None, "spent": {}, "network": [], "chosen": None,
        "before": {"solver": "opencl.conv", "config": {"nb": 1}, "origin": "default"},
        "trials": [trial(seconds, n) for n in range(1, 6)], **members,
    }  # fmt: skip


def content(*layers, **members):
    return {
        "schema": SCHEMA, "kind": "model", "state": "finished", "model": "nets/some.onnx", "device": "CPU",
        "where": {"processor": "A processor", "runtime": "a runtime"}, "settings": {}, "environment": {"cores": "2"},
        "date": "2026-01-02T03:04:05+00:00", "budget": 60.0, "elapsed": 50.0, "layers": list(layers),
        "phases": {"profile": 5.0, "search": 30.0, "network": 10.0, "whole": 5.0},
        "result": {"before": 0.02, "after": 0.016, "gain": [1.25, 1.2, 1.3, 40], "error": 1e-6, "undone": []},
        **members,
    }  # fmt: skip


CHOSEN = {"solver": "opencl.fast", "config": {"nb": 4}}
WHOLE = content(
    layer("first", 0.01, 0.006, chosen=CHOSEN, spent={"search": 3.0, "compile": 2.0, "check": 0.5},
          trials=[trial(1e-2, 0.5), trial(6e-3, 1.0), trial(None, 1.5, status="WRONG", why="output 0 differs")]),
    layer("second", 0.006, skipped="no time was left for it", reason="", trials=[]),
    layer("third", 0.003, network=[{**CHOSEN, "gain": [1.1, 0.9, 1.3, 20]}]),
    layer("fourth", 0.001),
    layer("fifth", 0.0005, network=[{**CHOSEN, "gain": [1.1, 1.05, 1.3, 20]}]),
    result={"before": 0.02, "after": 0.016, "gain": [1.25, 1.2, 1.3, 40], "error": 1e-6, "undone": ["Conv(fifth)"]},
)  # fmt: skip


class Page(HTMLParser):
    """Checks that every element ends, and collects texts by heading, tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.parts: dict[str, str] = {}
        self.heading = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag in ("h1", "h2"):
            self.heading = ""

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2"):
            self.heading += data
        elif "style" not in self.open:
            self.parts[self.heading] = self.parts.get(self.heading, "") + " " + data


def test_every_part_is_there():
    parts = Page(page([WHOLE])).parts
    assert "20.00 → 16.00 ms" in parts["some.onnx"] and "1.200 to 1.300 in 40 pairs" in parts["some.onnx"]
    assert "A processor" in parts["some.onnx"] and "2026-01-02 03:04 UTC" in parts["some.onnx"]
    budget = parts["Where the time of tuning went"]
    assert "50.0 s of 60 s" in budget and "searching kernels 30.0 s" in budget and "not used 10.0 s" in budget
    assert "2.0 s went into compiling" in budget and "0.5 s into checking" in budget
    times = parts["Where an inference spends its time"]
    assert re.search(r"first\s.*1\.67×.*second", times) and "48.8%" in times
    assert "1.67×" in parts["How the search went"]
    assert "33% → 56%" in parts["Share of the roofline"] and "by arithmetic" in parts["Share of the roofline"]
    tiers = parts["Where the kernels come from"]
    assert "opencl.fast nb=4" in tiers and "not searched: no time was left for it" in tiers
    assert re.search(r"search\s+1\s+36\.4%\s+default\s+4\s+63\.6%", tiers)
    failed = parts["Candidates that failed"]
    assert "1 of 18" in failed and "wrong" in failed and "output 0 differs (1)" in failed
    undone = parts["What the network did not confirm"]
    assert "1.100× (0.900 to 1.300)" in undone and "taken back: the whole did not gain" in undone
    following = parts["What to tune next"]
    assert f"tunewright tune nets/some.onnx -d {WHOLE['device']} --budget 120s" in following
    assert following.index("second") < following.index("third"), "by what may be saved"
    assert "fourth (33%)" in following and "driver conv --input 'second' --tune" in following


def test_the_command_that_goes_on_is_the_one_that_was_given():
    line = "tunewright tune 'my nets/some.onnx' -d HETERO:GPU.0,CPU -s x=1x3x8x8 -c USER_DB_PATH=/kb"
    assert f"{line} --budget 120s" in Page(page([{**WHOLE, "command": line}])).parts["What to tune next"]


def test_it_needs_nothing_else_and_runs_nothing():
    made = Page(page([WHOLE]))
    assert not made.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not any(name.startswith("on") or name in ("src", "href") for name, _ in made.attributes)
    assert "url(" not in page([WHOLE]) and "@import" not in page([WHOLE])
    assert "prefers-color-scheme: dark" in page([WHOLE])


def test_plots_are_well_formed():
    plots = re.findall(r"<svg.*?</svg>", page([WHOLE]), re.S)
    assert len(plots) == 6  # the budget, four curves, the roofline
    for plot in plots:
        ElementTree.fromstring(plot)
    assert "nan" not in "".join(plots) and "inf" not in "".join(plots)


def test_names_are_texts_whatever_they_hold():
    hostile = json.loads(json.dumps(WHOLE).replace("first", json.dumps(EVIL)[1:-1]).replace("WRONG", "<b>WRONG"))
    hostile |= {"model": EVIL, "device": EVIL, "where": {"processor": EVIL, EVIL: EVIL}, "date": EVIL, "state": EVIL}
    made = page([hostile])
    assert "<script" not in made and "\x1b" not in made and "\u202e" not in made and "<b>WRONG" not in made
    assert not Page(made).tags & {"script"}
    assert not any(name.startswith("on") for name, _ in Page(made).attributes)


@pytest.mark.parametrize("value", [None, -1, "x", [], {}, True, 1e999, [None], {"solver": 3}])
def test_members_of_another_type_count_as_absent(value):
    for name in WHOLE:
        if name not in ("schema", "layers"):
            Page(page([{**WHOLE, name: value}]))
            Page(page([{k: v for k, v in WHOLE.items() if k != name}]))
    for name in WHOLE["layers"][0]:
        changed = [{**WHOLE["layers"][0], name: value}, *WHOLE["layers"][1:]]
        Page(page([{**WHOLE, "layers": changed}]))
    for name in WHOLE["layers"][0]["trials"][0]:
        odd = {**WHOLE["layers"][0]["trials"][0], name: value}
        Page(page([{**WHOLE, "layers": [{**WHOLE["layers"][0], "trials": [odd, *WHOLE["layers"][0]["trials"]]}]}]))


def test_what_is_under_way_stopped_or_empty():
    assert "It is under way: search." in page([content(state="search")])
    assert "It was stopped before the end." in page([content(state="stopped")])
    assert "Tuned while models were loaded" in page([content(kind="online", model=None, result=None)])
    assert "each run once by itself" in page([{**WHOLE, "kind": "problems"}])


def test_several_results_are_one_page():
    made = Page(page([WHOLE, {**WHOLE, "model": "other.onnx"}]))
    links = [value for name, value in made.attributes if name == "href"]
    assert links == ["#t0", "#t1"] and {("id", "t0"), ("id", "t1")} <= set(made.attributes)
    assert "other.onnx" in made.parts["2 tunings"]


def test_what_is_open_follows_the_words_of_sessions():
    for verdict in (ContestVerdict.NOISY, ContestVerdict.SHORT):
        assert any(word in verdict.value for word in OPEN)
    assert not any(word in verdict.value for verdict in (ContestVerdict.GAIN, ContestVerdict.NONE) for word in OPEN)
    few = layer("few", 1.0, open=True)
    rows = parse(
        content(layer("settled", 1.0), few, layer("noisy", 2.0, reason=ContestVerdict.NOISY.value))
    ).following()
    assert [row.name for row in rows] == ["noisy", "few"]


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(WHOLE))
    assert tools.execute(["report", "a.json"]) == 0
    assert Page((tmp_path / "report.html").read_text()).parts
    assert tools.execute(["report", "a.json", "a.json", "-o", "two.html"]) == 0
    assert "2 tunings" in (tmp_path / "two.html").read_text()
    capsys.readouterr()
    assert tools.execute(["report", "a.json", "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "not JSON"), ("[]", "schema"), ("{}", "schema"), ('{"schema": "tunewright.tune/2"}', "tunewright.tune/2"),
     (json.dumps({"schema": SCHEMA}), "layers"), (json.dumps({"schema": SCHEMA, "layers": [1]}), "layers"),
     ("[" * 100_000, "not JSON")],
)  # fmt: skip
def test_what_is_no_result_is_a_mistake(tmp_path, capsys, text, why):
    (tmp_path / "a.json").write_text(text)
    assert tools.execute(["report", str(tmp_path / "a.json"), "-o", str(tmp_path / "x.html")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "a.json" in err and why in err and "tune_result_" in err
    assert not (tmp_path / "x.html").exists()


def test_other_mistakes(tmp_path, capsys):
    assert tools.execute(["report", str(tmp_path / "nowhere.json")]) == 2
    (tmp_path / "a.json").write_text(json.dumps(WHOLE))
    assert tools.execute(["report", str(tmp_path / "a.json"), "-o", str(tmp_path / "no" / "x.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(InputError, match="needs a result"):
        page([])
