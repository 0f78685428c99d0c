"""What a heuristic predicts, picks and refuses to say; its file; and what the tuner makes of it."""

import dataclasses
import json
import logging
import math
import os
import time

import pytest

from helpers.heuristic_data import SOLVER, TARGET, conv
from helpers.heuristic_made import by_column, heuristic, random_section, section
from tunewright.devices.null import NullDevice
from tunewright.errors import InputError
from tunewright.heuristic import file as heuristic_file
from tunewright.heuristic import find
from tunewright.heuristic.features import Column, features, kind, one_image
from tunewright.heuristic.trees import BEYOND, MARGIN, WITHIN, Listed, SectionScope
from tunewright.knowledge.key import Where
from tunewright.knowledge.record import Ratio
from tunewright.search.base import Status
from tunewright.search.space import Config, Space
from tunewright.settings import Settings
from tunewright.tuning import evidence, knowledge_layers, session
from tunewright.tuning.tuner import Origin
from unit.tuning.test_tuner_with_records import CREATE, DEVICE, HOST, TILED, Tiled, make, measured, problem

#: tests leave no result files where they run
NO_FILE = {"TUNE_RESULT_PATH": ""}
TILE = Column("size", "tile")
TILES = [Listed("tiled", "1.0", Config(tile=n)) for n in (1, 2, 4)]


def tiles(*worth, listed=TILES, **options):
    """Rates tiles of 1, 2 and 4."""
    bare = section(problem(), DEVICE.target, listed, [], **options)
    limits = (math.log2(2.5), math.log2(4), 0.0)
    tree = by_column(bare, TILE, *zip(limits, worth, strict=True))
    return heuristic(section(problem(), DEVICE.target, listed, [tree], **options))


FOUR_IS_BEST = tiles(0.0, 0.5, 1.0)
DEFAULT = ("tiled", Config(tile=1))


def advise(given, asked=None, why_not=lambda solver, config: None, solvers=(TILED,), target=DEVICE.target, **options):
    return given.advise(asked or problem(), target, DEFAULT, solvers, why_not, **options)


# ---- predictions ----------------------------------------------------------------------------------------------------


def walk(section, numbers, candidate):
    """What trees say, the plain way."""
    x = [*numbers.values(), *(c.of(*candidate) for c in section.columns)]
    total = section.base
    for tree in section.trees:
        node = 0
        while tree.feature[node] >= 0:
            node = tree.left[node] if x[tree.feature[node]] <= tree.threshold[node] else tree.right[node]
        total += tree.value[node]
    return total


@pytest.mark.parametrize("seed", range(10))
def test_ratings_are_what_the_trees_say(seed):
    listed = [Listed("abc"[n % 3], "1.0", Config(nb=n % 4, ur=n, form="de"[n % 2])) for n in range(20)]
    one = random_section(seed, conv(64, 64, 56), TARGET, listed, 30, 5)
    for size in (7, 14, 30, 112):
        numbers = features(conv(16, 96, size, 1 + 2 * (seed % 3)), TARGET)
        default = ("d", Config(ur=7))
        ratings, own = one.rate(numbers, default)
        expected = [walk(one, numbers, (c.solver, c.config)) for c in one.shortlist]
        assert ratings == pytest.approx(expected, abs=1e-5)
        assert own == pytest.approx(walk(one, numbers, default), abs=1e-5)


