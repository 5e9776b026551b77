"""What composites ask of their arguments."""

from __future__ import annotations

from fusegen.errors import SpecError
from fusegen.language.trace import Value, apply, caller, python_number
from fusegen.language.types import i32


def as_f32(x: Value) -> Value:
    """What formulas are of that have no meaning on whole numbers."""
    return apply("to_f32", x) if isinstance(x, Value) and x.dtype is i32 else x


def need_eps(name: str, eps: object) -> None:
    """Raises SpecError for what is neither traced nor a number of at least 0."""
    eps = python_number(eps)
    if isinstance(eps, Value):
        return
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not eps >= 0:
        raise SpecError(f"{name}: eps={eps!r}; it must be a number of at least 0", caller())
