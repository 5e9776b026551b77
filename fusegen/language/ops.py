"""The functions a spec calls: `from fusegen import ops as F`.

A primitive is one entry of `fusegen.language.op_table` and a function here. A composite (softmax, layernorm, ...) is
the textbook formula as a plain function: no new node, no new test harness, and its numpy meaning, cost and error bound
come free.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fusegen.errors import SpecError, UnknownOp
from fusegen.language.advice import advice
from fusegen.language.axes import LAST, Axis, Over, axes_of, brought_last, count, kept, reduce
from fusegen.language.demands import as_f32 as _real
from fusegen.language.demands import need_eps as _eps
from fusegen.language.einsum import einsum
from fusegen.language.elementwise import (
    abs,
    bilinear,
    bitcast,
    cast,
    ceil,
    clip,
    clipped_swiglu,
    col_index,
    cos,
    elu,
    erf,
    exp,
    exp2,
    expm1,
    floor,
    fmod,
    geglu,
    gelu,
    glu,
    hardsigmoid,
    hardswish,
    index_of,
    isfinite,
    isinf,
    isnan,
    leaky_relu,
    log,
    log1p,
    log2,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    mish,
    need_traced,
    neg,
    pow,
    power_of_2_above,
    power_of_2_below,
    quick_geglu,
    reglu,
    relu,
    round,
    row_index,
    rsqrt,
    selu,
    sigmoid,
    sign,
    silu,
    sin,
    size,
    softplus,
    softsign,
    sqrt,
    square,
    swiglu,
    tanh,
    trunc,
    where,
)  # fmt: skip
from fusegen.language.gathering import gather, gather_sum, scatter, take_at
from fusegen.language.graph import MOST_PICKED, Kind, Node, behind
from fusegen.language.group_limits import limit_of
from fusegen.language.group_sorting import sort_by_group
from fusegen.language.grouped_products import grouped_matmul
from fusegen.language.layers import batchnorm, groupnorm, kl_div, rope
from fusegen.language.nodes import OF_KERNELS, PRIMITIVE_KINDS, GroupLimit
from fusegen.language.op_table import OPS
from fusegen.language.ordering import MASKED, key_of
from fusegen.language.packing import pack, unpack
from fusegen.language.promotion import promote
from fusegen.language.quantizing import dequantize, quantize
from fusegen.language.random import dropout, normal, uniform
from fusegen.language.rearranging import broadcast, concat, flip, groups, rearrange, roll, split, stack
from fusegen.language.sizes import broadcast as broadcast_shapes
from fusegen.language.trace import (
    Number,
    Transposed,
    Value,
    apply,
    caller,
    composite,
    current,
    product,
    python_number,
)  # fmt: skip
from fusegen.language.types import Dim, Size, b8, f32, fits_i32, i32, shape_text

INF = float("inf")
NAN = float("nan")


# ---------------------------------------------------------------- reductions; the axes reduced stay as size 1


def sum(x: Value, axis: Axis = -1, over: Over = None, keepdims: bool = True) -> Value:
    """Sum over the last axis, or over others: `over=M`, `over=(B, S)`, or numpy's axis=. What is reduced stays as size
    1, unless keepdims=False. Of i32 it is i32, modulo 2^32; F.sum(F.cast(x, f32)) rounds."""
    axes = axes_of("sum", x, axis, over)
    return kept(reduce("sum", x, axes), axes, keepdims)


def prod(x: Value, axis: Axis = -1, over: Over = None, keepdims: bool = True) -> Value:
    """Product over the last axis, or over others (see F.sum), which stay as size 1; of no rows it is 1.

    Of i32 it is i32, modulo 2^32. Of many f32 it soon leaves their range.
    """
    axes = axes_of("prod", x, axis, over)
    return kept(reduce("prod", x, axes), axes, keepdims)


def max(x: Value, axis: Axis = -1, over: Over = None, keepdims: bool = True) -> Value:
    """Largest of the last axis, or over others (see F.sum), which stay as size 1; NaN wins, and of no rows it is -inf
    (of i32 the least)."""
    axes = axes_of("max", x, axis, over)
    return kept(reduce("max", x, axes), axes, keepdims)


def min(x: Value, axis: Axis = -1, over: Over = None, keepdims: bool = True) -> Value:
    """Smallest of the last axis, or over others (see F.sum), which stay as size 1; NaN wins, and of no rows it is inf
    (of i32 the largest)."""
    axes = axes_of("min", x, axis, over)
    return kept(reduce("min", x, axes), axes, keepdims)


@composite
def mean(x: Value, axis: Axis = -1, over: Over = None, keepdims: bool = True) -> Value:
    """sum(x) / N over the last axis, or over others (see F.sum), in f32. Of no rows it is NaN."""
    axes = axes_of("mean", x, axis, over)
    return kept(reduce("sum", _real(x), axes) / count(x, axes), axes, keepdims)


@composite
def var(x: Value, axis: Axis = -1, over: Over = None, keepdims: bool = True) -> Value:
    """mean((x - mean(x)) ** 2) over the last axis, or over others (see F.sum): in two passes, never E[x^2] - E[x]^2,
    which cancels."""
    axes = axes_of("var", x, axis, over)
    centered = _real(x) - mean(x, axes)
    return mean(square(centered), axes, keepdims=keepdims)


@composite
def amax(x: Value, axis: Axis = -1, over: Over = None, keepdims: bool = True) -> Value:
    """The largest magnitude of the last axis, or over others (see F.sum), which stay as size 1; NaN wins."""
    axes = axes_of("amax", x, axis, over)
    magnitude = abs(x)
    return kept(reduce("max", magnitude, axes), axes, keepdims)


@composite
def std(x: Value, axis: Axis = -1, over: Over = None, keepdims: bool = True) -> Value:
    """sqrt(var(x)) over the last axis, or over others (see F.sum): with N and not N - 1 in the denominator."""
    return sqrt(var(x, axes_of("std", x, axis, over), keepdims=keepdims))


@composite
def norm(x: Value, axis: Axis = -1, over: Over = None, keepdims: bool = True) -> Value:
    """sqrt(sum(x^2)) over the last axis, or over others (see F.sum): the Euclidean norm."""
    axes = axes_of("norm", x, axis, over)
    return kept(sqrt(reduce("sum", square(_real(x)), axes)), axes, keepdims)


def shift_by(top: Value) -> Value:
    """The largest, as softmax and its like subtract it: 0 of a row of -inf alone. No result depends on it, but for
    rounding, and so no gradient goes through it."""
    return Value(replace(where(top == -INF, 0.0, top).node, shift=True))


@composite
def logsumexp(x: Value, axis: Axis = -1, over: Over = None, keepdims: bool = True) -> Value:
    """log(sum(exp(x))) over the last axis, or over others (see F.sum), of x of any size. Of -inf alone it is -inf; NaN
    stays in its row."""
    axes = axes_of("logsumexp", x, axis, over)
    x = _real(x)
    top = reduce("max", x, axes)
    pivot = shift_by(top)
    sum_of_exps = reduce("sum", exp(x - pivot), axes)
    return kept(where(top == INF, INF, pivot + log(sum_of_exps)), axes, keepdims)


@composite
def any(x: Value, axis: Axis = -1, over: Over = None, keepdims: bool = True) -> Value:
    """Whether a mask holds anywhere along the last axis, or over others (see F.sum)."""
    axes = axes_of("any", x, axis, over)
    found = reduce("max", _mask("any", x), axes)
    mask = found != 0 if axes == LAST else found > 0  # of no rows the largest is the least i32
    return kept(mask, axes, keepdims)


@composite
def all(x: Value, axis: Axis = -1, over: Over = None, keepdims: bool = True) -> Value:
    """Whether a mask holds everywhere along the last axis, or over others (see F.sum)."""
    axes = axes_of("all", x, axis, over)
    return kept(reduce("min", _mask("all", x), axes) != 0, axes, keepdims)


def _mask(name: str, x: Value) -> Value:
    need_traced(name, x)
    if x.dtype is not b8:
        raise SpecError(f"{name}: found {x.dtype} where a mask (b8) is wanted; compare first, as in x > 0", caller())
    return cast(x, i32)


# ---------------------------------------------------------------- scans: of each element and those before it


def cumsum(x: Value, axis: int = -1, exclusive: bool = False, reverse: bool = False) -> Value:
    """Sum of each element and those before it in its row, or along another axis; of i32 it is i32, modulo 2^32.

    exclusive=True leaves the element itself out, so that the first one is 0; reverse=True goes from the row's end.
    """
    return _scanned("cumsum", x, axis, exclusive, reverse)


def cumprod(x: Value, axis: int = -1, exclusive: bool = False, reverse: bool = False) -> Value:
    """Product of each element and those before it in its row, as F.cumsum; exclusive, the first one is 1."""
    return _scanned("cumprod", x, axis, exclusive, reverse)


@composite
def sort(x: Value, descending: bool = False) -> tuple[Value, Value]:
    """Each row in order and the columns (i32) that its elements come from, as torch.sort gives them, stable: equals by
    their columns, lower first. NaN is above every number; -0 and 0 are equal, and come back as 0.

    Of f32 and i32, of rows of 2 to 4096. Of longer ones F.topk finds the largest few, and F.top_p and F.top_k masks.
    """
    need_traced("sort", x)
    way = "_descending" if descending else ""
    return apply(f"sorted_values{way}", x), apply(f"sorted_columns{way}", x)


def _scanned(name: str, x: Value, axis: int, exclusive: bool, reverse: bool) -> Value:
    need_traced(name, x)
    with current().operator(name):
        x, back = brought_last(name, x, axis)
        return back(apply(f"{name}{'_reverse' * bool(reverse)}{'_exclusive' * bool(exclusive)}", x))


@composite
def top_p(p: Value, limit: Value | float) -> Value:
    """A mask of each row's most probable elements: as few of the largest as sum up to `limit`, a number, a run-time
    scalar or one value a row. Equal ones go together, so that nothing depends on an order; what is 0 is never kept.

    `F.where(F.top_p(F.softmax(logits), 0.9), logits, -float("inf"))` is nucleus sampling's (Holtzman et al. 2020). NaN
    is never kept. A row of 1 to 32768 elements fits a block, a longer one a cluster.
    """
    return _largest("top_p", "largest_by_sum", p, limit) > 0


@composite
def top_k(x: Value, k: Value | int) -> Value:
    """A mask of each row's k largest elements; k is a number, a run-time scalar or one value a row (i32 or f32). Equal
    ones go together: with the k-th, all of its size. NaN and -inf are never kept; k from the row's length on keeps all
    others, and k below 1 none.

    F.topk gives values and columns of few; this keeps the row.
    """
    return _largest("top_k", "largest_by_count", x, k) > -INF


@composite
def min_p(p: Value, share: Value | float) -> Value:
    """A mask of what is at least so large a share of its row's largest element (Nguyen et al. 2024)."""
    need_traced("min_p", p)
    return p >= max(p) * share