def test_a_problem_takes_less_than_a_millisecond():
    configs = [Config(nb=n % 2 + 1, ur=n % 7 + 1, run=2 ** (n % 7)) for n in range(48)]
    one = random_section(0, conv(64, 64, 56), TARGET, [Listed(SOLVER.id, SOLVER.version, c) for c in configs], 150, 4)
    points = [tuple(features(conv(64 + 8 * n, 64, 50), TARGET).values()) for n in range(400)]
    given = heuristic(dataclasses.replace(one, points=tuple(points), radius=100.0))
    taken = []
    picked = 0
    for n in range(60):
        asked = conv(64 + n, 64 + n % 7, 50 + n % 12)
        default = (SOLVER.id, SOLVER.default(asked, TARGET))
        begin = time.process_time_ns()
        advice = given.advise(asked, TARGET, default, [SOLVER], lambda s, c, p=asked: s.why_not(p, TARGET))
        taken.append(time.process_time_ns() - begin)
        picked += bool(advice.picks)
    assert picked > 20  # it was not spared the work
    assert min(taken) < 1e6 and sorted(taken)[len(taken) // 4] < 2e6


# ---- picks ----------------------------------------------------------------------------------------------------------


def test_the_best_is_picked():
    advice = advise(FOUR_IS_BEST)
    assert advice.picks == ((TILED, Config(tile=4)),) and not advice.abstains
    assert advice.gain == pytest.approx(2.0) and "2.00 times as fast as the default" in advice.why
    assert [dict(config) for _, config in advise(FOUR_IS_BEST, most=3).picks] == [{"tile": 4}, {"tile": 2}]


def test_the_default_stays_unless_something_is_better_by_a_margin():
    for worth in ((1.0, 0.5, 0.0), (0.0, 0.0, math.log2(MARGIN) - 1e-3)):
        advice = advise(tiles(*worth))
        assert not advice.picks and not advice.abstains and advice.gain == 1 and "nothing" in advice.why
    assert advise(tiles(0.0, 0.0, math.log2(MARGIN) + 1e-3)).picks


def test_what_may_not_be_used_is_not_picked():
    barred = advise(FOUR_IS_BEST, why_not=lambda solver, config: "barred" if config["tile"] == 4 else None)
    assert barred.picks == ((TILED, Config(tile=2)),)
    assert not advise(FOUR_IS_BEST, solvers=()).picks
    newer = Tiled()
    newer.version = "1.1"
    assert not advise(FOUR_IS_BEST, solvers=(newer,)).picks
    smaller = Tiled()
    smaller.space = lambda problem, target: Space({"tile": [1, 2]})
    assert advise(FOUR_IS_BEST, solvers=(smaller,)).picks == ((smaller, Config(tile=2)),)


def test_what_is_made_for_one_shape_must_be_worth_it():
    special = Tiled()
    special.id, special.tuned_only = "special", True
    listed = [*TILES, Listed("special", "1.0", Config(tile=4))]
    bare = section(problem(), DEVICE.target, listed, [])
    is_special, steps = Column("solver", "special"), ((math.log2(2.5), 0.0), (math.log2(4), 0.5), (0.0, 1.0))
    for bonus, expected in ((0.01, "tiled"), (0.2, "special")):
        trees = [by_column(bare, TILE, *steps), by_column(bare, is_special, (0.5, 0.0), (0.0, bonus))]
        given = heuristic(section(problem(), DEVICE.target, listed, trees))
        assert [s.id for s, _ in advise(given, solvers=(TILED, special)).picks] == [expected]
        assert {s.id for s, _ in advise(given, solvers=(TILED, special), most=2).picks} == {"tiled", "special"}


# ---- abstaining -----------------------------------------------------------------------------------------------------


def near(target=TARGET):
    """Knows 3x3 convolutions of 64 to 128 channels."""
    listed = [Listed(SOLVER.id, SOLVER.version, Config(nb=2, ur=7, run=4))]
    bare = section(conv(64, 64, 56), target, listed, [])
    points = tuple(
        tuple(features(conv(c, f, s), TARGET).values()) for c in (64, 96, 128) for f in (64, 128) for s in (14, 28, 56)
    )
    tree = by_column(bare, Column("size", "run"), (math.log2(4), 0.0), (0.0, 1.0))
    return heuristic(dataclasses.replace(bare, points=points, trees=(tree,)))


def ask(asked, target=TARGET, given=None):
    default = (SOLVER.id, SOLVER.default(asked, target))
    return (given or near(target)).advise(asked, target, default, [SOLVER], lambda s, c: s.why_not(asked, target))


@pytest.mark.parametrize("asked", [conv(64, 64, 56), conv(96, 96, 30), conv(128, 100, 28), conv(64, 128, 40, 3)])
def test_it_answers_inside_of_its_data(asked):
    advice = ask(asked)
    assert advice.picks and not advice.abstains and "predicted" in advice.why


@pytest.mark.parametrize("asked, why", [
    (conv(4096, 4096, 56), "far from its data: flops"),
    (conv(64, 64, 56, batch=64), "far from its data"),
    (conv(64, 64, 448), "far from its data"),
    (conv(64, 64, 56, kernel=11), "far from its data"),
    (conv(8, 8, 7), "far from its data"),
])  # fmt: skip
def test_it_abstains_far_from_its_data(asked, why):
    advice = ask(asked)
    assert advice.abstains and not advice.picks and why in advice.why


@pytest.mark.parametrize("batch", [4, 8, 16])
def test_a_few_images_are_like_one_on_a_processor(batch):
    """Training is on single images: what is best for one is taken for each of a few."""
    asked = conv(64, 64, 56, batch=batch)
    assert [c for _, c in ask(asked).picks] == [c for _, c in ask(conv(64, 64, 56)).picks] != []
    other = dataclasses.replace(TARGET, device="gpu")
    assert ask(asked, other, near(other)).abstains  # which works on all of them at a time


def test_only_what_is_made_of_images_has_one():
    batch = conv(64, 64, 56, batch=4, kernel=1)
    alone = one_image(batch)
    assert alone is not None and alone.key() == conv(64, 64, 56, kernel=1).key()
    assert one_image(alone) is None and one_image(conv(64, 64, 56, batch=64)) is None
    four = conv(64, 4, 56, batch=4)  # weights begin with a 4, too, and are no images
    assert one_image(four).inputs[1] == four.inputs[1]


def test_a_hole_in_the_data_is_far_too():
    given = near()
    one = given.sections[0]
    low, high = features(conv(64, 64, 56), TARGET), features(conv(256, 256, 14), TARGET)
    ends = dataclasses.replace(one, points=(tuple(low.values()), tuple(high.values())), radius=0.5)
    advice = ask(conv(128, 128, 28), given=heuristic(ends))
    assert advice.abstains and "the nearest problem is" in advice.why
    assert BEYOND > 0 and not ask(conv(64, 64, 56), given=heuristic(ends)).abstains


def test_one_number_between_others_is_far_whatever_the_radius():
    """A radius that one odd problem of the training made large let a product of 9 rows run like one of a single row."""
    one = near().sections[0]
    ends = tuple(tuple(features(conv(channels, 64, 28), TARGET).values()) for channels in (16, 1024))
    given = heuristic(dataclasses.replace(one, points=ends, radius=100.0))
    assert not ask(conv(int(16 * 2**WITHIN), 64, 28), given=given).abstains
    advice = ask(conv(128, 64, 28), given=given)
    assert advice.abstains and "3.0 away from that of the nearest problem" in advice.why


def test_it_abstains_on_what_it_was_not_trained_for():
    image = conv(64, 64, 56)
    plain = dataclasses.replace(
        image, inputs=tuple(dataclasses.replace(t, layout=type(t.layout)()) for t in image.inputs)
    )
    assert kind(plain) != kind(image) and "has not learned about Conv(float32, float32!)" in ask(plain).why
    for changed in (
        {"device": "gpu"}, {"arch": "512-bit vectors"}, {"options": "-O0"}, {"registers": 32}, {"vector_bytes": 64},
        {"software": (("opencl", "Another runtime"),)},
    ):  # fmt: skip
        advice = ask(image, dataclasses.replace(TARGET, **changed), near())
        assert advice.abstains and "no device like this one" in advice.why, changed
    older = dataclasses.replace(near().sections[0], names=("x",) * len(near().sections[0].names))
    assert "other numbers" in ask(image, given=heuristic(older)).why


def test_a_sibling_gets_an_answer_that_says_so():
    sibling = dataclasses.replace(TARGET, name="Another processor", software=(("driver", "9"), ("opencl", "A runtime")))
    advice = ask(conv(64, 64, 56), sibling, near())
    assert advice.picks and "trained on A processor" in advice.why


# ---- the file -------------------------------------------------------------------------------------------------------


def test_a_file_says_the_same():
    given = near()
    again = heuristic_file.parse(heuristic_file.dump(given))
    assert heuristic_file.dump(again) == heuristic_file.dump(given)
    assert ask(conv(64, 64, 56), given=again) == ask(conv(64, 64, 56), given=given)


def test_a_damaged_section_says_nothing_and_the_others_answer(caplog):
    other = dataclasses.replace(near().sections[0], kind="Other")
    text = heuristic_file.dump(dataclasses.replace(near(), sections=(*near().sections, other)))
    first, last = text.splitlines()[1:3]
    assert ask(conv(64, 64, 56), given=heuristic_file.parse_late(text.replace(last, last[:-9]))).picks
    assert not caplog.text  # nobody asked
    late = heuristic_file.parse_late(text.replace(first, first.replace('"radius":', '"radius":"x","was":')), "h.json")
    assert ask(conv(64, 64, 56), given=late).abstains and ask(conv(96, 64, 56), given=late).abstains
    assert caplog.text.count("a part of the heuristic is not used: h.json: ") == 1


def test_what_is_wrong_with_a_file_is_said():
    good = json.loads(heuristic_file.dump(FOUR_IS_BEST))

    def refuse(expected, **changed):
        data = {**good, **{k: v for k, v in changed.items() if k in good}}
        inner = {k: v for k, v in changed.items() if k not in good}
        if inner:
            data["sections"] = [{**good["sections"][0], **inner}]
        with pytest.raises(InputError, match=expected):
            heuristic_file.parse(json.dumps(data))

    refuse("schema", schema="tunewright.heuristic/2")
    refuse("sections is not a list", sections=None)
    refuse("two sections", sections=good["sections"] * 2)
    refuse("two parents", trees=[[[0, 0.5, 1, 1], [0.0]]])
    refuse("belongs to none", trees=[[[0.0], [1.0]]])
    refuse("a child", trees=[[[0, 0.5, 0, 1], [0.0]]])
    refuse("a feature", trees=[[[99, 0.5, 1, 2], [0.0], [1.0]]])
    refuse("a leaf.* is not a number", trees=[[["x"]]])
    refuse("a scale is not above 0", scale=[0.0] * len(good["sections"][0]["numbers"]))
    refuse("a point is not a list", points=[[1.0]])
    refuse("a parameter is not a scalar", shortlist=[["tiled", "1.0", {"tile": [1]}]])
    for text in ("", "[]", "{", '{"schema": NaN}', "[" * 100_000):
        with pytest.raises(InputError):
            heuristic_file.parse(text)


def test_a_damaged_file_is_no_heuristic_and_a_warning(tmp_path, caplog):
    path = tmp_path / "heuristic.json"
    path.write_text("{")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for each in (path, tmp_path, tmp_path / "absent.json", fifo):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tunewright"):
            assert find.open_heuristic(Settings.make({"HEURISTIC_PATH": str(each)}, Settings())) is None
        assert "no heuristic is used" in caplog.text and str(each) in caplog.text


def test_where_it_is_looked_for(tmp_path):
    def write(path, text=None):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text or heuristic_file.dump(FOUR_IS_BEST))
        return path

    folders = {"USER_DB_PATH": str(tmp_path / "user"), "SYSTEM_DB_PATH": str(tmp_path / "system")}
    settings = Settings.make(folders, Settings())
    assert find.heuristic_file(settings) is None and find.open_heuristic(settings) is None
    shipped = write(tmp_path / "system" / "heuristic.json")
    assert find.heuristic_file(settings) == shipped
    mine = write(tmp_path / "user" / "heuristic.json")
    assert find.heuristic_file(settings) == mine and find.open_heuristic(settings).path == str(mine)
    named = write(tmp_path / "other" / "x.json")
    assert find.heuristic_file(Settings.make({**folders, "HEURISTIC_PATH": str(named)}, Settings())) == named
    assert find.heuristic_file(Settings.make({**folders, "HEURISTIC_PATH": ""}, Settings())) is None
    first = find.open_heuristic(settings)
    assert find.open_heuristic(settings) is first
    write(mine, heuristic_file.dump(tiles(0.0, 1.0, 0.5)))
    assert find.open_heuristic(settings) is not first  # it was trained again


