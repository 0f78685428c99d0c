"""Users' texts in OpenCL C. Clang compiles them as OpenCL C, behind a library of our own (`opencl_c.cl`).

So vector literals, swizzles, vectors of three and address spaces mean what OpenCL says. Work-items of a group run one
after the other. So a text whose work-items wait for each other is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tunewright.errors import SettingsError

from .compiler import OPENCL_C, OPENCL_C_LOOP

#: the function that runs a kernel of such a text over a range of its grid
ENTRY = "tunewright_kernel"
#: the hint for a text that needs more
REMEDY = ("docs/custom-kernels.md lists what the CPU device has; CPU.INTEL has all of OpenCL C: "
          "pip install 'tunewright[intel]'")  # fmt: skip
_HERE = Path(__file__).parent
_INTEGERS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")
_FLOATS = ("float", "double")
_WIDTHS = ("", "2", "3", "4", "8", "16")
_ROUNDINGS = ("rte", "rtz", "rtp", "rtn")
#: functions of the C library that the library and the compiler call, and that OpenCL C does not have
_OWN = (
    "memcpy", "memmove", "memset", "memcmp",
    *(f"{name}f" for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "logb", "cbrt", "sin", "cos", "tan", "asin", "acos",
        "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma", "tgamma", "pow", "atan2",
        "fmod", "remainder", "hypot", "nextafter", "ldexp", "ilogb", "floor", "ceil", "trunc", "rint", "round", "sqrt",
        "fabs", "fma", "copysign",
    )),
)  # fmt: skip
_RENAMED = "ocl_own_"
#: most errors in a message
MOST_ERRORS = 3


def complete(text: str, entry: str, arguments: int, grid: Sequence[int], local: Sequence[int] = ()) -> str:
    """Return the complete text of a kernel with ``arguments`` pointers, over a grid in groups of ``local``."""
    sizes, groups = [*grid, 1, 1][:3], [*local, 1, 1, 1][:3]
    if any(group < 1 or size % group for size, group in zip(sizes, groups, strict=True)):
        raise SettingsError(f"{entry}: groups of {list(local)} do not divide the work-items {list(grid)}",
                            where="CONFIG_FILE", hint="local sizes must divide global ones")  # fmt: skip
    spaces = ["__constant" if constant else "__global" for constant in _constant(text, entry, arguments)]
    passed = ", ".join(f"({space} void*)arguments[{at}]" for at, space in enumerate(spaces))
    return "\n".join(
        [
            f"{OPENCL_C} /* {entry} */", f"#define OCL_DIMENSIONS {len(grid)}",
            f"#define OCL_GLOBAL {', '.join(map(str, sizes))}", f"#define OCL_LOCAL {', '.join(map(str, groups))}",
            *(["#define OCL_GROUPS"] if max(groups) > 1 else []), _library(), '#line 1 "kernel.cl"', text,
            # This line follows the user's text, whose macros may define anything.
            '#line 1 "CONFIG_FILE"', f"void tunewright_item(const __global ulong* arguments) {{ {entry}({passed}); }}",
            OPENCL_C_LOOP, f"#define COUNT_X {max(sizes[0], 1)}", f"#define COUNT_Y {max(sizes[1], 1)}",
            (_HERE / "opencl_c.c").read_text("utf-8"),
        ]
    )  # fmt: skip


def _constant(text: str, entry: str, arguments: int) -> list[bool]:
    """Return which pointers of a kernel point to constant memory. The compiler checks its other parameters."""
    head = rf"\b(?:__)?kernel\b[^;{{}}]*?\b{re.escape(entry)}\s*\(([^{{}};]*)\)\s*\{{"
    found = re.search(head, text)
    params = found[1].split(",") if found is not None else []
    return [at < len(params) and re.search(r"\b(__)?constant\b", params[at]) is not None for at in range(arguments)]


@cache
def _library() -> str:
    renamed = [f"#define {name} {_RENAMED}{name}" for name in _OWN]
    text = (_HERE / "opencl_c.cl").read_text("utf-8").replace("#define OCL_OWN_FUNCTIONS", "\n".join(renamed))
    return "\n".join([*_conversions(), text])


def _conversions() -> list[str]:
    """Return the macros as_T and convert_T with their roundings. They take any type."""
    made = []
    for name in (*_INTEGERS, *_FLOATS):
        for width in _WIDTHS:
            to = name + width
            convert = f"__builtin_convertvector(({{}}), {to})" if width else f"(({to})({{}}))"
            made.append(f"#define as_{to}(x) __builtin_astype((x), {to})")
            made.append(f"#define convert_{to}(x) {convert.format('x')}")
            if name in _FLOATS:
                made.append(f"#define convert_{to}_rte(x) {convert.format('x')}")
                continue
            made.append(f"#define convert_{to}_sat(x) ocl_saturate_{name}(ocl_wide(x))")
            for mode in _ROUNDINGS:
                made += [
                    f"#define convert_{to}_{mode}(x) {convert.format(f'ocl_{mode}(x)')}",
                    f"#define convert_{to}_sat_{mode}(x) ocl_saturate_{name}(ocl_wide(ocl_{mode}(x)))",
                ]
    return made


def readable(said: str) -> str:
    """Return the compiler's errors about a text, without the lines of the library."""
    head, found, told = said.partition(": ")
    errors = re.findall(r"^(?:.*?[^\w.])?([\w. -]+:\d+:\d+: error: .*)$", told, re.MULTILINE)
    return (head + found + "; ".join(errors[:MOST_ERRORS]) if errors else said).replace(_RENAMED, "")
