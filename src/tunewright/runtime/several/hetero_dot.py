"""Drawings of where nodes run: ``hetero_affinity.dot`` and ``hetero_subgraphs.dot``, for graphviz."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tunewright.ir.graph import Graph, Node, Value
from tunewright.settings import write_dump

from .hetero_split import GraphPart

#: colours of the devices, in order: light ones, for black text
COLOURS = ("#a6cee3", "#fdbf6f", "#b2df8a", "#cab2d6", "#fb9a99", "#ffff99")
#: Graphviz would take minutes for more nodes.
MOST_NODES = 2000
#: seconds that graphviz may take
PATIENCE = 60
_STYLE = "  node [shape=box, style=filled, fillcolor=white, fontname=Helvetica]; edge [fontname=Helvetica, fontsize=9];"


def write(
    folder: str, graph: Graph, labels: Mapping[Node, int], devices: Sequence[str], parts: Sequence[GraphPart]
) -> list[Path]:
    """Write both files, and an SVG of each if graphviz is installed. Return the written paths."""
    texts = {
        "hetero_affinity.dot": affinity_dot(graph, labels, devices),
        "hetero_subgraphs.dot": subgraphs_dot(graph, devices, parts),
    }
    written: list[Path] = []
    for name, text in texts.items():
        path = Path(folder) / name
        write_dump("HETERO_DUMP_GRAPH_DOT", path, text)
        written.append(path)
        if len(graph) <= MOST_NODES and _svg(path):
            written.append(path.with_suffix(".svg"))
    return written


def _svg(path: Path) -> bool:
    """Draw an SVG with graphviz. False: graphviz is missing or failed."""
    dot = shutil.which("dot")
    if dot is None:
        return False
    try:
        done = subprocess.run(
            [dot, "-Tsvg", "-o", str(path.with_suffix(".svg").absolute()), str(path.absolute())],
            capture_output=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def quote(text: str) -> str:
    """Quote a text for graphviz: quotes, backslashes and line ends are literal, and no character ends the text early.
    """
    shown = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return '"' + shown.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def colour(device: int) -> str:
    return f'"{COLOURS[device % len(COLOURS)]}"'


def affinity_dot(graph: Graph, labels: Mapping[Node, int], devices: Sequence[str]) -> str:
    """Draw the nodes in the colour of their device. Edges between devices are bold, with the type of the value."""
    lines = [f"digraph {quote(graph.name)} {{", _STYLE, *_ends(graph), *_legend(devices)]
    ids = {node: f"n{i}" for i, node in enumerate(graph.nodes)}
    for node, key in ids.items():
        label = f"{node.op}\n{node.name}\n{devices[labels[node]]}"
        lines.append(f"  {key} [label={quote(label)}, fillcolor={colour(labels[node])}];")
    sources = _sources(graph, ids)
    for node, key in ids.items():
        for value in dict.fromkeys(v for v in node.inputs if v is not None and v in sources):
            crosses = value.producer is not None and labels[value.producer] != labels[node]
            style = f" [label={quote(str(value.type or '?'))}, style=bold, color=red]" if crosses else ""
            lines.append(f"  {sources[value]} -> {key}{style};")
    return "\n".join([*lines, *_results(graph, sources), "}"]) + "\n"


def subgraphs_dot(graph: Graph, devices: Sequence[str], parts: Sequence[GraphPart]) -> str:
    """Draw a box for each subgraph, with its operations. Edges are the values that subgraphs exchange."""
    lines = [f"digraph {quote(graph.name)} {{", _STYLE, *_ends(graph), *_legend(devices)]
    ids = {node: f"p{k}" for k, part in enumerate(parts) for node in part.nodes}
    for k, part in enumerate(parts):
        counts: dict[str, int] = {}
        for node in part.nodes:
            counts[node.op] = counts.get(node.op, 0) + 1
        ops = [f"{op} x {count}" if count > 1 else op for op, count in counts.items()]
        shown = [*ops[:8], *([f"and {len(ops) - 8} other operations"] if len(ops) > 8 else [])]
        label = "\n".join([f"subgraph {k}: {devices[part.device]}, {len(part.nodes)} nodes", *shown])
        lines.append(f"  p{k} [label={quote(label)}, fillcolor={colour(part.device)}];")
    sources = _sources(graph, ids)
    for k, part in enumerate(parts):
        read = dict.fromkeys(v for node in part.nodes for v in node.inputs if v is not None and v in sources)
        for value in read:
            if sources[value] != f"p{k}":
                label = f"{value.name}\n{value.type or '?'}"
                lines.append(f"  {sources[value]} -> p{k} [label={quote(label)}];")
    return "\n".join([*lines, *_results(graph, sources), "}"]) + "\n"


def _ends(graph: Graph) -> list[str]:
    return [f"  in{i} [label={quote(repr(v))}, shape=oval];" for i, v in enumerate(graph.inputs)]


def _legend(devices: Sequence[str]) -> list[str]:
    rows = [f"    d{i} [label={quote(name)}, fillcolor={colour(i)}];" for i, name in enumerate(devices)]
    return ["  subgraph cluster_devices {", '    label="devices"; fontname=Helvetica;', *rows, "  }"]


def _sources(graph: Graph, ids: Mapping[Node, str]) -> dict[Value, str]:
    found = {v: f"in{i}" for i, v in enumerate(graph.inputs)}
    return found | {v: key for node, key in ids.items() for v in node.outputs}


def _results(graph: Graph, sources: Mapping[Value, str]) -> list[str]:
    lines = []
    for i, (name, value) in enumerate(zip(graph.output_names, graph.outputs, strict=True)):
        lines.append(f"  out{i} [label={quote(name)}, shape=oval];")
        if value in sources:
            lines.append(f"  {sources[value]} -> out{i};")
    return lines