def _largest(name: str, op: str, x: Value, limit: Any) -> Value:
    need_traced(name, x)
    if isinstance(limit, Value) and limit.shape[-1:] not in ((), (1,)):
        raise SpecError(
            f"{name}: found a limit of {shape_text(limit.shape)}; it is a number, a scalar or one value a row, "
            "of [..., 1]",
            caller(),
        )
    if isinstance(limit, Value) and len(limit.shape) > len(x.shape):
        raise SpecError(
            f"{name}: the limit {shape_text(limit.shape)} has more axes than {shape_text(x.shape)}", caller()
        )
    return apply(op, x, limit)


# ---------------------------------------------------------------- selections: the last axis becomes k columns of it


@composite
def topk(
    x: Value, k: Size, axis: int = -1, sorted: bool = True, groups: int | None = None, best_groups: int | None = None,
    by: int = 2,
) -> tuple[Value, Value]:  # fmt: skip
    """The k largest of each row and their columns (i32), largest first: `values, columns = F.topk(F.softmax(z), 8)`.

    NaN comes before every number; equals come by their column, lower first; 0 equals -0. What is -inf is masked and
    never chosen: a row with fewer than k others ends in columns of -1, whose values are -inf (0 for probabilities). Of
    i32, whose order is exact, -2^31 is masked, and stands where the column is -1.

    The order is that of x's *key*: the value below a softmax, a log_softmax, or any steps that are strictly increasing
    along the row (exp, sigmoid, + r, * s, / s with r surely finite, s positive too: numbers, and what reductions of the
    key itself give; not an operand, which may be inf or NaN). Probabilities that round to the same number, or to 0,
    thus keep the order of their logits, those that a NaN or an inf makes NaN as well, and a masked logit has
    probability 0 and column -1. (A softmax without a guard makes NaN of a row of nothing else: that is chosen.)

    k is a number or a dim, at most 1024 and at most the row's length; it is a constant of the kernel. With sorted=False
    and the columns returned, the k may come in any order, the missing last. Further ops on the values see k columns:
    `values / F.sum(values)` renormalises.

    groups=8, best_groups=4, by=2: of 8 equal parts of a row only the 4 are chosen from whose 2 largest add up to most
    (DeepSeek-V3's routing; by=1: whose largest is largest). The order is then x's own.
    """
    x, back = brought_last("topk", x, axis)
    columns = _columns("topk", x, k, bool(sorted), limit_of(x, groups, best_groups, by))
    below = -INF if columns.node.limit else key_of(x.node).limit
    values = _taken(x, columns, MASKED[i32] if x.dtype is i32 else below)
    return back(values), back(columns)


