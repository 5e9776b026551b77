"""Quantizers, and what reads their results."""

from fusegen import bf16, dims, f8e4m3, f16, f32, i8, i32, u8
from fusegen import ops as F
from tests.corpus.cases import case

G, K, M, N = dims("G K M N")


@case(M=6, N=64)
def static_scaled_fp8_quant(x: bf16[M, N], scale: f32[1]) -> f8e4m3[M, N]:
    """vLLM."""
    return x / scale


@case(M=6, N=64)
def dynamic_per_token_fp8(x: bf16[M, N]) -> tuple[f8e4m3[M, N], f32[M, 1]]:
    values, scale = F.quantize(x, f8e4m3)
    return values, scale


@case(M=6, N=64)
def dynamic_per_tensor_fp8(x: bf16[M, N]) -> tuple[f8e4m3[M, N], f32[1, 1]]:
    values, scale = F.quantize(x, f8e4m3, per="tensor")
    return values, scale


@case(M=6, N=256)
def per_token_group_fp8(x: bf16[M, N]) -> tuple[f8e4m3[M, N], f32[M, N // 128]]:
    """SGLang."""
    values, scale = F.quantize(x, f8e4m3, per="block")
    return values, scale


@case(M=6, N=64)
def dynamic_int8(x: bf16[M, N]) -> tuple[i8[M, N], f32[M, 1]]:
    values, scale = F.quantize(x, i8)
    return values, scale


@case(M=6, N=64)
def asymmetric_u8(x: f32[M, N]) -> tuple[u8[M, N], f32[M, 1], i32[M, 1]]:
    low, high = F.minimum(F.min(x), 0.0), F.maximum(F.max(x), 0.0)
    scale = (high - low) / 255.0
    zero = F.cast(F.round(-low / scale), i32)
    return F.cast(F.round(x / scale) + zero, u8), scale, zero


@case(M=6, N=64)
def rms_norm_dynamic_fp8(x: bf16[M, N], weight: bf16[N]) -> tuple[f8e4m3[M, N], f32[M, 1]]:
    values, scale = F.quantize(F.rmsnorm(x, weight), f8e4m3)
    return values, scale


@case(M=6, N=64)
def silu_mul_fp8(x: bf16[M, 2 * N], scale: f32[1]) -> f8e4m3[M, N]:
    gate, up = F.split(x, 2)
    return F.silu(gate) * up / scale


@case(M=6, N=64)
def smooth_quant(x: f16[M, N], smooth: f16[N]) -> tuple[i8[M, N], f32[M, 1]]:
    values, scale = F.quantize(x / smooth, i8)
    return values, scale


@case(M=6, N=64)
def dequantize_w8a8(x: i32[M, N], row: f32[M, 1], col: f32[N], bias: bf16[N]) -> bf16[M, N]:
    """Behind an int8 product."""
    return x * row * col + bias


@case(K=8, N=64)
def unpack_int4(packed: i32[K, N]) -> tuple[bf16[K, N], bf16[K, N]]:
    """AWQ: two of the eight numbers of a word."""
    return F.cast(packed & 15, f32) - 8.0, F.cast((packed >> 4) & 15, f32) - 8.0


@case(K=8, N=64)
def dequantize_groups(w: i8[K, N], scale: f16[K, N // 32]) -> f16[K, N]:
    """GPTQ: a scale for 32 neighbours."""
    groups = F.groups(w, 32)
    return F.rearrange(groups * scale[..., None], "k g c -> k (g c)")


@case(M=6, N=64)
def fake_quantize(x: f32[M, N], scale: f32[1]) -> f32[M, N]:
    return F.clip(F.round(x / scale), -128.0, 127.0) * scale


@case(M=6, N=64)
def absmax_of_columns(w: bf16[M, N]) -> f32[1, N]:
    return F.amax(w, over=M)