# ---- the tuner ------------------------------------------------------------------------------------------------------


def test_it_answers_where_nothing_is_stored():
    for mode in ("TUNING_USE_EXISTING", "TUNING_DISABLED"):
        one = make(Settings.make({"TUNING_MODE": mode}, Settings()), heuristic=FOUR_IS_BEST)
        choice = one.choose(problem(), DEVICE)
        assert (choice.solver, choice.config, choice.origin) == (TILED, {"tile": 4}, Origin.HEURISTIC)
        assert choice.why == "heuristic (predicted 2.00 times as fast as the default)"
        assert "nothing is known" in choice.nearest


def test_what_is_stored_comes_first():
    one = make(records=[measured(2, Ratio(1.3, 1.2, 1.4, 9))], heuristic=FOUR_IS_BEST)
    assert one.choose(problem(), DEVICE).origin is Origin.USER
    settled = measured(1, Ratio.one())
    assert make(records=[settled], heuristic=FOUR_IS_BEST).choose(problem(), DEVICE).config == {"tile": 1}


def test_what_was_measured_as_slower_is_not_picked():
    slower = measured(4, Ratio(0.8, 0.7, 0.9, 9))
    choice = make(records=[slower], heuristic=FOUR_IS_BEST).choose(problem(), DEVICE)
    assert (choice.config, choice.origin) == ({"tile": 2}, Origin.HEURISTIC)


