"""The cores that this process may use: affinity, the container's share of time, and where memory is near."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ..building import cpu_list

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_NODES = Path("/sys/devices/system/node")


def allowed() -> list[int]:
    """Processors that this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def nodes(folder: Path = _NODES) -> list[set[int]]:
    """The cores of each node of memory that this process may use; none where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    mine = os.sched_getaffinity(0)
    found = [cpu_list(file.read_text("ascii")) & mine for file in sorted(folder.glob("node[0-9]*/cpulist"))]
    return [cores for cores in found if cores]


def quota(root: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> float | None:
    """Processors' worth of time that the container may use, the least of all groups around it; None: no bound."""
    found: list[float] = []
    for folder in _groups(root, membership):
        try:
            most, period = (folder / "cpu.max").read_text("ascii").split()[:2]
            if most != "max":
                found.append(int(most) / int(period))
        except (OSError, ValueError):
            found += _quota_v1(folder)
    return min(found, default=None)


def _quota_v1(folder: Path) -> list[float]:
    try:
        most, period = (int((folder / f"cpu.cfs_{name}_us").read_text("ascii")) for name in ("quota", "period"))
    except (OSError, ValueError):
        return []
    return [most / period] if most > 0 and period > 0 else []


def _groups(root: Path, membership: Path) -> list[Path]:
    """Folders of the process's group and of all above it."""
    found = {root, root / "cpu", root / "cpu,cpuacct"}
    try:
        lines = membership.read_text("utf-8").splitlines()
    except OSError:
        return sorted(found)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / controllers
        parts = [p for p in path.split("/") if p and p != ".."]
        if not controllers or "cpu" in controllers.split(","):
            found |= {base.joinpath(*parts[:n]) for n in range(len(parts) + 1)}
    return sorted(found)


def count() -> int:
    """Threads that an inference has unless told otherwise: a core each, within the container's share of time."""
    cores, share = len(allowed()), quota()
    return cores if share is None else max(1, min(cores, math.ceil(share - 0.05)))


def places(mode: str, workers: int) -> list[tuple[int, frozenset[int]]]:
    """For each worker the core that it is bound to (-1: none) and the cores that it may use; CPU_BIND_THREADS.

    Workers have a core each only where there is one for each core that the process may use: else several processes that
    each use a few would all take the same ones.
    """
    cores, there = allowed(), nodes()
    anywhere = (-1, frozenset(cores))
    if mode == "NUMA" and len(there) > 1:
        order = [frozenset(node) for node in there for _ in node]
        return [(-1, order[n % len(order)]) for n in range(workers)]
    if mode == "NO" or workers < len(cores):
        return [anywhere] * workers
    return [(core, frozenset({core})) for core in cores[:workers]]
