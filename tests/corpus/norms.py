"""Normalisations, forward and backward."""

from fusegen import bf16, dims, f8e4m3, f16, f32, i32
from fusegen import ops as F
from tests.corpus.cases import case

B, C, D, H, L, M, N, S = dims("B C D H L M N S")


@case(M=6, N=64)
def rms_norm(x: bf16[M, N], weight: bf16[N]) -> bf16[M, N]:
    """vLLM layernorm_kernels.cu."""
    return F.rmsnorm(x, weight, eps=1e-6)


@case(M=6, N=64)
def fused_add_rms_norm(x: bf16[M, N], residual: bf16[M, N], weight: bf16[N]) -> tuple[bf16[M, N], bf16[M, N]]:
    """vLLM."""
    h = x + residual
    return F.rmsnorm(h, weight), h


@case(M=6, N=64)
def gemma_rms_norm(x: bf16[M, N], weight: bf16[N]) -> bf16[M, N]:
    """Gemma: 1 + weight, normalized in f32."""
    return x * F.rsqrt(F.mean(F.square(x)) + 1e-6) * (1.0 + weight)


@case(M=6, N=64)
def llama_rms_norm_cast(x: bf16[M, N], weight: bf16[N]) -> bf16[M, N]:
    """HF Llama: rounded before the weight."""
    return weight * F.cast(x * F.rsqrt(F.mean(F.square(x)) + 1e-5), bf16)


@case(M=6, N=64)
def layer_norm(x: f16[M, N], gamma: f16[N], beta: f16[N]) -> f16[M, N]:
    """Apex FusedLayerNorm."""
    return F.layernorm(x, gamma, beta)


@case(M=6, N=64)
def layer_norm_with_statistics(x: f16[M, N], gamma: f32[N], beta: f32[N]) -> tuple[f16[M, N], f32[M], f32[M]]:
    """Apex: mean and reciprocal deviation are kept for the backward pass."""
    mean, rstd = F.mean(x), F.rsqrt(F.var(x) + 1e-5)
    return (x - mean) * rstd * gamma + beta, mean[..., 0], rstd[..., 0]


@case(M=6, N=64)
def layer_norm_without_bias(x: f32[M, N], gamma: f32[N]) -> f32[M, N]:
    """nanoGPT."""
    return (x - F.mean(x)) * F.rsqrt(F.var(x) + 1e-5) * gamma


@case(M=6, N=64)
def layer_norm_dx(x: bf16[M, N], dy: bf16[M, N], gamma: bf16[N], mean: f32[M, 1], rstd: f32[M, 1]) -> bf16[M, N]:
    """The input's gradient, Liger."""
    unit, g = (x - mean) * rstd, dy * gamma
    return (g - F.mean(g) - unit * F.mean(g * unit)) * rstd


@case(M=6, N=64)
def rms_norm_dx(x: bf16[M, N], dy: bf16[M, N], weight: bf16[N], rstd: f32[M, 1]) -> bf16[M, N]:
    """Liger rms_norm backward."""
    g = dy * weight
    return rstd * (g - x * F.square(rstd) * F.mean(g * x))


@case(M=16, N=64)
def rms_norm_dweight(x: bf16[M, N], dy: bf16[M, N], rstd: f32[M, 1]) -> f32[N]:
    return F.sum(dy * x * rstd, over=M)[0]


@case(M=16, N=64)
def layer_norm_dparameters(x: f16[M, N], dy: f16[M, N], mean: f32[M, 1], rstd: f32[M, 1]) -> tuple[f32[N], f32[N]]:
    return F.sum(dy * (x - mean) * rstd, over=M)[0], F.sum(dy, over=M)[0]


@case(M=6, H=4, D=32)
def qk_norm(q: bf16[M, H, D], weight: bf16[D]) -> bf16[M, H, D]:
    """Qwen3, per head."""
    return F.rmsnorm(q, weight)


@case(M=6, H=4, D=32)
def mla_q_a_norm(qkv: bf16[M, H * D + 2 * D], weight: bf16[H * D]) -> bf16[M, H * D]:
    """DeepSeek MLA: the norm of a part of a projection's columns."""
    return F.rmsnorm(qkv[:, : H * D], weight)


