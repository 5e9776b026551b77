"""The body of a spec as its author wrote it: what stands above the kernel that was made of it.

Only text that is surely the function's own: a file that was edited since it was imported, or another file of that
name, would tell another story than the kernel below it. A function without such text has none.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType


def body_of(function: FunctionType) -> str:
    """`def name(operands):` and the lines of its body, without decorator, annotations and docstring, which the title
    of a kernel says already; "" where there is no source, as of text that was executed."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 :]
    if not lines:
        return ""
    block = inspect.getblock(lines)
    indented = block[0][:1].isspace()
    text = "".join(["if True:\n" if indented else "", *block])
    try:
        made = compile(tree := ast.parse(text), code.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return ""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == code.co_name]
    if not found or not any(spoken(one) == spoken(code) for one in codes(made) if one.co_name == code.co_name):
        return ""
    body = statements(found[0], text.splitlines())
    operands = ", ".join(argument.arg for argument in found[0].args.args)
    return "\n".join([f"def {code.co_name}({operands}):", *(f"    {line}".rstrip() for line in body)])


def statements(function: ast.FunctionDef, lines: list[str]) -> list[str]:
    """The lines behind the docstring, dedented, with the comments between them."""
    documented = ast.get_docstring(function, clean=False) is not None and len(function.body) > 1
    first, last = function.body[int(documented)], function.body[-1]
    start, end = first.lineno - 1, last.end_lineno or last.lineno
    own = lines[start].encode()[first.col_offset :].decode()
    if lines[start].strip() != own:  # it shares its line with the signature or the docstring
        return [own, *lines[start + 1 : end]]
    while lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return textwrap.dedent("\n".join(lines[start:end])).splitlines()


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a module, and of every function in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def spoken(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names and the numbers that a function's body speaks of: where it stands changes neither."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    numbers = (repr(constant) for constant in code.co_consts if not isinstance(constant, (CodeType, str)))
    return frozenset(name for part in names for name in part), frozenset(numbers)