def test_what_is_barred_or_inexact_is_not_picked():
    fault = evidence.fault(problem(), DEVICE.target, TILED, Config(tile=4), Status.WRONG, "an element is missing")
    assert make(records=[fault], heuristic=FOUR_IS_BEST).choose(problem(), DEVICE).config == {"tile": 2}
    rough = Tiled()
    rough.inexact = lambda problem, config: "rounds" if config["tile"] == 4 else None
    for hint, tile in (("PERFORMANCE", 4), ("ACCURACY", 2)):
        settings = Settings.make({"EXECUTION_MODE_HINT": hint}, Settings())
        choice = make(settings, candidates=(rough, HOST), heuristic=FOUR_IS_BEST).choose(problem(), DEVICE)
        assert choice.config == {"tile": tile}


def test_an_abstention_leaves_the_default_and_is_told():
    choice = make(heuristic=heuristic()).choose(problem(), DEVICE)
    assert (choice.config, choice.origin, choice.why) == ({"tile": 1}, Origin.DEFAULT, "default")
    assert choice.advice.abstains and "no device like this one" in choice.advice.why
    worst = make(heuristic=tiles(1.0, 0.5, 0.0)).choose(problem(), DEVICE)
    assert worst.origin is Origin.DEFAULT and "nothing that is faster" in worst.advice.why
    assert make().choose(problem(), DEVICE).advice is None