@case(B=2, C=16, L=24)
def group_norm(x: f32[B, C, L], gamma: f32[C], beta: f32[C]) -> f32[B, C, L]:
    """torch."""
    return F.groupnorm(x, 4, gamma, beta)


@case(B=2, C=16, L=24)
def instance_norm(x: f32[B, C, L]) -> f32[B, C, L]:
    return (x - F.mean(x)) * F.rsqrt(F.var(x) + 1e-5)


@case(B=2, C=16, L=24)
def batch_norm_inference(
    x: f16[B, C, L], mean: f32[C, 1], var: f32[C, 1], gamma: f32[C, 1], beta: f32[C, 1]
) -> f16[B, C, L]:
    return (x - mean) * F.rsqrt(var + 1e-5) * gamma + beta


@case(B=4, C=16, L=24)
def batch_norm_statistics(x: f32[B, C, L]) -> tuple[f32[1, C, 1], f32[1, C, 1]]:
    """torch's running statistics, over batch and length."""
    mean = F.mean(F.mean(x), over=B)
    return mean, F.mean(F.mean(F.square(x)), over=B) - F.square(mean)


@case(M=6, N=64)
def ada_layer_norm(x: bf16[M, N], shift: bf16[N], scale: bf16[N]) -> bf16[M, N]:
    """DiT modulation."""
    return F.layernorm(x) * (1 + scale) + shift


@case(B=2, S=3, N=64)
def gated_residual(x: bf16[B, S, N], gate: bf16[B, 1, N], y: bf16[B, S, N]) -> bf16[B, S, N]:
    """DiT."""
    return x + gate * y


@case(M=6, N=64)
def gated_rms_norm(x: bf16[M, N], z: bf16[M, N], weight: f32[N]) -> bf16[M, N]:
    """Mamba2 RMSNormGated."""
    return F.rmsnorm(x * F.silu(z), weight)


@case(M=6, N=64)
def l2_norm(x: f32[M, N]) -> f32[M, N]:
    """FLA l2norm of queries and keys."""
    return x * F.rsqrt(F.sum(F.square(x)) + 1e-6)


@case(M=6, N=64)
def deep_norm(x: bf16[M, N], y: bf16[M, N], gamma: bf16[N], beta: bf16[N], alpha: f32) -> bf16[M, N]:
    return F.layernorm(x * alpha + y, gamma, beta)


@case(M=6, N=64)
def dyt(x: bf16[M, N], alpha: f32[1], gamma: bf16[N], beta: bf16[N]) -> bf16[M, N]:
    """Liger DynamicTanh."""
    return gamma * F.tanh(alpha * x) + beta


@case(M=6, N=64)
def dropout_add_layer_norm(
    x: f16[M, N], residual: f16[M, N], gamma: f16[N], beta: f16[N], seed: i32[1], step: i32[1]
) -> tuple[f16[M, N], f16[M, N]]:
    """flash-attention's layer_norm."""
    h = residual + F.dropout(x, 0.1, seed, step)
    return F.layernorm(h, gamma, beta), h


@case(M=16, N=64)
def weight_norm(v: f32[M, N], g: f32[M, 1]) -> f32[M, N]:
    """torch.nn.utils.weight_norm."""
    return v * (g / F.norm(v))


@case(M=6, H=4, D=32)
def two_norms_of_one_projection(
    kv: bf16[M, H * D + D], weight: bf16[H * D], rope: bf16[D]
) -> tuple[bf16[M, H * D], bf16[M, D]]:
    """Different widths side by side."""
    return F.rmsnorm(kv[:, : H * D], weight), kv[:, H * D :] * rope


@case(M=6, N=64)
def rms_norm_to_f8(x: bf16[M, N], weight: bf16[N], scale: f32[1]) -> f8e4m3[M, N]:
    """vLLM rms_norm_static_fp8_quant."""
    return F.rmsnorm(x, weight) / scale
