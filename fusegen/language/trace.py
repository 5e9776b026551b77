"""Tracing: running a spec's body on stand-ins for arrays, and writing down what it does to them.

A `Value` is what a spec's variables hold while it is traced. Whatever Python can do to it either becomes a node or
raises SpecError with the spec's file and line: a branch on a traced value would silently pick a side, so it is refused.

Every step the author wrote is one `Operator`, however many nodes a composite such as `F.softmax` expands to: costs and
explanations speak of operators.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from fusegen.errors import SpecError, Where
from fusegen.language.factor_words import factor_text, inner_sizes_differ, need_one_kind, need_type
from fusegen.language.graph import OPS as OPS
from fusegen.language.graph import Kind, Node, Op, Operator, Tensor, broadcast
from fusegen.language.promotion import Number as Number
from fusegen.language.promotion import f32_literal, promote
from fusegen.language.sizes import Dim, Expr, as_number
from fusegen.language.types import DType, Shape, Size, b8, f32, i32, shape_text, u32
from fusegen.language.views import View, key_text
from fusegen.version import PACKAGE

OURS = str(PACKAGE) + os.sep
OPS_FILES = tuple(
    str(PACKAGE / "language" / name)
    for name in ("ops.py", "elementwise.py", "group_sorting.py", "layers.py", "quantizing.py", "random.py")
)
NOT_A_SPEC = (OURS, contextlib.__file__, functools.__file__)


class Trace:
    """One run of a spec's body: the operators in the order they were written, and the names given to values."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.open: Operator | None = None
        self.names: dict[Node, str] = {}
        self.operands: dict[Node, Tensor] = {}
        self.eager = False  # are values rounded behind each operator, and casts to f32 therefore told?
        self.at: Where | None = None  # what is written stands for this line of a spec; None: it is the spec's own

    @contextmanager
    def operator(self, name: str) -> Iterator[Operator]:
        """Nodes made inside belong to one operator: the outermost one that is open."""
        if self.open is not None:
            yield self.open
            return
        self.open = Operator(len(self.operators), name, caller())
        self.operators.append(self.open)
        try:
            yield self.open
        finally:
            self.open = None


_current: ContextVar[Trace | None] = ContextVar("fusegen_trace", default=None)


def current() -> Trace:
    trace = _current.get()
    if trace is None:
        raise SpecError("fusegen ops work on the arguments of a function under @chain, and nowhere else", caller())
    return trace


def caller() -> Where:
    """The innermost place outside the package: the line of the spec that is to blame."""
    if (trace := _current.get()) is not None and trace.at is not None:
        return trace.at
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(NOT_A_SPEC):
        frame = frame.f_back
    if frame is None:
        return Where("<unknown>", 0)
    return Where(shown(frame.f_code.co_filename), frame.f_lineno)


def shown(file: str) -> str:
    """A file the way its author would name it: relative to the working directory when it lies inside."""
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith("..") else relative


@contextmanager
def tracing(own: Callable[..., object]) -> Iterator[Trace]:
    """Record what happens inside, and which local names `own` and the composites it calls give to values.

    The names come from the frames' locals when a function returns (sys.setprofile), so that an emitted kernel keeps
    the spec's words without the author repeating them. `own`'s names win over those inside composites, and an outer
    composite's over an inner one's; a composite's unnamed result takes the composite's name.
    """
    trace = Trace()
    inner: dict[Node, str] = {}
    results: dict[Node, str] = {}  # what composites return unnamed, by the name of the outermost
    code = own.__code__
    before = sys.getprofile()

    def note(frame: FrameType, event: str, argument: object) -> None:
        own_frame = frame.f_code is code
        if event != "return" or not (own_frame or frame.f_code.co_filename in OPS_FILES):
            return
        taken = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
        found = {
            value.node: name
            for name, value in reversed(frame.f_locals.items())
            if isinstance(value, Value) and name not in taken and not name.startswith("_") and used(value)
        }
        if own_frame:
            trace.names.update(found)
            return
        name = frame.f_code.co_name
        if isinstance(argument, Value) and not name.startswith("_"):
            result = argument.node
            if result not in inner and result not in found and result.op.kind is Kind.MAP:
                results[result] = name
        inner.update(found)

    token = _current.set(trace)
    numbers = as_number.set(size_leaf)
    sys.setprofile(note)
    try:
        yield trace
    finally:
        sys.setprofile(before if callable(before) else None)
        if before is not None and not callable(before):
            before.enable()  # cProfile's own object, which setprofile does not take
        as_number.reset(numbers)
        _current.reset(token)
    trace.names = {**trace.names, **{n: name for n, name in {**results, **inner}.items() if n not in trace.names}}