def test_where_tuning_is_on_a_search_comes_first():
    one = make(CREATE, heuristic=tiles(0.0, 1.0, 0.5))
    choice = one.choose(problem(), DEVICE)
    assert (choice.config, choice.origin) == ({"tile": 4}, Origin.SEARCH)


def test_a_search_begins_with_its_picks():
    tried = []

    class Watched(Tiled):
        def compile(self, problem, config, device):
            tried.append(config["tile"])
            return super().compile(problem, config, device)

        def space(self, problem, target):
            return Space({"tile": list(range(1, 30))})

    watched = Watched()
    listed = [Listed("tiled", "1.0", Config(tile=n)) for n in (1, 27, 29)]
    bare = section(problem(), DEVICE.target, listed, [])
    tree = by_column(bare, TILE, (3.0, 0.0), (math.log2(29), 1.0), (0.0, 0.5))
    given = heuristic(section(problem(), DEVICE.target, listed, [tree]))
    make(CREATE, candidates=(watched, HOST), heuristic=given).choose(problem(), DEVICE)
    assert list(dict.fromkeys(tried))[:3] == [1, 27, 29]


@pytest.mark.parametrize("given, origin", [(FOUR_IS_BEST, Origin.HEURISTIC), (None, Origin.SEARCH)])
def test_fast_is_content_with_it(given, origin):
    knowledge_layers.warn.cache_clear()
    fast = Settings.make({"FIND_MODE": "FAST", "FIND_ENFORCE": "3", "TUNE_SECONDS": "30", **NO_FILE}, Settings())
    assert make(fast, heuristic=given).choose(problem(), DEVICE).origin is origin