@composite
def argmax(x: Value, axis: int = -1) -> Value:
    """The column of each row's largest, as F.topk(x, 1) gives it: i32 of [..., 1], -1 where all is masked; or its place
    along another axis."""
    x, back = brought_last("argmax", x, axis)
    return back(_columns("argmax", x, 1, True))


@composite
def argmin(x: Value, axis: int = -1) -> Value:
    """The column of each row's smallest: F.argmax of -x, so +inf is masked (2^31 - 1 of i32), and NaN comes first."""
    x, back = brought_last("argmin", x, axis)
    need_traced("argmin", x)
    return back(_columns("argmin", ~x if x.dtype is i32 else -x, 1, True))


@composite
def take(x: Value, columns: Value, missing: Number | bool = 0) -> Value:
    """x at the columns that F.topk or F.argmax chose, in their order; `missing` where the column is -1.

    So one score chooses and another weighs: `_, columns = F.topk(score + bias, 8)`, `weights = F.take(score, columns)`.

    Or at one column a row that i32 values name, of [M] or [M, 1] for x of [M, N]: `F.take(logits, labels)` is [M, 1].
    Where the row has no such column it is `missing`.
    """
    for what, value in (("first", x), ("second", columns)):
        if not isinstance(value, Value):
            raise SpecError(f"take: the {what} argument is {value!r}, not a traced value", caller())
    if columns.node.op.name != "top_columns":
        return take_at(x, columns, _missing(x, missing))
    chosen = columns.node.inputs[0]
    already = ", which has the columns chosen alone" if columns.node in behind([x.node]) else ""
    if not x.shape or x.shape[-1] != chosen.shape[-1] or (already and x.node.op.kind is Kind.SELECT):
        raise SpecError(
            f"take: found {shape_text(x.shape)}{already}, but the columns were chosen from rows of {chosen.shape[-1]}",
            caller(),
        )
    return _taken(x, columns, _missing(x, missing))


