"""Optimizers' steps, and what gradients go through before."""

from fusegen import b8, bf16, dims, f32, i8
from fusegen import ops as F
from tests.corpus.cases import case

M, N = dims("M N")


@case(N=500)
def sgd_momentum(w: f32[N], g: f32[N], m: f32[N], lr: f32) -> tuple[f32[N], f32[N]]:
    m = 0.9 * m + g
    return w - lr * m, m


@case(N=500)
def adam(w: f32[N], g: f32[N], m: f32[N], v: f32[N], lr: f32, c1: f32, c2: f32) -> tuple[f32[N], f32[N], f32[N]]:
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    return w - lr * (m / c1) / (F.sqrt(v / c2) + 1e-8), m, v


@case(N=500)
def adamw_bf16(
    w: f32[N], g: bf16[N], m: f32[N], v: f32[N], lr: f32, decay: f32
) -> tuple[f32[N], bf16[N], f32[N], f32[N]]:
    """Apex, with a master copy."""
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    new = w * (1 - lr * decay) - lr * m / (F.sqrt(v) + 1e-8)
    return new, new, m, v


@case(N=500)
def lion(w: f32[N], g: f32[N], m: f32[N], lr: f32, decay: f32) -> tuple[f32[N], f32[N]]:
    step = F.sign(0.9 * m + 0.1 * g)
    return w - lr * (step + decay * w), 0.99 * m + 0.01 * g


@case(N=500)
def adagrad(w: f32[N], g: f32[N], s: f32[N], lr: f32) -> tuple[f32[N], f32[N]]:
    s = s + g * g
    return w - lr * g / (F.sqrt(s) + 1e-10), s


@case(N=500)
def rmsprop(w: f32[N], g: f32[N], s: f32[N], lr: f32) -> tuple[f32[N], f32[N]]:
    s = 0.99 * s + 0.01 * g * g
    return w - lr * g * F.rsqrt(s + 1e-8), s


@case(M=8, N=64)
def adafactor_statistics(g: f32[M, N]) -> tuple[f32[M, 1], f32[1, N]]:
    """Means of rows and of columns."""
    s = F.square(g) + 1e-30
    return F.mean(s), F.mean(s, over=M)


@case(M=8, N=64)
def lamb_ratio(w: f32[M, N], u: f32[M, N]) -> f32[1, 1]:
    return F.sqrt(F.sum(F.square(w), axis=None)) / (F.sqrt(F.sum(F.square(u), axis=None)) + 1e-6)


@case(N=500)
def grad_norm(g: f32[N]) -> f32[1]:
    return F.norm(g)


@case(N=500)
def clip_by_norm(g: bf16[N], norm: f32[1]) -> bf16[N]:
    return g * F.minimum(1.0 / (norm + 1e-6), 1.0)


@case(N=500)
def unscale_and_check(g: f32[N], scale: f32[1]) -> tuple[f32[N], b8[1]]:
    """torch.amp."""
    return g / scale, F.any(~F.isfinite(g))


@case(N=500)
def ema(w: f32[N], average: f32[N], decay: f32) -> f32[N]:
    return average * decay + w * (1 - decay)


@case(M=8, N=64)
def newton_schulz_step(x: bf16[M, N], a: bf16[M, M]) -> bf16[M, N]:
    """Muon."""
    return 3.4445 * x + a @ x


@case(M=8, N=256)
def adam_8bit_state(m: i8[M, N], scale: f32[M, 1], g: f32[M, N]) -> tuple[i8[M, N], f32[M, 1]]:
    new = 0.9 * (m * scale) + 0.1 * g
    top = F.amax(new) / 127.0
    return F.cast(new / F.maximum(top, 1e-12), i8), top
