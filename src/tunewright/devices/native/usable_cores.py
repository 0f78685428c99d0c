"""The cores that this process may use: affinity, the container's share of time, and NUMA nodes."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from ..build_options import cpu_list

_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_NODES = Path("/sys/devices/system/node")


def allowed() -> list[int]:
    """Return the processors that this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def nodes(folder: Path = _NODES) -> list[set[int]]:
    """Return the usable cores of each NUMA node, in the order of nodes. Empty if the system does not tell."""
    mine, found = set(allowed()), []
    for file in sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[4:])):
        with contextlib.suppress(OSError, ValueError):
            found.append(cpu_list(file.read_text("ascii")) & mine)
    return [cores for cores in found if cores]


def quota(root: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> float | None:
    """Return how many processors' time the container may use, the least of all groups around it; None: no limit."""
    found = (_share(folder) for folder in _groups(root, membership))
    return min((share for share in found if share is not None), default=None)


def _share(folder: Path) -> float | None:
    """Return the share of processor time of one group, from the files of cgroup v2 or v1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            most, period = " ".join((folder / name).read_text("ascii") for name in names).split()[:2]
            # "max" or -1 means no limit.
            return int(most) / int(period) if most != "max" and int(most) > 0 and int(period) > 0 else None
    return None


def _groups(root: Path, membership: Path) -> list[Path]:
    """Return the folders of the process's group and of all groups above it."""
    found = {root, root / "cpu", root / "cpu,cpuacct"}
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = membership.read_text("utf-8", "surrogateescape").splitlines()
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Next to v1, v2 has a folder of its own. A container may see its own group as the root.
        for base in (root / controllers,) if controllers else (root, root / "unified"):
            parts = [part for part in path.split("/") if part and part != ".."]
            found |= {base.joinpath(*parts[:n]) for n in range(len(parts) + 1)}
    return sorted(found)


def count() -> int:
    """Return the default number of threads of an inference: a core each, within the container's share of time."""
    cores, share = len(allowed()), quota()
    return cores if share is None else max(1, min(cores, math.ceil(share - 0.05)))


def places(mode: str, workers: int) -> list[tuple[int, frozenset[int]]]:
    """Return for each worker the core that it is bound to (-1: none) and the cores that it may use; CPU_BIND_THREADS.

    Workers get a core each only if there is one for each core that the process may use. Otherwise, several processes
    with few workers each would all take the same cores.
    """
    cores, there = allowed(), nodes()
    anywhere = (-1, frozenset(cores))
    if mode == "NUMA" and len(there) > 1:
        order = [frozenset(node) for node in there for _ in node]
        return [(-1, order[n % len(order)]) for n in range(workers)]
    if mode == "NO" or workers < len(cores):
        return [anywhere] * workers
    return [(core, frozenset({core})) for core in cores[:workers]]
