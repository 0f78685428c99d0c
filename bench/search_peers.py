"""Our strategies and those of kernel_tuner 1.5 on recorded tables, by the same measure.

    pip install kernel_tuner==1.5 pymoo            (in an environment of its own; ours needs only numpy there)
    export PYTHONPATH=src
    python bench/search_peers.py run TABLES... --out runs.jsonl --seeds 100 --strategies auto,kt:genetic_algorithm
    python bench/search_peers.py show runs.jsonl

`run` appends a line for every (table, strategy, seed) and skips those that the file already holds, so it can be stopped
and resumed. A name with "kt:" in front is kernel_tuner's, run through its own `tune_kernel` in simulation mode. The
cache file is read and the search space built once a table; what the space remembers of a run (the neighbours that were
drawn) is cleared before the next, because it changes what some strategies find. ``--fresh`` builds the space for
every run instead, to check that this is the same.

An evaluation is a config that was not evaluated before in the run, also one that fails, for both sides. A run has 200
evaluations and is read off at 25, 50, 100 and 200; simulated annealing, whose schedule depends on the budget, is run
for each budget. `show` prints optimum / best found: the median over seeds, then the mean over tables.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import random
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tunewright.search import Config
from tunewright.testing.replay import Table, load, replay

BUDGETS = (25, 50, 100, 200)
BUDGET_AWARE = {"kt:simulated_annealing"}
Curve = Callable[[str, int, int], "np.ndarray[Any, Any]"]


def forget_neighbours(space: Any) -> Any:
    """Bring a used search space of kernel_tuner back to the state of a new one."""
    memory = space.__dict__
    for name in ("_Searchspace__neighbor_cache", "_Searchspace__neighbor_partial_cache"):
        memory[name] = {
            method: type(known)(*filter(None, [getattr(known, "default_factory", None)]))
            for method, known in memory[name].items()
        }
    return space


def kernel_tuner_curves(path: Path, table: Table, fresh: bool) -> Curve:
    """A function (strategy, seed, budget) -> curve for kernel_tuner on one table."""
    import kernel_tuner.interface as interface
    from kernel_tuner import util
    from kernel_tuner.searchspace import Searchspace

    raw = path.read_bytes()
    plain = Path(tempfile.mkdtemp()) / f"{path.name.split('.')[0]}.json"
    plain.write_bytes(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    cache = util.read_cache(str(plain), open_cache=False)
    arguments = {**util.infer_args_from_cache(cache), "objective": "time", "objective_higher_is_better": False}
    restrictions = [util.infer_restrictions_from_cache(cache)]
    shared: dict[str, Any] = {}

    def once(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def get(*args: Any, **kwargs: Any) -> Any:
            if name not in shared:
                shared[name] = make(*args, **kwargs)
            return shared[name]

        return get

    process = getattr(util.process_cache, "original", util.process_cache)
    shared_process = once("cache", process)
    shared_process.original = process  # type: ignore[attr-defined]

    def curve(strategy: str, seed: int, budget: int) -> np.ndarray[Any, Any]:
        shared_space = once("space", Searchspace)
        interface.Searchspace = Searchspace if fresh else lambda *a, **k: forget_neighbours(shared_space(*a, **k))
        util.process_cache = shared_process
        util.close_cache = lambda *_, **__: None
        random.seed(seed)
        np.random.seed(seed)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results, _ = interface.tune_kernel(
                **arguments,
                cache=str(plain),
                restrictions=restrictions,
                simulation_mode=True,
                quiet=True,
                strategy=strategy,
                strategy_options={"max_fevals": budget},
            )
        costs: dict[tuple[Any, ...], float] = {}
        for result in results:
            config = {name: result[name] for name in table.space.names}
            if config in table.space:
                costs.setdefault(tuple(config.values()), table.trials[Config(config)].cost)
        return table.optimum / np.minimum.accumulate(np.array([*costs.values()] or [np.inf]))

    return curve


def our_curves(table: Table) -> Curve:
    return lambda strategy, seed, budget: replay(table, strategy, seed=seed, budget=budget).curve


def run(paths: list[Path], strategies: list[str], seeds: int, out: Path, fresh: bool) -> None:
    done = {(r["table"], r["strategy"], r["seed"], r["budget"]) for r in read(out)} if out.exists() else set()
    with out.open("a") as file:
        for path in paths:
            table, name = load(path), path.name.split(".")[0]
            ready: dict[str, Curve] = {}
            for strategy in strategies:
                side, _, plain = strategy.rpartition(":")
                for seed in range(seeds):
                    for budget in BUDGETS if strategy in BUDGET_AWARE else BUDGETS[-1:]:
                        if (name, strategy, seed, budget) in done:
                            continue
                        if side not in ready:
                            ready[side] = kernel_tuner_curves(path, table, fresh) if side else our_curves(table)
                        curve = ready[side](plain, seed, budget)
                        at = {b: float(curve[min(b, len(curve)) - 1]) for b in BUDGETS if b <= budget}
                        line = {"table": name, "strategy": strategy, "seed": seed, "budget": budget}
                        file.write(json.dumps({**line, "n": len(curve), "at": at}) + "\n")
                file.flush()
                print(f"{name}: {strategy}", flush=True)


def read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        yield from map(json.loads, file)


def show(paths: list[Path]) -> None:
    found: dict[str, dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        for line in read(path):
            for budget in BUDGETS:
                exact = line["strategy"] not in BUDGET_AWARE or line["budget"] == budget
                if exact and str(budget) in line["at"]:
                    found[line["strategy"]][line["table"], budget].append(line["at"][str(budget)])
    tables = sorted({table for runs in found.values() for table, _ in runs})
    print(f"optimum / best found at {BUDGETS}: median over seeds, mean over {len(tables)} tables")
    means = {}
    for strategy, runs in found.items():
        covered = [table for table in tables if (table, BUDGETS[0]) in runs]
        means[strategy] = [np.mean([np.median(runs[table, budget]) for table in covered]) for budget in BUDGETS]
        note = "" if covered == tables else f"  only {len(covered)} tables"
        note = f"  {min(map(len, runs.values()))} seeds{note}"
        print(f"  {strategy:28s}" + "".join(f" {x:.3f}" for x in means[strategy]) + note)
    for table in tables:
        print(table)
        for strategy, runs in found.items():
            if (table, BUDGETS[0]) in runs:
                print(f"  {strategy:28s}" + "".join(f" {np.median(runs[table, b]):.3f}" for b in BUDGETS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "show"])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs.jsonl"))
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--strategies", default="auto,genetic,random,kt:adaptive_tabu_greywolf,kt:genetic_algorithm")
    parser.add_argument("--fresh", action="store_true", help="build kernel_tuner's search space anew for every run")
    args = parser.parse_args()
    if args.action == "run":
        run(args.paths, args.strategies.split(","), args.seeds, args.out, args.fresh)
    else:
        show(args.paths)


if __name__ == "__main__":
    main()