def _missing(x: Value, missing: Any) -> Number:
    """What stands where there is no column, as x holds it."""
    kind = {f32: float, i32: int, b8: bool}[x.dtype]
    missing = python_number(missing)
    fits = type(missing) is kind or (type(missing) is int and (x.dtype is f32 or missing in (0, 1)))
    if not fits or (x.dtype is i32 and not fits_i32(missing)):
        raise SpecError(f"take: missing={missing!r} is nothing that {x.dtype} holds", caller())
    found: Number = kind(missing)
    return found


def _columns(name: str, x: Value, k: Size, ordered: bool, limit: GroupLimit | None = None) -> Value:
    need_traced(name, x)
    if not x.shape or x.shape[-1] == 1:
        raise SpecError(f"{name}: {shape_text(x.shape)} has no row to choose from", caller())
    k = python_number(k)
    if not isinstance(k, Dim) and (isinstance(k, bool) or not isinstance(k, int)):
        what = "a traced value" if isinstance(k, Value) else repr(k)
        raise SpecError(f"{name}: k is {what}; it is an integer or a dim, a constant of the kernel", caller())
    cols = x.shape[-1]
    if isinstance(k, int) and not 1 <= k <= MOST_PICKED:
        raise SpecError(f"{name}: k is {k}; a selection keeps 1 to {MOST_PICKED} columns", caller())
    if isinstance(k, int) and isinstance(cols, int) and k > cols:
        raise SpecError(f"{name}: k is {k}, but a row of {shape_text(x.shape)} has {cols} columns", caller())
    op = OPS["top_columns"]
    with current().operator(name) as operator:
        key = promote(op, [x.node], operator)[0]
        return Value(Node(op, (key,), (*x.shape[:-1], k), i32, operator, ordered=ordered, limit=limit))


