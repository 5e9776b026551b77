"""Activations and gated units, forward and backward."""

from fusegen import bf16, dims, f16, f32, i32
from fusegen import ops as F
from tests.corpus.cases import case

M, N = dims("M N")


@case(M=6, N=64)
def silu_and_mul(x: bf16[M, 2 * N]) -> bf16[M, N]:
    """vLLM activation_kernels.cu."""
    gate, up = F.split(x, 2)
    return F.silu(gate) * up


@case(M=6, N=64)
def mul_and_silu(x: bf16[M, 2 * N]) -> bf16[M, N]:
    up, gate = F.split(x, 2)
    return up * F.silu(gate)


@case(M=6, N=64)
def gelu_and_mul(x: bf16[M, 2 * N]) -> bf16[M, N]:
    gate, up = F.split(x, 2)
    return F.gelu(gate, approximate="none") * up


@case(M=6, N=64)
def gelu_tanh_and_mul(x: bf16[M, 2 * N]) -> bf16[M, N]:
    gate, up = F.split(x, 2)
    return F.gelu(gate) * up


@case(M=6, N=64)
def fatrelu_and_mul(x: f16[M, 2 * N], threshold: f32) -> f16[M, N]:
    gate, up = F.split(x, 2)
    return F.where(gate > threshold, gate, 0.0) * up


@case(M=6, N=64)
def swigluoai_and_mul(x: bf16[M, 2 * N]) -> bf16[M, N]:
    """gpt-oss: gate and up alternate, clamped."""
    gate, up = x[..., ::2], x[..., 1::2]
    gate, up = F.minimum(gate, 7.0), F.clip(up, -7.0, 7.0)
    return gate * F.sigmoid(gate * 1.702) * (up + 1)


@case(M=6, N=64)
def gelu_new(x: f16[M, N]) -> f16[M, N]:
    return 0.5 * x * (1.0 + F.tanh(0.79788456 * (x + 0.044715 * x**3)))


@case(M=6, N=64)
def gelu_fast(x: f16[M, N]) -> f16[M, N]:
    return 0.5 * x * (1.0 + F.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


@case(M=6, N=64)
def gelu_quick(x: f16[M, N]) -> f16[M, N]:
    return x * F.sigmoid(1.702 * x)


@case(M=6, N=64)
def relu_squared(x: bf16[M, N]) -> bf16[M, N]:
    """Primer, Nemotron."""
    return F.square(F.relu(x))


@case(M=6, N=64)
def xielu(x: bf16[M, N], positive: f32[1], negative: f32[1]) -> bf16[M, N]:
    """Apertus."""
    return F.where(x > 0, positive * x * x + 0.5 * x, (F.expm1(F.minimum(x, -1e-6)) - x) * negative + 0.5 * x)


@case(M=6, N=64)
def softcap(x: f32[M, N]) -> f32[M, N]:
    """Gemma 2's logits."""
    return 30.0 * F.tanh(x / 30.0)


@case(M=6, N=64)
def swiglu_backward(gate: bf16[M, N], up: bf16[M, N], dy: bf16[M, N]) -> tuple[bf16[M, N], bf16[M, N]]:
    """Liger."""
    s = F.sigmoid(gate)
    return dy * up * s * (1 + gate * (1 - s)), dy * gate * s


@case(M=6, N=64)
def geglu_backward(gate: bf16[M, N], up: bf16[M, N], dy: bf16[M, N]) -> tuple[bf16[M, N], bf16[M, N]]:
    """Liger, by tanh."""
    inner = 0.7978845608 * gate * (1 + 0.044715 * gate * gate)
    t = F.tanh(inner)
    slope = 0.5 * (1 + t) + 0.5 * gate * (1 - t * t) * 0.7978845608 * (1 + 3 * 0.044715 * gate * gate)
    return dy * up * slope, dy * 0.5 * gate * (1 + t)


@case(M=6, N=64)
def bias_gelu(x: bf16[M, N], bias: bf16[N]) -> bf16[M, N]:
    """Megatron."""
    return F.gelu(x + bias)


@case(M=6, N=64)
def bias_dropout_add(
    x: bf16[M, N], bias: bf16[N], residual: bf16[M, N], p: f32, seed: i32[1], step: i32[1]
) -> bf16[M, N]:
    """Megatron."""
    return residual + F.dropout(x + bias, p, seed, step)


@case(M=6, N=64)
def mish_layer(x: f32[M, N]) -> f32[M, N]:
    return F.mish(x) + F.softplus(x) * F.hardswish(x)


@case(M=6, N=64)
def snake(x: f32[M, N], alpha: f32[N]) -> f32[M, N]:
    """BigVGAN."""
    return x + F.square(F.sin(alpha * x)) / (alpha + 1e-9)


@case(M=6, N=64)
def mamba_dt(dt: bf16[M, N], bias: f32[N]) -> f32[M, N]:
    return F.clip(F.softplus(dt + bias), 0.0, 0.1)


@case(M=6, N=64)
def lora_add(y: bf16[M, N], delta: bf16[M, N], active: f32[M, 1], scale: f32) -> bf16[M, N]:
    return y + active * scale * delta
