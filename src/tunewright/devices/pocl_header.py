"""Of OpenCL's header, what a program names. PoCL reads the whole of it before every program.

It is a megabyte with 14,000 declarations: 0.1 of the 0.12 seconds that a small program takes to build. Here a program
is given all declarations of every name in its text, and no others. So each call finds the same candidates as before,
and what PoCL makes is the same to the last instruction. A name that is not in the text as such, since a macro puts it
together, is not declared: that is an error, and the program is built anew with the whole header.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

#: an option with which PoCL leaves the header out
LEFT_OUT = "-D_OPENCL_H_"
#: where the library that comes in a wheel looks for its headers, and the files that include each other
_FOLDERS = ("../../pocl_binary_distribution/.libs/share/pocl/include", "share/pocl/include")
_OUTER, _WHOLE, _BASE = "_clang_opencl.h", "opencl-c.h", "opencl-c-base.h"
_GUARD = "#ifndef _OPENCL_H_"
#: PoCL changes these when it has read the header
_CHANGED = re.compile(r"ilogb|ILOGB")
_WORD = re.compile(r"[A-Za-z_]\w*")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_FUNCTION = re.compile(r"\b(?!__attribute__\b)([A-Za-z_]\w*)\s*\(")

#: the directives that a line stands behind: of each condition that is open, #if and perhaps #else
Conditions = tuple[tuple[str, ...], ...]


class Header:
    """Lines of a header, those that declare functions by the function's name; ``first`` stands before all of them."""

    def __init__(self, first: str, text: str) -> None:
        self._lines: list[tuple[Conditions, str]] = [((), first)]
        self._always = [0]
        self._named: dict[str, list[int]] = {}
        conditions: list[tuple[str, ...]] = []
        begun = ""
        for line in _COMMENT.sub(" ", text.replace("\\\n", " ")).split("\n"):
            line = line.strip()
            if line.startswith("#"):
                if begun:
                    raise ValueError(f"a directive within {begun}")
                word = line[1:].split(maxsplit=1)[0]
                if word in ("if", "ifdef", "ifndef"):
                    conditions.append((line,))
                elif word in ("else", "elif"):
                    conditions[-1] += (line,)
                elif word == "endif":
                    conditions.pop()
                else:
                    self._add(tuple(conditions), line, None)
            elif line:
                begun = f"{begun} {line}".lstrip()
                if begun.endswith(";"):
                    name = None if begun.startswith(("typedef", "enum", "struct")) else _FUNCTION.search(begun)
                    self._add(tuple(conditions), begun, name and name[1])
                    begun = ""
        if conditions or begun:
            raise ValueError("a header ends too soon")

    def _add(self, conditions: Conditions, line: str, name: str | None) -> None:
        (self._always if name is None else self._named.setdefault(name, [])).append(len(self._lines))
        self._lines.append((conditions, line))

    def part(self, source: str) -> str:
        """What a source names, and what has no name."""
        wanted = [*self._always]
        for word in set(_WORD.findall(source)):
            wanted += self._named.get(word, ())
        found: list[str] = []
        open_: Conditions = ()
        for at in sorted(wanted):
            conditions, line = self._lines[at]
            if conditions != open_:
                same = 0
                while conditions[: same + 1] == open_[: same + 1] and same < min(len(conditions), len(open_)):
                    same += 1
                found += ["#endif"] * (len(open_) - same)
                found += [directive for each in conditions[same:] for directive in each]
                open_ = conditions
            found.append(line)
        return "\n".join([*found, *["#endif"] * len(open_)])


@cache
def header(library: Path) -> Header | None:
    """The header of PoCL's library; None where it is not beside it, or not as it is known to be."""
    folder = next((place for each in _FOLDERS if (place := library.parent / each).is_dir()), library)
    try:
        outer, whole, base = ((folder / name).read_text() for name in (_OUTER, _WHOLE, _BASE))
        if any(text.count(_GUARD) != 1 for text in (outer, whole)):
            return None
        # The guard would leave all of it out: it becomes a condition that holds.
        outer, whole = (text.replace(_GUARD, "#if 1").replace("#define _OPENCL_H_", "") for text in (outer, whole))
        whole = _included(whole, f'"{_BASE}"', "")
        return Header(base, _included(outer, f"<{_WHOLE}>", whole))
    except (OSError, ValueError, IndexError):
        return None


def _included(text: str, name: str, content: str) -> str:
    before, directive, after = text.partition(f"#include {name}")
    if not directive:
        raise ValueError(f"nothing includes {name}")
    return f"{before}\n{content}\n{after}"


def shorter(source: str, library: Path) -> str | None:
    """The text to build with `LEFT_OUT` in a source's place; None where it takes the whole header."""
    known = None if _CHANGED.search(source) else header(library)
    if known is None:
        return None
    return f"{known.part(source)}\n#pragma OPENCL EXTENSION all : disable\n#line 1\n{source}"