def _taken(x: Value, columns: Value, missing: Number) -> Value:
    with current().operator("take") as operator:
        try:
            rows = broadcast_shapes(x.shape[:-1], columns.shape[:-1])
        except ValueError as error:
            raise SpecError(
                f"take: rows of {shape_text(x.shape)} and of {shape_text(columns.shape)} do not broadcast: "
                f"{error} differ",
                operator.where,
            ) from None
        shape = (*rows, columns.shape[-1])
        return Value(Node(OPS["take"], (x.node, columns.node), shape, x.dtype, operator, missing=missing))


# ---------------------------------------------------------------- matrix products


def matmul(
    x: Value | Transposed, w: Value | Transposed, precision: str | None = None, promote: int | None = None
) -> Value:
    """x @ w over the last two axes, vectors and others as in numpy, summed in f32; f32 factors by precision="tf32".

    That lets each of them become the nearest number of 11 significant bits, which is what tensor cores multiply; f16,
    bf16 and 8 bits are taken as they are. Factors of i8 and u8 are summed exactly, in i32.

    Some tensor cores keep 14 bits of sums of 8-bit floats. There sums are *promoted*: those of each `promote` elements
    along K, a multiple of 128, begin at 0 and are added in f32. None: of 128, where it is needed; 0: never.
    """
    if precision not in (None, "tf32"):
        raise SpecError(f"matmul: precision={precision!r}; it is None, or 'tf32' for f32 factors", caller())
    if promote is not None and (
        not isinstance(promote, int) or isinstance(promote, bool) or promote % 128 or promote < 0
    ):
        raise SpecError(f"matmul: promote={promote!r}; it is None, 0, or a multiple of 128 along K", caller())
    return product("matmul_tf32" if precision else "matmul", x, w, promote)


# ---------------------------------------------------------------- composites: the textbook formula


@composite
def softmax(x: Value, axis: Axis = -1, over: Over = None) -> Value:
    """exp(x - max) / sum(exp(x - max)) along the last axis, or over others (see F.sum). A row of -inf alone gives
    zeros; a NaN stays in its row."""
    axes = axes_of("softmax", x, axis, over)
    x = _real(x)
    top = reduce("max", x, axes)
    pivot = shift_by(top)
    e = exp(x - pivot)
    sum_of_exps = reduce("sum", e, axes)
    inverse_sum = where(sum_of_exps == 0.0, 0.0, 1.0 / sum_of_exps)
    return e * inverse_sum


