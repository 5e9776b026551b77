"""Chains as users write them, none of them in specs/ and none of them tuned: what benchmarks/heldout.py measures."""

from fusegen import b8, bf16, chain, dims, f32, i32
from fusegen import ops as F

B, C, G, H, S, M, N, K, D, T, V = dims("B C G H S M N K D T V")
INF = float("inf")


# ---------------------------------------------------------------- norms


@chain(M=16384, N=4096)
def layernorm_bare(x: bf16[M, N]) -> bf16[M, N]:
    """LayerNorm without an affine part."""
    return F.layernorm(x)


@chain(M=16384, N=4096)
def layernorm_gain(x: bf16[M, N], gamma: bf16[N]) -> bf16[M, N]:
    """LayerNorm without a bias."""
    return F.layernorm(x, gamma)


@chain(M=16384, N=4096)
def layernorm_affine(x: bf16[M, N], gamma: bf16[N], beta: bf16[N]) -> bf16[M, N]:
    """LayerNorm."""
    return F.layernorm(x, gamma, beta)


@chain(M=16384, N=4096)
def residual_layernorm(
    x: bf16[M, N], residual: bf16[M, N], gamma: bf16[N], beta: bf16[N],
) -> tuple[bf16[M, N], bf16[M, N]]:  # fmt: skip
    """The sum goes on beside its norm, as in a pre-norm block."""
    h = residual + x
    return h, F.layernorm(h, gamma, beta)


@chain(M=16384, N=4096)
def scaled_residual_rmsnorm(
    x: bf16[M, N], residual: bf16[M, N], gain: bf16[N], scale: f32,
) -> tuple[bf16[M, N], bf16[M, N]]:  # fmt: skip
    """h = residual + scale * x, and its RMSNorm."""
    h = residual + x * scale
    return h, F.rmsnorm(h, gain)


@chain(T=32768, H=32, D=128)
def head_rmsnorm(x: bf16[T, H, D], gain: bf16[D]) -> bf16[T, H, D]:
    """RMSNorm of each head."""
    return F.rmsnorm(x, gain)


@chain(T=16384, H=32, D=128)
def qk_norm(
    q: bf16[T, H, D], k: bf16[T, H, D], q_gain: bf16[D], k_gain: bf16[D],
) -> tuple[bf16[T, H, D], bf16[T, H, D]]:  # fmt: skip
    """RMSNorm of queries and keys, head by head."""
    return F.rmsnorm(q, q_gain), F.rmsnorm(k, k_gain)


@chain(M=65536, N=1024)
def l2_normalised(x: f32[M, N]) -> f32[M, N]:
    """Rows of length 1."""
    return x * F.rsqrt(F.sum(F.square(x)) + 1e-12)


@chain(M=16384, N=4096)
def min_max_scaled(x: f32[M, N]) -> f32[M, N]:
    """Each row from 0 to 1."""
    low, high = F.min(x), F.max(x)
    return (x - low) / (high - low + 1e-6)


@chain(M=16384, N=4096)
def wide_residual_rmsnorm(
    x: bf16[M, N], residual: f32[M, N], gain: f32[N],
) -> tuple[f32[M, N], bf16[M, N]]:  # fmt: skip
    """A residual that stays f32 beside a norm in bf16."""
    h = residual + x
    return h, F.cast(F.rmsnorm(h, gain), bf16)


