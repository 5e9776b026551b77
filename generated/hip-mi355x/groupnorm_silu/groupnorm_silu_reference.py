"""groupnorm_silu: what the kernel must compute, in float64.

silu(GroupNorm(x)) of 32 groups of C channels: what is normalized together is one row, which is read once.

Operands, with leading axes of any size:
    x: bf16[B, 32 * C, S]
    gamma: bf16[32 * C]
    beta: bf16[32 * C]

Returns out bf16[B, 32 * C, S]; floats are left in float64, not yet rounded to the storage type.
"""

import numpy as np


@np.errstate(all="ignore")
def groupnorm_silu(x, gamma, beta):
    B, C, S = x.shape[0], x.shape[1] // 32, x.shape[2]
    x = np.asarray(x).astype(np.float64)
    gamma = np.asarray(gamma).astype(np.float64)
    beta = np.asarray(beta).astype(np.float64)
    per_channel = x.reshape(B, 32, C, S)
    in_groups = x.reshape(B, 32, C, S).reshape(B, 32, C * S)
    sum_of_in_groups = in_groups.sum(-1, keepdims=True)
    mean = sum_of_in_groups / (C * S)
    groupnorm = mean[..., None]
    per_channel_minus_groupnorm = per_channel - groupnorm
    in_groups_minus_mean = in_groups - mean
    square = in_groups_minus_mean * in_groups_minus_mean
    sum_of_squares = square.sum(-1, keepdims=True)
    variance = sum_of_squares / (C * S)
    variance_plus_eps = variance + 1e-05
    rstd = 1 / np.sqrt(variance_plus_eps)
    view_of_rstd = rstd[..., None]
    mul = per_channel_minus_groupnorm * view_of_rstd
    view_of_gamma = gamma.reshape(32, C)
    view_of_view_of_gamma = view_of_gamma[..., None]
    mul_from_x = mul * view_of_view_of_gamma
    view_of_beta = beta.reshape(32, C)
    view_of_view_of_beta = view_of_beta[..., None]
    normalized = mul_from_x + view_of_view_of_beta
    view_of_normalized = normalized.reshape(B, 32 * C, S)
    silu = view_of_normalized / (1 + np.exp(-view_of_normalized))
    return silu
