"""Prints the graph as stable text (for golden tests and for reading) and as DOT."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from .graph import Fused, Graph, Node, Value

#: returns a remark about a node, or None
Note: TypeAlias = Callable[[Node], str | None]
#: longest list of plain values that is written in full
LONG = 64


def format_attr(value: Any) -> str:
    """One attribute: short values in full, arrays and long lists by type and digest."""
    if isinstance(value, np.ndarray):
        return format_array(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        # an ensemble of trees has lists of millions of elements
        if len(value) > LONG and isinstance(value[0], (int, float, str)):
            return f"list of {format_array(np.asarray(value, object if isinstance(value[0], str) else None))}"
        return "[" + ", ".join(format_attr(v) for v in value) + "]"
    return repr(value) if isinstance(value, (str, bytes)) else str(value)


def format_attrs(attrs: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{k}={format_attr(v)}" for k, v in sorted(attrs.items())) + "}" if attrs else ""


def format_array(array: np.ndarray[Any, Any]) -> str:
    """Write up to eight elements in full and more by digest, so that the text is stable and short."""
    head = f"{array.dtype}{list(array.shape)}"
    if array.size <= 8:
        return f"{head} {array.tolist()}"
    return f"{head} #{digest(array)}"


def digest(array: np.ndarray[Any, Any]) -> str:
    """Twelve hex digits of the contents."""
    if array.dtype == object:
        data = "\0".join(map(str, array.ravel())).encode()
    else:
        data = np.ascontiguousarray(array).tobytes()
    return hashlib.sha256(data).hexdigest()[:12]


def _name(value: Value | None) -> str:
    return "_" if value is None else f"%{value.name}"


def format_epilogue(node: Node) -> str:
    """`` | Add(@, %res) | Relu(@1)``: @ is the main result, @k the result of the k-th fused step."""

    def arg(i: int) -> str:
        return _name(node.inputs[i]) if i >= 0 else "@" + (str(~i) if ~i else "")

    def one(step: Fused) -> str:
        return f" | {step.op}({', '.join(arg(i) for i in step.args)}){format_attrs(step.attrs)}"

    return "".join(one(step) for step in node.epilogue)


def to_text(graph: Graph, indent: str = "", note: Note | None = None) -> str:
    """Return stable text: one line per constant and node, bodies indented below their node, remarks by ``note``."""
    inputs = ", ".join(repr(v) for v in graph.inputs)
    lines = [f"{indent}graph {graph.name}({inputs}) {{"]
    shown: set[Value] = set()
    for node in graph.nodes:
        for value in node.inputs:
            if value is not None and value.const is not None and value not in shown:
                shown.add(value)
                lines.append(f"{indent}  %{value.name} = const {format_array(value.const)}")
        outputs = ", ".join(repr(v) for v in node.outputs)
        args = ", ".join(_name(v) for v in node.main_inputs)
        remark = note(node) if note else None
        tail = f"  # {remark}" if remark else ""
        lines.append(f"{indent}  {outputs} = {node.op}({args}){format_attrs(node.attrs)}{format_epilogue(node)}{tail}")
        for key, body in node.bodies.items():
            lines.append(f"{indent}    {key}:")
            lines.append(to_text(body, indent + "    "))
    lines.extend(
        f"{indent}  %{v.name} = const {format_array(v.const)}"
        for v in dict.fromkeys(graph.outputs)
        if v.const is not None and v not in shown
    )
    returned = ", ".join(
        f"{name}={_name(v)}" if name != v.name else _name(v)
        for name, v in zip(graph.output_names, graph.outputs, strict=True)
    )
    lines.append(f"{indent}  return {returned}")
    lines.append(f"{indent}}}")
    return "\n".join(lines)


def to_dot(graph: Graph, note: Note | None = None) -> str:
    """Return Graphviz text: nodes with their fused steps, edges with their types; ``note`` adds a line to a node."""

    def quote(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'

    ids: dict[Node, str] = {node: f"n{i}" for i, node in enumerate(graph.nodes)}
    style = "  node [shape=box, fontname=Helvetica]; edge [fontname=Helvetica, fontsize=9];"
    lines = [f"digraph {quote(graph.name)} {{", style]
    for i, given in enumerate(graph.inputs):
        lines.append(f"  in{i} [label={quote(repr(given))}, shape=oval];")
    for node, key in ids.items():
        label = "\n+ ".join([node.op, *(step.op for step in node.epilogue)])
        remark = note(node) if note else None
        lines.append(f"  {key} [label={quote(chr(10).join([label, node.name, *([remark] if remark else [])]))}];")
    sources: dict[Value, str] = {v: f"in{i}" for i, v in enumerate(graph.inputs)}
    sources.update({v: ids[node] for node in ids for v in node.outputs})
    for node, key in ids.items():
        for value in node.inputs:
            if value is not None and value in sources:
                lines.append(f"  {sources[value]} -> {key} [label={quote(str(value.type or '?'))}];")
    for i, (name, result) in enumerate(zip(graph.output_names, graph.outputs, strict=True)):
        lines.append(f"  out{i} [label={quote(name)}, shape=oval];")
        if result in sources:
            lines.append(f"  {sources[result]} -> out{i} [label={quote(str(result.type or '?'))}];")
    return "\n".join([*lines, "}"])