def used(value: Value) -> bool:
    """Is there a node behind it? Behind `w.T` that only products take, there is none."""
    return not isinstance(value, Transposed) or value.made is not None


class Value:
    """A traced value: supports + - * / ** neg abs, comparisons, & | ^ ~ << >>, and every function of `fusegen.ops`."""

    __slots__ = ("node",)
    __hash__ = object.__hash__
    __array_ufunc__ = None  # numpy scalars on the left hand over to our reflected operators

    def __init__(self, node: Node) -> None:
        self.node = node

    def multiplied(self, other: Any, ends: Value | None = None) -> Value | None:
        """What a kind of value makes of its product with another; None: what any does."""
        return None

    @property
    def shape(self) -> Shape:
        return self.node.shape

    @property
    def dtype(self) -> DType:
        return self.node.dtype

    def __repr__(self) -> str:
        return f"<traced {self.dtype}{shape_text(self.shape)}>"

    def __add__(self, other: Any) -> Value:
        return apply("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return apply("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return apply("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return apply("sub", other, self)

    def __mul__(self, other: Any) -> Value:
        return apply("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return apply("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return apply("div", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return apply("div", other, self)

    def __matmul__(self, other: Any) -> Value:
        return product("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Value:
        return product("matmul", other, self)

    @property
    def T(self) -> Value:
        """A matrix with its axes swapped: a view, not a copy."""
        if len(self.shape) != 2:
            raise SpecError(f".T of {shape_text(self.shape)}: it swaps the axes of a matrix; write .mT", caller())
        return Transposed(self)

    @property
    def mT(self) -> Value:
        """A value with its last two axes swapped: a view, not a copy."""
        return Transposed(self)

    def __neg__(self) -> Value:
        return apply("neg", self)

    def __abs__(self) -> Value:
        return apply("abs", self)

    def __pow__(self, exponent: Any) -> Value:
        return power(self, exponent)

    def __rpow__(self, base: Any) -> Value:
        return power(base, self)

    def __floordiv__(self, other: Any) -> Value:
        return divided("//", "floor_div", self, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return divided("//", "floor_div", other, self)

    def __mod__(self, other: Any) -> Value:
        return divided("%", "mod", self, other)

    def __rmod__(self, other: Any) -> Value:
        return divided("%", "mod", other, self)

    def __lt__(self, other: Any) -> Value:
        return apply("lt", self, other)

    def __le__(self, other: Any) -> Value:
        return apply("le", self, other)

    def __gt__(self, other: Any) -> Value:
        return apply("gt", self, other)

    def __ge__(self, other: Any) -> Value:
        return apply("ge", self, other)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]  # comparing traced values makes a mask
        return apply("eq", self, other)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return apply("ne", self, other)

    def __and__(self, other: Any) -> Value:
        return bits("&", "logical_and", "bit_and", self, other)

    def __rand__(self, other: Any) -> Value:
        return bits("&", "logical_and", "bit_and", other, self)

    def __or__(self, other: Any) -> Value:
        return bits("|", "logical_or", "bit_or", self, other)

    def __ror__(self, other: Any) -> Value:
        return bits("|", "logical_or", "bit_or", other, self)

    def __xor__(self, other: Any) -> Value:
        return bits("^", "ne", "bit_xor", self, other)

    def __rxor__(self, other: Any) -> Value:
        return bits("^", "ne", "bit_xor", other, self)

    def __invert__(self) -> Value:
        return bits("~", "logical_not", "bit_not", self)

    def __lshift__(self, other: Any) -> Value:
        return apply("shift_left", self, other)

    def __rlshift__(self, other: Any) -> Value:
        return apply("shift_left", other, self)

    def __rshift__(self, other: Any) -> Value:
        return apply("shift_right", self, other)

    def __rrshift__(self, other: Any) -> Value:
        return apply("shift_right", other, self)

    def __bool__(self) -> bool:
        raise SpecError(
            "a Python branch on a traced value: its elements are not known while the chain is traced\n"
            "  use F.where(condition, a, b) instead of if/else, and & | ~ instead of and, or, not",
            caller(),
        )

    def __len__(self) -> int:
        raise SpecError("len() of a traced value; use a Dim, or F.size(N) for its number", caller())

    def __iter__(self) -> Iterator[Value]:
        raise SpecError("a traced value can't be iterated or unpacked; ops work on whole arrays", caller())

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise SpecError(
            "a traced value is called like a function: a variable of the spec has the function's name\n"
            "  give the variable another name, as in scores for max, or call fusegen.ops: F.max(x)",
            caller(),
        )

    def __getitem__(self, key: Any) -> Value:
        """Numpy's basic indexing, by sizes too: x[..., : D // 2], x[:, 0], x[..., ::2]. A view, not a copy."""
        if any(isinstance(part, Value) for part in (key if isinstance(key, tuple) else (key,))):
            raise SpecError(
                "an index that is itself traced: its elements are not known while the chain is traced\n"
                "  slices, whole numbers and sizes index; F.gather(x, ids) takes rows, F.take(x, columns) columns",
                caller(),
            )
        try:
            view = View.identity(self.shape).sliced(key)
        except SpecError as error:
            raise SpecError(f"slice: {error}", caller()) from None
        return viewed(self, view, f"{{0}}[{key_text(key)}]", "slice")

    def _assigned(self, *_: Any) -> Any:
        raise SpecError(
            "a traced value can't be assigned to in part\n  F.where(mask, new, x) is x with some elements new", caller()
        )

    __setitem__ = __delitem__ = _assigned

    def _number(self, *_: Any) -> Any:
        raise SpecError("a traced value is no Python number; use fusegen.ops instead of math and builtins", caller())

    __float__ = __int__ = __index__ = __complex__ = __round__ = __floor__ = __ceil__ = __trunc__ = _number

    def _unsupported(self, *_: Any) -> Any:
        raise SpecError("this operator is not supported on traced values; `fusegen list --ops` shows what is", caller())

    __divmod__ = __rdivmod__ = __contains__ = _unsupported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise SpecError(f"a traced value has no {name!r}; ops are functions, as in F.exp(x)", caller())


class Transposed(Value):
    """`w.T`. A product takes the operand itself, the other way round; for other uses it is a view."""

    __slots__ = ("made", "value")

    def __init__(self, value: Value) -> None:
        if len(value.shape) < 2:
            raise SpecError(f".mT of {shape_text(value.shape)}: there are no two axes to swap", caller())
        self.value = value
        self.made: Value | None = None

    @property
    def node(self) -> Node:  # type: ignore[override]
        if self.made is None:
            rank = len(self.value.shape)
            view = View.identity(self.value.shape).transposed((*range(rank - 2), rank - 1, rank - 2))
            self.made = viewed(self.value, view, "np.swapaxes({0}, -1, -2)", "transpose")
        return self.made.node

    @property
    def T(self) -> Value:
        return self.value

    mT = T


def viewed(x: Value, view: View, text: str, name: str) -> Value:
    """A view of a value; `text` is its meaning as numpy text, with {0} for the value."""
    with current().operator(name) as operator:
        return Value(Node(OPS["view"], (x.node,), view.shape, x.dtype, operator, view=view, text=text))


P = ParamSpec("P")
R = TypeVar("R")


def composite(function: Callable[P, R]) -> Callable[P, R]:
    """A function of traced values that counts as one operator, whatever it is made of."""

    @functools.wraps(function)
    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        with current().operator(function.__name__.strip("_")):
            return function(*args, **kwargs)

    return traced


def apply(name: str, *arguments: Any) -> Value:
    """One op on values and literals: checks, promotes (whole numbers to f32 where they meet), broadcasts, records."""
    op = OPS[name]
    trace = current()
    with trace.operator(op.name) as operator:
        values = promote(op, [node_of(op, a, operator) for a in arguments], operator)
        try:
            shape: Shape = functools.reduce(broadcast, (node.shape for node in values), ())
        except ValueError as error:
            shapes = " and ".join(shape_text(n.shape) for n in values)
            raise SpecError(
                f"{operator}: shapes {shapes} do not broadcast: {error} differ\n"
                "  sizes match by name, from the right; a size of 1 matches every other",
                operator.where,
            ) from None
        if op.kind is Kind.REDUCE:
            shape = reduced(op, shape, operator)
        if op.kind is Kind.SCAN:
            reduced(op, shape, operator)  # which refuses what has no row
        return Value(Node(op, tuple(values), shape, result_dtype(op, values), operator))


def bits(symbol: str, masks: str, integers: str, *arguments: Any) -> Value:
    """`a & b` and its like: of masks, or of the bits of i32, never of one and the other."""
    kinds = [a.dtype if isinstance(a, Value) else b8 if isinstance(python_number(a), bool) else i32 for a in arguments]
    if f32 in kinds or len({kind is b8 for kind in kinds}) > 1:
        raise SpecError(
            f"{symbol}: found {' and '.join(map(str, kinds))}, wanted masks (b8) alone or whole numbers (i32) alone\n"
            "  for a mask compare first, as in x > 0; for bits convert with F.cast(x, i32)",
            caller(),
        )
    return apply(masks if kinds[0] is b8 else integers, *arguments)


def product(name: str, left: Any, right: Any, promote: int | None = None) -> Value:
    """`left @ right` on the last two axes, leading ones broadcast: checks and records. Of whole numbers it is i32."""
    if isinstance(left, Value) and (found := left.multiplied(right)) is not None:
        return found
    values = (side.value if isinstance(side, Transposed) else side for side in (left, right))
    ranks = [len(side.shape) if isinstance(side, Value) else 0 for side in values]
    if min(ranks) == 1:
        with_vector = import_module("fusegen.language.vector_products").with_vector
        return with_vector(name, left, right, promote)  # type: ignore[no-any-return]
    operands = current().operands
    op = OPS[name]
    with current().operator("matmul") as operator:
        a, b = factor(op, left, operator, right=False), factor(op, right, operator, right=True)
        if a.shape[-1] != b.shape[-2]:
            raise SpecError(inner_sizes_differ(a, b, operands), operator.where)
        try:
            leading = broadcast(a.shape[:-2], b.shape[:-2])
        except ValueError as error:
            factors = f"{factor_text(a, operands)} @ {factor_text(b, operands)}"
            said = f"matmul: the leading axes of {factors} do not broadcast: {error} differ"
            raise SpecError(said, operator.where) from None
        need_one_kind(a, b, operands)
        shape = (*leading, a.shape[-2], b.shape[-1])
        return Value(Node(op, (a, b), shape, a.dtype, operator, promote=promote))


def factor(op: Op, side: Any, operator: Operator, *, right: bool) -> Node:
    """The node of one side of `@`; of a transposed operand, a view."""
    if isinstance(side, Transposed) and side.value.node.op.kind is Kind.INPUT:
        node = side.value.node
        shape = (*node.shape[:-2], node.shape[-1], node.shape[-2])
        return need_type(Node(OPS["transpose"], (node,), shape, node.dtype, operator), current().operands, right)
    node = node_of(op, side, operator)
    if not node.shape:
        raise SpecError(
            "matmul: found a scalar where a matrix or a vector is wanted\n  write * for a multiple", operator.where
        )
    return need_type(node, current().operands, right)


def reduced(op: Op, shape: Shape, operator: Operator) -> Shape:
    if not shape:
        raise SpecError(f"{operator}: a scalar has no axis to reduce", operator.where)
    if shape[-1] == 1:
        raise SpecError(
            f"{operator}: the last axis of {shape_text(shape)} has size 1, so there is nothing to reduce",
            operator.where,
        )
    return (*shape[:-1], 1)


def result_dtype(op: Op, values: list[Node]) -> DType:
    return op.result or values[-1].dtype  # promote() has made numbers alike; `where` ends with two of them


def node_of(op: Op, argument: Any, operator: Operator) -> Node:
    """The node behind a Value, or a literal's. Raises SpecError for anything else."""
    if isinstance(argument, Value):
        return argument.node
    argument = python_number(argument)
    if isinstance(argument, bool):
        return Node(OPS["literal"], (), (), b8, operator, literal=argument)
    if isinstance(argument, int):
        return Node(OPS["literal"], (), (), i32, operator, literal=argument)
    if isinstance(argument, float):
        return f32_literal(argument, operator)
    if isinstance(argument, (Dim, Expr)):
        return Node(OPS["size"], (), (), f32, operator, size=argument)
    advice = "\n  pass an array as an operand: a parameter with a type" if hasattr(argument, "shape") else ""
    raise SpecError(
        f"{operator}: {type(argument).__name__} {argument!r:.80} is neither a traced value nor a number{advice}",
        operator.where,
    )


def python_number(argument: Any) -> Any:
    """A scalar of numpy's as a Python number; anything else as it is."""
    np = sys.modules.get("numpy")
    return argument.item() if np is not None and isinstance(argument, np.generic) else argument


def divided(symbol: str, name: str, *arguments: Any) -> Value:
    """`a // b` and `a % b`, which are of whole numbers."""
    for argument in arguments:
        found = argument.dtype if isinstance(argument, Value) else f32 if isinstance(argument, float) else i32
        if found not in (i32, u32):
            raise SpecError(
                f"{symbol}: found {found}, wanted whole numbers (i32)\n"
                "  of f32 write F.floor(x / y), and F.fmod(x, y) for the remainder toward zero",
                caller(),
            )
    return apply(name, *arguments)


def power(x: Any, exponent: Any) -> Value:
    """x ** exponent. Small whole exponents become products, 0.5 a square root, powers of 2 an exponential."""
    x, exponent = python_number(x), python_number(exponent)
    if isinstance(exponent, Value):
        of_two = not isinstance(x, Value) and x == 2
        return apply("exp2", exponent) if of_two else apply("pow", x, exponent)
    if isinstance(exponent, bool) or not isinstance(exponent, (int, float)) or not math.isfinite(exponent):
        raise SpecError(f"the exponent of ** must be a finite number or a traced value, found {exponent!r}", caller())
    with current().operator("pow"):
        if exponent == 0.5:
            return apply("sqrt", x)
        if exponent == 1 and isinstance(x, Value):
            return x
        if exponent == 2:
            return apply("square", x)
        if exponent in (3, 4):
            square = apply("square", x)
            return apply("mul", square, x) if exponent == 3 else apply("square", square)
        if exponent == -1:
            return apply("div", 1.0, x)
        return apply("pow", x, float(exponent))


def size_leaf(size: Size) -> Value:
    """The number of a dimension, as an f32 that is a constant of the kernel."""
    with current().operator("size") as operator:
        return Value(Node(OPS["size"], (), (), f32, operator, size=size))