@composite
def log_softmax(x: Value, axis: Axis = -1, over: Over = None) -> Value:
    """x - max - log(sum(exp(x - max))) along the last axis, or over others (see F.sum). A row of -inf alone gives -inf;
    a NaN stays in its row."""
    axes = axes_of("log_softmax", x, axis, over)
    x = _real(x)
    top = reduce("max", x, axes)
    pivot = shift_by(top)
    shifted = x - pivot
    sum_of_exps = reduce("sum", exp(shifted), axes)
    log_sum = where(sum_of_exps == 0.0, 0.0, log(sum_of_exps))
    return shifted - log_sum


@composite
def layernorm(
    x: Value, gamma: Value | None = None, beta: Value | None = None, eps: float = 1e-5, axis: Axis = -1,
    over: Over = None,
) -> Value:  # fmt: skip
    """(x - mean) / sqrt(var + eps) * gamma + beta (Ba, Kiros & Hinton 2016), the variance in two passes; along the last
    axis, or over others (see F.sum), with which gamma and beta broadcast."""
    _eps("layernorm", eps)
    axes = axes_of("layernorm", x, axis, over)
    centered = _real(x) - mean(x, axes)
    variance = mean(square(centered), axes)
    rstd = rsqrt(variance + eps)
    normalized = centered * rstd
    scaled = normalized if gamma is None else normalized * gamma
    return scaled if beta is None else scaled + beta


@composite
def rmsnorm(
    x: Value, gain: Value | None = None, eps: float = 1e-6, axis: Axis = -1, over: Over = None
) -> Value:  # fmt: skip
    """x / sqrt(mean(x^2) + eps) * gain (Zhang & Sennrich 2019), along the last axis, or over others (see F.sum)."""
    _eps("rmsnorm", eps)
    axes = axes_of("rmsnorm", x, axis, over)
    x = _real(x)
    rrms = rsqrt(mean(square(x), axes) + eps)
    normalized = x * rrms
    return normalized if gain is None else normalized * gain


@composite
def l2norm(x: Value, eps: float = 1e-12) -> Value:
    """x / max(norm(x), eps): rows of length 1."""
    _eps("l2norm", eps)
    x = _real(x)
    return x / maximum(norm(x), eps)


@composite
def cross_entropy(
    logits: Value, labels: Value, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Value:
    """The loss of each row, f32 of [M, 1]: log(sum(exp(logits))) - logits[label], 0 where the label is `ignore_index`.

    logits [M, N], labels i32 of [M] or [M, 1]. With `label_smoothing` e, that share of the loss is the mean over all
    columns: (1 - e) * own + e * (log(sum(exp(logits))) - mean(logits)), as torch has it. `z_loss` z adds
    z * log(sum(exp(logits)))^2. A label that is no column, nor `ignore_index`, gives NaN.
    """
    need_traced("cross_entropy", logits)
    if not logits.shape or logits.shape[-1] == 1:
        raise SpecError(f"cross_entropy: {shape_text(logits.shape)} has no row of logits", caller())
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int) or not fits_i32(ignore_index):
        raise SpecError(f"cross_entropy: ignore_index={ignore_index!r}; it is a whole number that i32 holds", caller())
    smoothing, z_factor = python_number(label_smoothing), python_number(z_loss)
    for name, number, most in (("label_smoothing", smoothing, 1.0), ("z_loss", z_factor, INF)):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= most:
            raise SpecError(f"cross_entropy: {name}={number!r}; it must be a number from 0 to {most}", caller())
    x = _real(logits)
    own_logit = take(x, labels, NAN)
    top = reduce("max", x, LAST)
    pivot = shift_by(top)
    log_sum = log(reduce("sum", exp(x - pivot), LAST))
    loss = log_sum - (own_logit - pivot)
    if smoothing:
        loss = (1.0 - smoothing) * loss + smoothing * (log_sum - (mean(x) - pivot))
    if z_factor:
        loss = loss + z_factor * square(pivot + log_sum)
    at = labels if len(labels.shape) == len(x.shape) else labels[..., None]
    return where(at == ignore_index, 0.0, loss)