@chain(M=16384, N=4096)
def gated_rmsnorm(x: bf16[M, N], gate: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
    """A norm times silu(gate), as state-space blocks end."""
    return F.rmsnorm(x, gain) * F.silu(gate)


@chain(M=16384, N=4096)
def layernorm_statistics(
    x: bf16[M, N], gamma: bf16[N], beta: bf16[N],
) -> tuple[bf16[M, N], f32[M, 1], f32[M, 1]]:  # fmt: skip
    """LayerNorm, with what its backward pass needs."""
    mean = F.mean(x)
    centered = x - mean
    rstd = F.rsqrt(F.mean(centered * centered) + 1e-5)
    return centered * rstd * gamma + beta, mean, rstd


@chain(M=65536, G=32, D=64)
def head_layernorm(x: bf16[M, G, D], gamma: bf16[G, D], beta: bf16[G, D]) -> bf16[M, G, D]:
    """LayerNorm of each head, with an affine part of its own."""
    return F.layernorm(x, gamma, beta)


@chain(B=64, C=256, N=3136)
def instance_norm(x: f32[B, C, N], gamma: f32[C, 1], beta: f32[C, 1]) -> f32[B, C, N]:
    """Each channel of each picture."""
    return F.layernorm(x) * gamma + beta


@chain(M=16384, N=4096)
def rmsnorm_backward(x: bf16[M, N], grad: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
    """The gradient of RMSNorm by x."""
    rstd = F.rsqrt(F.mean(F.square(x)) + 1e-6)
    scaled = grad * gain
    return rstd * (scaled - x * (rstd * rstd * F.mean(scaled * x)))


@chain(M=16384, N=4096)
def layernorm_backward(
    x: bf16[M, N], grad: bf16[M, N], gamma: bf16[N], mean: f32[M, 1], rstd: f32[M, 1],
) -> bf16[M, N]:  # fmt: skip
    """The gradient of LayerNorm by x."""
    y = (x - mean) * rstd
    scaled = grad * gamma
    return rstd * (scaled - F.mean(scaled) - y * F.mean(scaled * y))


# ---------------------------------------------------------------- softmaxes


@chain(M=16384, N=4096)
def plain_softmax(x: bf16[M, N]) -> bf16[M, N]:
    """softmax(x)."""
    return F.softmax(x)


@chain(B=2, H=16, S=2048, N=2048)
def softcap_softmax(scores: bf16[B, H, S, N]) -> bf16[B, H, S, N]:
    """Scores capped at 50 before their softmax."""
    return F.softmax(50.0 * F.tanh(scores * (1 / 50.0)))


@chain(B=2, H=16, S=2048, N=2048)
def alibi_softmax(scores: bf16[B, H, S, N], slopes: f32[H, 1, 1]) -> bf16[B, H, S, N]:
    """Causal, with a bias that grows with the distance."""
    distance = F.cast(F.col_index(scores) - F.row_index(scores), f32)
    return F.softmax(F.causal(scores * 0.125 + slopes * distance))


@chain(B=4, H=12, S=1000, N=1000)
def odd_causal_softmax(scores: bf16[B, H, S, N]) -> bf16[B, H, S, N]:
    """A causal softmax."""
    return F.softmax(F.causal(scores * 0.125))


@chain(B=2, H=16, S=2048, N=2048)
def window_softmax(scores: bf16[B, H, S, N]) -> bf16[B, H, S, N]:
    """A causal softmax over the last 512 columns."""
    col, row = F.col_index(scores), F.row_index(scores)
    return F.softmax(F.where((col <= row) & (col > row - 512), scores * 0.125, -INF))


@chain(B=8, S=4096, N=4096)
def bool_softmax(scores: bf16[B, S, N], mask: b8[B, S, N]) -> bf16[B, S, N]:
    """softmax over what a mask of the same shape keeps."""
    return F.softmax(F.where(mask, scores * 0.125, -INF))


@chain(B=4, H=16, S=2048, N=2048)
def shared_mask_softmax(scores: bf16[B, H, S, N], mask: b8[B, 1, S, N]) -> bf16[B, H, S, N]:
    """softmax over what a mask keeps, the same for every head."""
    return F.softmax(F.where(mask, scores * 0.125, -INF))


@chain(B=8, H=16, S=1024, N=1024)
def bias_softmax(scores: bf16[B, H, S, N], bias: bf16[H, S, N]) -> bf16[B, H, S, N]:
    """A bias for each head, the same for every sequence (T5's relative positions)."""
    return F.softmax(scores + bias)


@chain(T=2048, V=128256)
def vocabulary_log_softmax(logits: bf16[T, V]) -> bf16[T, V]:
    """log_softmax(logits)."""
    return F.log_softmax(logits)


@chain(B=1, H=16, S=2048, N=2048)
def capped_causal_softmax(scores: bf16[B, H, S, N]) -> bf16[B, H, S, N]:
    """Capped at 30, and causal."""
    return F.softmax(F.causal(30.0 * F.tanh(scores * (0.125 / 30.0))))


@chain(B=8, H=16, S=1024, N=1024)
def padded_softmax(scores: bf16[B, H, S, N], padding: f32[B, 1, 1, N]) -> bf16[B, H, S, N]:
    """Padding as numbers to add, the same for every query."""
    return F.softmax(scores * 0.125 + padding)


@chain(B=64, H=12, S=197, N=197)
def patch_softmax(scores: bf16[B, H, S, N], scale: f32) -> bf16[B, H, S, N]:
    """Attention among a picture's patches and one token more."""
    return F.softmax(scores * scale)


@chain(B=2048, H=8, S=49, N=49)
def window_bias_softmax(scores: bf16[B, H, S, N], bias: bf16[H, S, N]) -> bf16[B, H, S, N]:
    """Attention within windows of 7 x 7, with a bias of positions for each head."""
    return F.softmax(scores * 0.125 + bias)


@chain(B=1, H=16, S=2048, N=2048)
def softmax_backward(p: bf16[B, H, S, N], grad: bf16[B, H, S, N]) -> bf16[B, H, S, N]:
    """The gradient of a softmax by its scores."""
    return p * (grad - F.sum(p * grad))


@chain(T=262144, N=64)
def router_softmax(logits: f32[T, N], bias: f32[N]) -> f32[T, N]:
    """A softmax over experts."""
    return F.softmax(logits + bias)


@chain(T=4096, V=50257)
def cross_entropy_backward(logits: bf16[T, V], label: i32[T, 1], scale: f32) -> bf16[T, V]:
    """(softmax(logits) - one at the label) * scale."""
    one = F.where(F.col_index(logits) == label, 1.0, 0.0)
    return (F.softmax(logits) - one) * scale


# ---------------------------------------------------------------- one value a row


@chain(M=32768, N=8192)
def row_mean(x: bf16[M, N]) -> f32[M, 1]:
    """The mean of each row."""
    return F.mean(x)


@chain(M=32768, N=8192)
def row_max(x: bf16[M, N]) -> bf16[M, 1]:
    """The largest of each row."""
    return F.max(x)


@chain(T=4096, V=128256)
def row_logsumexp(logits: bf16[T, V]) -> f32[T, 1]:
    """log(sum(exp(logits)))."""
    top = F.max(logits)
    return top + F.log(F.sum(F.exp(logits - top)))


@chain(M=32768, N=8192)
def row_entropy(p: bf16[M, N]) -> f32[M, 1]:
    """-sum(p log p) of probabilities."""
    clipped = F.maximum(F.abs(p), 1e-9)
    return -F.sum(clipped * F.log(clipped))


@chain(M=16384, N=4096)
def row_quantised(x: bf16[M, N]) -> tuple[i32[M, N], f32[M, 1]]:
    """Each row by its own scale to whole numbers up to 127, and the scale."""
    scale = F.max(F.abs(x)) / 127.0
    return F.cast(F.clip(x / F.maximum(scale, 1e-12), -127.0, 127.0), i32), scale


@chain(M=32768, N=4096)
def row_variance(x: bf16[M, N]) -> f32[M, 1]:
    """The variance of each row."""
    return F.var(x)


@chain(M=32768, N=4096)
def row_sums(x: f32[M, N]) -> f32[M, 1]:
    """The sum of each row."""
    return F.sum(x)


@chain(M=32768, N=4096)
def masked_mean(x: bf16[M, N], mask: b8[M, N]) -> f32[M, 1]:
    """The mean of what a mask keeps."""
    return F.sum(F.where(mask, x, 0.0)) / F.maximum(F.sum(F.where(mask, 1.0, 0.0)), 1.0)


@chain(M=65536, N=768)
def cosine_similarity(a: bf16[M, N], b: bf16[M, N]) -> f32[M, 1]:
    """Of rows, pair by pair."""
    return F.sum(a * b) * F.rsqrt(F.sum(F.square(a)) * F.sum(F.square(b)) + 1e-12)


@chain(T=4096, V=50257)
def cross_entropy(logits: bf16[T, V], label: i32[T, 1]) -> f32[T, 1]:
    """logsumexp(logits) - logits[label]."""
    top = F.max(logits)
    chosen = F.sum(F.where(F.col_index(logits) == label, logits, 0.0))
    return top + F.log(F.sum(F.exp(logits - top))) - chosen


@chain(T=4096, V=32000)
def divergence(p: bf16[T, V], q: bf16[T, V]) -> f32[T, 1]:
    """sum(e^p (p - q)) of logarithms of probabilities."""
    return F.sum(F.exp(p) * (p - q))


@chain(M=16384, N=4096)
def row_scaled(x: bf16[M, N]) -> tuple[bf16[M, N], f32[M, 1]]:
    """Each row by its largest magnitude, and that."""
    scale = F.maximum(F.max(F.abs(x)), 1e-12)
    return x / scale, scale


# ---------------------------------------------------------------- element by element


@chain(M=16384, N=8192)
def one_operand(a: f32[M, N]) -> f32[M, N]:
    """sigmoid(a)."""
    return F.sigmoid(a)


@chain(M=16384, N=8192)
def two_operands(a: f32[M, N], b: f32[M, N]) -> f32[M, N]:
    """0.9 a + 0.1 b."""
    return 0.9 * a + 0.1 * b


@chain(M=16384, N=8192)
def three_operands(a: f32[M, N], b: f32[M, N], c: f32[M, N]) -> f32[M, N]:
    """a + 0.5 b c."""
    return a + 0.5 * b * c


@chain(M=8192, N=8192)
def four_operands(a: f32[M, N], b: f32[M, N], c: f32[M, N], d: f32[M, N]) -> f32[M, N]:
    """a b + c d."""
    return a * b + c * d


@chain(M=8192, N=8192)
def five_operands(a: f32[M, N], b: f32[M, N], c: f32[M, N], d: f32[M, N], e: f32[M, N]) -> f32[M, N]:
    """relu(a + b) c + d e."""
    return F.relu(a + b) * c + d * e


@chain(M=8192, N=8192)
def six_operands(a: f32[M, N], b: f32[M, N], c: f32[M, N], d: f32[M, N], e: f32[M, N], f: f32[M, N]) -> f32[M, N]:
    """a b + c d + e f."""
    return a * b + c * d + e * f


@chain(M=16384, N=8192)
def adam_like(p: f32[M, N], m: f32[M, N], g: f32[M, N]) -> tuple[f32[M, N], f32[M, N]]:
    """A step with momentum: both parameter and momentum anew."""
    moved = 0.9 * m + g
    return p - 1e-3 * moved, moved


@chain(M=16384, N=8192)
def geglu(gate: bf16[M, N], up: bf16[M, N]) -> bf16[M, N]:
    """gelu(gate) * up."""
    return F.gelu(gate) * up


@chain(M=32768, N=4096)
def scaled_both_ways(x: bf16[M, N], rows: f32[M, 1], cols: f32[N]) -> bf16[M, N]:
    """A scale for each row and one for each column, as dequantising takes them."""
    return x * rows * cols


@chain(M=32768, N=4096)
def gated_residual(x: bf16[M, N], residual: bf16[M, N], gate: bf16[N]) -> bf16[M, N]:
    """residual + gate * x, a gate for each channel."""
    return residual + gate * x


@chain(B=8, S=4096, N=4096)
def positions_added(x: bf16[B, S, N], positions: bf16[S, N]) -> bf16[B, S, N]:
    """An embedding of each position, the same for every sequence."""
    return x + positions


@chain(M=32768, N=4096)
def bias_residual(x: bf16[M, N], bias: bf16[N], residual: bf16[M, N]) -> bf16[M, N]:
    """x + bias + residual: dropout's chain without the dropout."""
    return x + bias + residual


@chain(B=4, S=4096, H=32, D=64)
def rotated_halves(
    left: bf16[B, S, H, D], right: bf16[B, S, H, D], cosine: f32[S, 1, D], sine: f32[S, 1, D],
) -> tuple[bf16[B, S, H, D], bf16[B, S, H, D]]:  # fmt: skip
    """Rotary positions, the halves of each head apart."""
    return left * cosine - right * sine, right * cosine + left * sine


@chain(M=8192, N=14336)
def biased_swiglu(gate: bf16[M, N], up: bf16[M, N], gate_bias: bf16[N], up_bias: bf16[N]) -> bf16[M, N]:
    """silu(gate + bias) * (up + bias)."""
    return F.silu(gate + gate_bias) * (up + up_bias)


@chain(M=16384, N=4096)
def mish(x: bf16[M, N]) -> bf16[M, N]:
    """x * tanh(log(1 + e^x))."""
    return x * F.tanh(F.log(1.0 + F.exp(x)))


# ---------------------------------------------------------------- selections


@chain(B=4096, V=32000, K=50)
def best(logits: f32[B, V]) -> tuple[f32[B, K], i32[B, K]]:
    """The K largest and their columns."""
    values, columns = F.topk(logits, K)
    return values, columns


@chain(B=4096, V=32000, K=50)
def sampled(logits: bf16[B, V], temperature: f32) -> tuple[f32[B, K], i32[B, K]]:
    """The K likeliest under a temperature."""
    values, columns = F.topk(F.softmax(logits / temperature), K)
    return values, columns


# ---------------------------------------------------------------- products


@chain(M=2048, N=4096, K=4096)
def linear(x: bf16[M, K], w: bf16[N, K]) -> bf16[M, N]:
    """x @ w.T, as nn.Linear has it."""
    return x @ w.T


@chain(M=2048, N=4096, K=4096)
def linear_bias(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]) -> bf16[M, N]:
    """nn.Linear with a bias."""
    return x @ w.T + bias


@chain(M=2048, N=4096, K=4096)
def linear_relu(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]) -> bf16[M, N]:
    """And a ReLU."""
    return F.relu(x @ w.T + bias)


@chain(M=2048, N=4096, K=4096)
def linear_residual(x: bf16[M, K], w: bf16[N, K], bias: bf16[N], residual: bf16[M, N]) -> bf16[M, N]:
    """A projection back onto the residual."""
    return residual + (x @ w.T + bias)
