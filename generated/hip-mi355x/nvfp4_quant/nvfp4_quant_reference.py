"""nvfp4_quant: what the kernel must compute, in float64.

x as f4e2m1 with a scale of f8e4m3 for each 16 of a row; x is near values * (scale * whole).

Operands, with leading axes of any size:
    x: bf16[M, N]
    whole: f32[1]

Returns out0 u8[M, N // 2], scale f8e4m3[M, N // 16]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np
from ml_dtypes import float4_e2m1fn, float8_e4m3fn


@np.errstate(all="ignore")
def nvfp4_quant(x, whole):
    M, N = x.shape[0], x.shape[1]
    x = np.asarray(x).astype(np.float64)
    whole = np.asarray(whole).astype(np.float64)
    quantize = x.reshape(M, N // 16, 16)
    low = quantize[..., 0::2]
    abs_ = np.abs(low)
    high = quantize[..., 1::2]
    abs_of_factor = np.abs(high)
    magnitude = np.maximum(abs_, abs_of_factor)
    max_of_magnitude = magnitude.max(-1, keepdims=True)
    up = 1.0 / whole
    mul = up * 0.1666666716337204
    max_of_magnitude_times_mul = max_of_magnitude * mul
    minimum = np.minimum(max_of_magnitude_times_mul, 3.4028234663852886e+38)
    scale = np.clip(minimum, -448.0, 448.0).astype(np.float32).astype(float8_e4m3fn).astype(np.float64)
    scale_times_whole = scale * whole
    quotient = 1.0 / scale_times_whole
    factor = np.minimum(quotient, 3.4028234663852886e+38)
    low_times_factor = low * factor
    high_times_factor = high * factor
    view_of_minimum = minimum[..., 0]
    code_of_f4e2m1_of_low_times_factor = np.where(np.isnan(low_times_factor), 7, np.clip(low_times_factor, -6.0, 6.0).astype(np.float32).astype(float4_e2m1fn).view(np.uint8)).astype(np.int32)
    bit_and = code_of_f4e2m1_of_low_times_factor & 15
    code_of_f4e2m1 = np.where(np.isnan(high_times_factor), 7, np.clip(high_times_factor, -6.0, 6.0).astype(np.float32).astype(float4_e2m1fn).view(np.uint8)).astype(np.int32)
    bit_and_from_x = code_of_f4e2m1 & 15
    shift_left = np.left_shift(bit_and_from_x, 4)
    bit_or = bit_and | shift_left
    pack = bit_or.reshape(M, N // 2)
    return pack, view_of_minimum
