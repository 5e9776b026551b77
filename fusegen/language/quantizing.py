"""How scales of narrow types are made of the largest magnitudes that they are for: one function a convention.

Each takes the largest magnitudes, f32, and gives the scale that is stored, which the values are to be multiplied by
again, and the number that a value is multiplied by, or None where it is divided by the scale. They are written from
the sources that they name, operation by operation, since a value between two codes goes by the last bit of its scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fusegen.language.elementwise import maximum, minimum, power_of_2_above, power_of_2_below, where
from fusegen.language.trace import Value
from fusegen.language.types import DType, f32

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


@dataclass(frozen=True, slots=True)
class Rule:
    """A convention: how it scales, the least magnitude that it scales for, of a block another one, and whether its
    scales are powers of 2 unless one asks."""

    scaled: Callable[[Value, DType, bool], Scaled]
    least: float
    least_of_block: float
    powers: bool = False


RULES: Mapping[str, Rule] = {
    "inverse": Rule(inverse, 1e-12, 1e-12),
    "vllm": Rule(vllm, 1e-12, 1e-10),
    "deepseek": Rule(inverse, 1e-4, 1e-4),
    "te": Rule(te, 0.0, 0.0, powers=True),
}
PACKED = {
    "mx": "whose scales are bytes of exponents (e8m0), which no array of a chain holds yet",
    "mx_floor": "whose scales are bytes of exponents (e8m0), which no array of a chain holds yet",
    "nvfp4": "whose values are two to a byte (e2m1), which no array of a chain holds yet",
}
"""Conventions that are known by name, and what keeps them out."""
