"""Chains as users write them, none of them in specs/ and none of them tuned: what benchmarks/heldout.py measures."""

from fusegen import b8, bf16, chain, dims, f32, i32
from fusegen import ops as F

B, H, S, M, N, K, D, T, V = dims("B H S M N K D T V")
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
