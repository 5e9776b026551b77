"""mxfp8_quant: what the kernel must compute, in float64.

x as f8e4m3 with a scale of f8e8m0 for each 32 of a row.

Operands, with leading axes of any size:
    x: bf16[M, N]

Returns values f8e4m3[M, N], scale f8e8m0[M, N // 32]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def mxfp8_quant(x):
    M, N = x.shape[0], x.shape[1]
    x = np.asarray(x).astype(np.float64)
    quantize = x.reshape(M, N // 32, 32)
    magnitude = np.abs(quantize)
    largest = magnitude.max(-1, keepdims=True)
    small = largest * 0.0022321429569274187
    whole = small == small
    le = small <= 5.877471754111438e-39
    power_of_2_above_ = np.ldexp(1.0, np.frexp(np.nan_to_num(np.clip(small, 2.0**-126, 2.0**127), nan=2.0**127))[1] - (np.frexp(np.nan_to_num(np.clip(small, 2.0**-126, 2.0**127), nan=2.0**127))[0] == 0.5))
    scale = np.where(le, 5.877471754111438e-39, power_of_2_above_)
    scale_is_eps = scale == 5.877471754111438e-39
    eq = scale == 1.7014118346046923e+38
    one_over_scale = 1.0 / scale
    where = np.where(eq, 0.0, one_over_scale)
    up = np.where(scale_is_eps, 1.0, where)
    factor = np.where(whole, up, np.nan)
    mul = quantize * factor
    view_of_mul = mul.reshape(M, N)
    where_of_factor = np.where(whole, scale, np.nan)
    view_of_where_of_factor = where_of_factor[..., 0]
    return view_of_mul, view_of_where_of_factor