def test_a_search_that_is_enforced_stays_in_the_space_of_the_pick(monkeypatch):
    other = Tiled()
    other.id, other.rank = "other", 20
    monkeypatch.setattr(session, "registered", lambda: (TILED, other, HOST))
    listed = [Listed("other", "1.0", Config(tile=2)), Listed("tiled", "1.0", Config(tile=1))]
    bare = section(problem(), DEVICE.target, listed, [])
    given = heuristic(
        section(problem(), DEVICE.target, listed, [by_column(bare, Column("solver", "other"), (0.5, 0.0), (0.0, 1.0))])
    )
    always = Settings.make({"FIND_MODE": "FAST", "FIND_ENFORCE": "4", "TUNE_SECONDS": "30", **NO_FILE}, Settings())
    choice = make(always, candidates=(TILED, other, HOST), heuristic=given).choose(problem(), DEVICE)
    assert (choice.solver.id, choice.config) == ("other", {"tile": 4})


def test_the_host_has_no_say_in_it():
    class Hosted(NullDevice):
        family = "host"
        runs_references = True

    choice = make(candidates=(HOST,), heuristic=FOUR_IS_BEST).choose(problem(), Hosted())
    assert choice.origin is Origin.DEFAULT and choice.advice is None


def test_the_caches_of_a_processor_count_where_its_name_has_them() -> None:
    """What was learned beside a megabyte of second cache is not used beside 256 KiB."""
    named = dataclasses.replace(TARGET, name="EPYC, family 26 model 2, L1 48 KiB, L2 1024 KiB, L3 32768 KiB")
    numbers = features(conv(64, 64, 56), named)
    assert [numbers[name] for name in ("L1", "L2", "L3")] == [math.log2(48), 10.0, 15.0]
    assert "L1" not in features(conv(64, 64, 56), TARGET)
    gpu = dataclasses.replace(named, device="gpu")
    assert "L1" not in features(conv(64, 64, 56), gpu), "sections for GPUs keep the numbers that they were trained on"


def test_extras_of_an_instruction_set_do_not_part_sections() -> None:
    plain, extra = (dataclasses.replace(TARGET, arch=arch) for arch in ("x86-64-v4", "x86-64-v4+avx512vnni"))
    assert SectionScope.of(Where.of(plain)) == SectionScope.of(Where.of(extra)) != SectionScope.of(Where.of(TARGET))
