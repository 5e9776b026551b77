"""Quantization: values of few bits and their scales, one function a convention, and back.

A convention's function takes the largest magnitudes, f32, and gives the scale that is stored, which the values are to
be multiplied by again, and the number that a value is multiplied by, or None where it is divided by the scale. They are
written from the sources that they name, operation by operation, since a value between two codes goes by the last bit of
its scale.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusegen.errors import SpecError
from fusegen.language.axes import LAST, reduce
from fusegen.language.block_products import Dequantized
from fusegen.language.demands import as_f32, need_eps
from fusegen.language.elementwise import (
    abs,
    cast,
    maximum,
    minimum,
    need_traced,
    power_of_2_above,
    power_of_2_below,
    where,
)
from fusegen.language.rearranging import groups, stack, tuple_text
from fusegen.language.trace import Number, Value, caller, composite, python_number, viewed
from fusegen.language.types import DTYPES, PACKED, DType, Size, f4e2m1, f8e4m3, f8e8m0, f32, shape_text
from fusegen.language.views import View

Scaled = tuple[Value, Value | None]
PER = ("tensor", "row", "block")


def vllm(largest: Value, dtype: DType, powers: bool) -> Scaled:
    """scale = largest / limit; x / scale. By powers of 2: scale = 2^ceil(log2(max(scale, 1e-10))).

    vLLM, `per_token_group_quant_fp8` (vllm/model_executor/layers/quantization/utils/fp8_utils.py)."""
    scale = largest / dtype.largest
    if powers:
        scale = where(scale < float("inf"), power_of_2_above(maximum(scale, 1e-10)), scale)
    return scale, None


def inverse(largest: Value, dtype: DType, powers: bool) -> Scaled:
    """scale = largest / limit; x * (1 / scale). By powers of 2 the scale is rounded up to one.

    "deepseek" is this: DeepGEMM, `per_token_cast_to_fp8` and `ceil_to_ue8m0` (deep_gemm/utils/math.py)."""
    scale = largest / dtype.largest
    if powers:
        scale = power_of_2_above(scale)
    inverse_scale = 1.0 / scale
    return scale, inverse_scale


def te(largest: Value, dtype: DType, powers: bool) -> Scaled:
    """up = limit / largest, at most f32's largest number, and 1 where largest is 0, an infinity or NaN; x * up, and the
    scale is 1 / up. By powers of 2, which is the default, up loses its mantissa.

    TransformerEngine, `compute_scale_from_amax` (transformer_engine/common/recipe/recipe_common.cuh)."""
    usable = (largest > 0.0) & (largest < float("inf"))
    up = where(usable, minimum(dtype.largest / largest, f32.largest), 1.0)
    if powers:
        up = power_of_2_below(up)
    scale = 1.0 / up
    return scale, up


LEAST_SCALE, MOST_SCALE = f8e8m0.least, f8e8m0.largest


def inverse_limit(dtype: DType) -> float:
    """1 / limit, rounded to f32."""
    return float(struct.unpack("f", struct.pack("f", 1.0 / dtype.largest))[0])


def mx(largest: Value, dtype: DType, powers: bool) -> Scaled:
    """scale = largest * (1 / limit), rounded up to a power of 2, of e8m0; x * (1 / scale), by 1 where the scale is
    2^-127 and by 0 where it is 2^127, as of infinities.

    TransformerEngine, `float_to_e8m0` and `exp2f_rcp` (transformer_engine/common/util/ptx.cuh)."""
    small = largest * inverse_limit(dtype)
    scale = where(small <= LEAST_SCALE, LEAST_SCALE, power_of_2_above(small))
    up = where(scale == LEAST_SCALE, 1.0, where(scale == MOST_SCALE, 0.0, 1.0 / scale))
    whole = small == small
    return cast(where(whole, scale, float("nan")), f8e8m0), where(whole, up, float("nan"))


def mx_floor(largest: Value, dtype: DType, powers: bool) -> Scaled:
    """scale = 2^(floor(log2(largest)) - e), e the exponent of the type's largest number, at least 2^-127; x / scale.
    NaN where largest is NaN or an infinity.

    OCP Microscaling Formats 1.0, section 6.3."""
    exponent = math.frexp(dtype.largest)[1] - 1
    scale = maximum(power_of_2_below(largest) * 2.0**-exponent, LEAST_SCALE)
    scale = cast(where(largest < float("inf"), scale, float("nan")), f8e8m0)
    return scale, 1.0 / scale


@dataclass(frozen=True, slots=True)
class Rule:
    """A convention: how it scales, the least magnitude that it scales for, of a block another one, whether its scales
    are powers of 2 unless one asks, and the number of values that share a scale where the convention says it."""

    scaled: Callable[[Value, DType, bool], Scaled]
    least: float
    least_of_block: float
    powers: bool = False
    block: int = 0


RULES: Mapping[str, Rule] = {
    "inverse": Rule(inverse, 1e-12, 1e-12),
    "vllm": Rule(vllm, 1e-12, 1e-10),
    "deepseek": Rule(inverse, 1e-4, 1e-4),
    "te": Rule(te, 0.0, 0.0, powers=True),
    "mx": Rule(mx, 0.0, 0.0, powers=True, block=32),
    "mx_floor": Rule(mx_floor, 0.0, 0.0, powers=True, block=32),
}
USUAL_BLOCK = 128


@composite
def quantize(
    x: Value, dtype: DType, scale: Value | Number | None = None, least: float | None = None, *, per: str = "",
    block: int | None = None, rule: str = "inverse", powers: bool | None = None,
    scale_ub: Value | Number | None = None,
) -> Any:  # fmt: skip
    """x * (1 / scale) as 8 bits: `values, scale = F.quantize(x, f8e4m3)`, or `F.quantize(x, f8e4m3, scale)` -> values.

    Without a scale it is made of the largest magnitude `per` "row", "tensor", or "block" of so many neighbours along
    the row: f32 of [..., 1], of [1, ..., 1], or of [..., N // block]. `least` is the least magnitude that is scaled
    for; `powers` asks for scales that are powers of 2, or for others. Unless said otherwise both are the rule's own.
    `scale_ub`, a number or traced, is the most that amax of a row or of the tensor counts for, as in vLLM
    and FBGEMM. The rules:

    - "inverse": scale = max(amax, 1e-12) / largest number of `dtype` (127 of i8); x * (1 / scale). No division is left
      in the elements. Powers of 2 are rounded up.
    - "vllm": the same but x / scale, and of blocks max(amax, 1e-10).
    - "deepseek": as "inverse", of max(amax, 1e-4).
    - "te": up = largest / amax, rounded down to a power of 2; x * up, and the scale is 1 / up; 1 where amax is 0.
    - "mx": blocks of 32, scales of f8e8m0: amax * (1 / largest), rounded up to a power of 2; x * (1 / scale).
    - "mx_floor": the same by OCP's text: 2^(floor(log2 amax) - exponent of the largest number).
    - "nvfp4": f4e2m1 in blocks of 16, scales of f8e4m3, and one f32 for the tensor: `values, scale, whole`, or with
      that given, `F.quantize(x, f4e2m1, whole, rule="nvfp4")`, `values, scale`. x is near values * (scale * whole).

    A row is what shares a scale unless said otherwise, a block by the last two; a block is of 128 by the others. Values
    beyond the range of `dtype` become its ends. docs/narrow.md has each rule's source. Raises SpecError for another
    rule, and for a scale beside one.
    """
    need_traced("quantize", x)
    if not isinstance(dtype, DType) or not dtype.narrow or dtype.positive:
        few = {**DTYPES, **PACKED}.items()
        narrow = ", ".join(name for name, known in few if known.narrow and not known.positive)
        raise SpecError(f"quantize: to {dtype!s}; it is to 8 bits or 4: {narrow}", caller())
    if rule == "nvfp4":
        need_upper_bound(scale_ub, "block", dtype)
        return nvfp4(as_f32(x), dtype, scale, (per or "block", block or 16, least, powers))
    own = RULES.get(rule)
    per = per or ("block" if own and own.block else "row")
    if per not in PER or own is None:
        raise SpecError(unknown_rule(per, rule), caller())
    x = as_f32(x)
    if scale is not None:
        if (per, rule, least, powers, scale_ub) != ("row", "inverse", None, None, None):
            raise SpecError("quantize: a scale is given, and a rule to make one; leave one of them out", caller())
        return cast(x * (1.0 / scale), dtype)
    if dtype.least == 0 and dtype.kind == "int":
        raise SpecError(f"quantize: {dtype} has no numbers below 0; give a scale, or quantize to i8", caller())
    if own.block:
        need_blocks(rule, own, dtype, per, block, powers)
    if least is None:
        least = own.least_of_block if per == "block" else own.least
    need_eps("quantize", least)
    need_upper_bound(scale_ub, per, dtype)
    rank = len(x.shape)
    if per == "block":
        x = groups(x, (own.block or USUAL_BLOCK) if block is None else block)
    if dtype.packed and per == "block":
        return by_pairs(x, rank, lambda top: scaled_blocks(top, own, dtype, least))
    magnitude = abs(x)
    largest = reduce("max", magnitude, tuple(range(-rank, 0)) if per == "tensor" else LAST)
    if scale_ub is not None:
        largest = minimum(largest, scale_ub)
    if isinstance(least, Value) or least != 0:
        largest = maximum(largest, least)
    row_scale, factor = own.scaled(largest, dtype, own.powers if powers is None else bool(powers))
    x = cast(x / row_scale if factor is None else x * factor, dtype)
    if per != "block":
        return x, row_scale
    return ungrouped(x, rank), row_scale[..., 0]


def scaled_blocks(largest: Value, own: Rule, dtype: DType, least: Value | float) -> tuple[Value, Callable[..., Value]]:
    """The scales of blocks, and what makes values by them."""
    if isinstance(least, Value) or least != 0:
        largest = maximum(largest, least)
    scale, factor = own.scaled(largest, dtype, own.powers)

    def values(half: Value) -> Value:
        return cast(half / scale if factor is None else half * factor, dtype)

    return scale, values


def by_pairs(
    blocks: Value, rank: int, scaled: Callable[[Value], tuple[Value, Callable[..., Value]]]
) -> tuple[Value, Value]:
    """Values of blocks [..., G, B] of which two are a byte, and scales. The even ones and the odd ones are computed
    side by side, so that one kernel has both halves of a byte at hand."""
    low, high = blocks[..., 0::2], blocks[..., 1::2]
    magnitude = maximum(abs(low), abs(high))
    scale, value = scaled(reduce("max", magnitude, LAST))
    both = ungrouped(stack([value(low), value(high)]), rank + 1)
    return ungrouped(both, rank), scale[..., 0]


def ungrouped(x: Value, rank: int) -> Value:
    """[..., N // block, block] as rows again."""
    whole = View.identity(x.shape).merged(rank - 1, 2)
    return viewed(x, whole, f"{{0}}.reshape({tuple_text(whole.shape)})", "rearrange")


def need_blocks(rule: str, own: Rule, dtype: DType, per: str, block: int | None, powers: bool | None) -> None:
    """What a convention of blocks says, and the caller may not say otherwise."""
    if per != "block" or block not in (None, own.block):
        raise SpecError(f"quantize: rule={rule!r} is of blocks of {own.block}; leave per= and block= out", caller())
    if dtype.kind != "float":
        raise SpecError(f"quantize: rule={rule!r} is of floats of few bits, and {dtype} is none", caller())
    if powers is False:
        raise SpecError(f"quantize: rule={rule!r} has scales that are powers of 2, and none else", caller())


def need_upper_bound(scale_ub: object, per: str, dtype: DType) -> None:
    """Raises SpecError for what bounds no scale from above. The two sources bound amax of a row; of blocks some of
    vLLM's kernels bound the scale itself, so those are left to their authors."""
    if scale_ub is None:
        return
    if per == "block":
        raise SpecError(
            f"quantize: scale_ub={scale_ub!r} of blocks; it bounds amax of a row or of the tensor\n"
            f"  bound the scales of blocks yourself, and give them: F.quantize(x, {dtype}, scale)",
            caller(),
        )
    number = python_number(scale_ub)
    if isinstance(number, Value):
        return
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
        raise SpecError(f"quantize: scale_ub={scale_ub!r}; it is a number above 0, or traced", caller())


def unknown_rule(per: str, rule: str) -> str:
    if per not in PER:
        return f"quantize: per={per!r}; scales are per {', '.join(PER[:-1])} or {PER[-1]}"
    return f"quantize: rule={rule!r} is none of {', '.join(RULES)}, nvfp4"


def nvfp4(x: Value, dtype: DType, whole: Value | Number | None, asked: tuple[Any, ...]) -> Any:
    """Values of f4e2m1, for each 16 of a row a scale of f8e4m3, and one of f32 for the tensor, which may be given.

    up = 448 * 6 / amax of the tensor, 1 where that is 0; scale = block's amax * (up * (1 / 6)); x * (1 / (scale / up)).
    TransformerEngine, `compute_decoding_scaling_factor` and `compute_global_encode_scaling_factor_FP4`
    (transformer_engine/common/cast/nvfp4/core_nvfp4.cuh)."""
    if dtype is not f4e2m1 or asked != ("block", 16, None, None):
        raise SpecError("quantize: rule='nvfp4' is of f4e2m1 in blocks of 16; leave per=, block=, least= out", caller())
    rank = len(x.shape)
    given = whole is not None
    if whole is None:
        magnitude = abs(x)
        largest = reduce("max", magnitude, tuple(range(-rank, 0)))
        up = minimum(f8e4m3.largest * dtype.largest / largest, f32.largest)
        up = where((largest == 0.0) | (up == 0.0), 1.0, up)
        whole = 1.0 / up
    else:
        up = 1.0 / whole  # type: ignore[assignment]

    def scaled(block_largest: Value) -> tuple[Value, Callable[..., Value]]:
        scale = cast(minimum(block_largest * (up * inverse_limit(dtype)), f32.largest), f8e4m3)
        factor = minimum(1.0 / (scale * whole), f32.largest)

        def values(half: Value) -> Value:
            return cast(half * factor, dtype)

        return scale, values

    values, scale = by_pairs(groups(x, 16), rank, scaled)
    return (values, scale) if given else (values, scale, whole)


@composite
def dequantize(x: Value, scale: Value | Number, zero: Value | None = None) -> Value:
    """(x - zero) * scale, in f32. x [..., N] with a scale [..., N // 128] has one for each 128 neighbours of a row; a
    zero has the scale's shape. x [M, N] with a scale [M // 128, N // 128] has one for each 128 x 128, and no zero; so
    have the matrices of x [E, M, N] with [E, M // 128, N // 128]. A product of 8-bit floats that both have scales of
    blocks of 128 is summed block by block."""
    need_traced("dequantize", x)
    if not of_blocks(x, scale):
        return (as_f32(x) if zero is None else as_f32(x) - as_f32(zero)) * scale
    assert isinstance(scale, Value)
    if (
        scale.shape[:-1] != x.shape[:-1]
        and len(x.shape) in (2, 3)
        and len(scale.shape) == len(x.shape)
        and zero is None
    ):
        return Dequantized(of_two_axes(as_f32(x), scale).node, x, scale)
    found = groups(as_f32(x), block_of(x, scale))
    if zero is None:
        return Dequantized(ungrouped(found * scale[..., None], len(x.shape)).node, x, scale)
    if zero.shape != scale.shape:
        shapes = f"{shape_text(zero.shape)} and scales of {shape_text(scale.shape)}"
        raise SpecError(f"dequantize: zeros of {shapes}; there is one of each for a block", caller())
    found = found - as_f32(zero)[..., None]
    return ungrouped(found * scale[..., None], len(x.shape))


def of_two_axes(x: Value, scale: Value) -> Value:
    """A matrix, or several, times scales [.., M // 128, N // 128]."""
    rows = len(x.shape) - 2
    view = View.identity(x.shape).split(rows + 1, (scale.shape[-1], block_of(x, scale)))
    view = view.split(rows, (scale.shape[-2], block_of(x, scale, axis=-2)))
    by_block = scale[:, None, :, None] if not rows else scale[:, :, None, :, None]
    found = viewed(x, view, f"{{0}}.reshape({tuple_text(view.shape)})", "groups") * by_block
    whole = View.identity(found.shape).merged(rows + 2, 2).merged(rows, 2)
    return viewed(found, whole, f"{{0}}.reshape({tuple_text(whole.shape)})", "rearrange")


def of_blocks(x: Value, scale: object) -> bool:
    """Has the scale fewer columns than x, and more than one?"""
    return isinstance(scale, Value) and bool(scale.shape) and bool(x.shape) and scale.shape[-1] not in (1, x.shape[-1])


def block_of(x: Value, scale: Value, axis: int = -1) -> Size:
    """How many neighbours of a row, or of another axis, share a scale."""
    whole, count = x.shape[axis], scale.shape[axis]
    size = None if isinstance(count, int) and isinstance(whole, int) and whole % count else whole // count
    if size is None or size * count != whole or len(scale.shape) != len(x.shape):
        raise SpecError(
            f"dequantize: {shape_text(x.shape)} with scales of {shape_text(scale.shape)}: rows of {whole} are no whole "
            f"number of blocks for {count} scales\n  declare the scales [..., {whole} // block], as in {whole} // 128",
            caller(),
        )
    return size