@composite
def one_hot(columns: Value, dim: Dim) -> Value:
    """1 at the column that each row's i32 names, 0 elsewhere, f32 of [..., dim]; a row of 0 for what is no column."""
    if not isinstance(columns, Value) or columns.dtype is not i32 or columns.shape[-1:] != (1,):
        found = f"{columns.dtype}{shape_text(columns.shape)}" if isinstance(columns, Value) else repr(columns)
        raise SpecError(f"one_hot: found {found}, wanted one column a row, i32[..., 1]", caller())
    if not isinstance(dim, Dim):
        raise SpecError(f"one_hot: {dim!r} is not a Dim, as one of M, N = dims('M N') is", caller())
    return cast(index_of("col_index", (dim,)) == columns, f32)


@composite
def causal(x: Value, offset: Value | int = 0) -> Value:
    """x where column <= row + offset, else -inf: scores [..., queries, keys] with the future masked."""
    last = row_index(x)
    if isinstance(offset, Value) or offset != 0:
        last = last + offset
    keep = col_index(x) <= last
    return where(keep, x, -INF)


PRIMITIVES = tuple(op for op in OPS.values() if op.kind in PRIMITIVE_KINDS and op.name not in OF_KERNELS)
COMPOSITES = (
    gelu, softplus, softsign, mish, elu, selu, leaky_relu, hardsigmoid, hardswish, glu, reglu, geglu, swiglu,
    quick_geglu, clipped_swiglu, bilinear, clip,
    mean, var, amax, std, norm, logsumexp, any, all, softmax, log_softmax, layernorm, rmsnorm, l2norm, quantize,
    dequantize, cross_entropy, one_hot, causal, uniform, normal, dropout,
    groupnorm, batchnorm, rope, kl_div, einsum, top_p, top_k, min_p, sort, gather_sum, sort_by_group,
)  # fmt: skip
SELECTIONS = (topk, argmax, argmin, take)
VIEWS = (split, concat, stack, rearrange, groups, flip, roll, broadcast)
__all__ = (  # noqa: RUF022  # by kind
    "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "sigmoid", "relu",
    "silu", "gelu", "softplus", "softsign", "mish", "elu", "selu", "leaky_relu", "hardsigmoid", "hardswish", "glu",
    "reglu", "geglu", "swiglu", "square", "pow", "abs", "neg", "sign", "floor", "ceil", "trunc", "round", "fmod",
    "minimum", "maximum", "clip", "isnan", "isinf", "isfinite", "logical_and", "logical_or", "logical_not", "where",
    "cast", "bitcast", "pack", "unpack",
    "power_of_2_above", "power_of_2_below", "col_index", "row_index", "size", "matmul", "grouped_matmul",
    "sum", "max", "min", "amax", "mean", "var", "std", "norm",
    "prod", "quick_geglu", "clipped_swiglu", "bilinear", "groupnorm", "batchnorm", "rope", "kl_div",
    "einsum", "cumsum", "cumprod", "sort", "top_p", "top_k", "min_p",
    "logsumexp", "any", "all", "softmax", "log_softmax", "layernorm", "rmsnorm", "l2norm", "quantize", "dequantize",
    "cross_entropy", "one_hot", "causal", "uniform", "normal", "dropout", "topk", "argmax", "argmin", "take", "gather",
    "gather_sum", "sort_by_group", "scatter", "split", "concat", "stack",
    "rearrange", "groups", "flip", "roll", "broadcast",
)  # fmt: skip
FUNCTIONS = __all__


if not TYPE_CHECKING:  # a type checker knows what names there are

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownOp(f"unknown op F.{name}\n  {advice(name, FUNCTIONS)}", caller())
