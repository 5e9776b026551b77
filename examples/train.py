"""A small language model in torch whose norms, RoPE, SwiGLU and loss are fusegen operators, trained for a few steps.

    python examples/train.py                 # on the GPU that is here; without one on the CPU, in the emulator
    python examples/train.py --steps 50 --width 512

Each operator is two chains, of its values and of its gradients, which are written here for the norm and derived for
the others. It stands where torch's own function would: `PLAIN` and `fused()` are two ways to fill the same model. Both
are trained from the same start on the same tokens, and their losses are shown side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import fusegen.torch
from fusegen import chain, dims, f32, i32
from fusegen import ops as F

M, N = dims("M N")
T, H, D = dims("T H D")  # tokens of all sequences, heads, width of a head
EPS = 1e-5
SMOOTHING = 0.1


@chain(M=4096, N=256)
def norm(x: f32[M, N], gain: f32[N]) -> f32[M, N]:
    """RMSNorm of each row."""
    return F.rmsnorm(x, gain, eps=EPS)


@chain(M=4096, N=256)
def norm_backward(x: f32[M, N], gain: f32[N], dout: f32[M, N]) -> tuple[f32[M, N], f32[N]]:
    """Its gradients: of x row by row, of gain over all rows."""
    rrms = F.rsqrt(F.mean(x * x) + EPS)
    normalized = x * rrms
    scaled = dout * gain
    dx = rrms * (scaled - normalized * F.mean(scaled * normalized))
    dgain = F.sum(dout * normalized, over=M)[0]
    return dx, dgain


@chain(T=4096, H=4, D=64)
def rope(
    q: f32[T, H, D], k: f32[T, H, D], cos: f32[T, 1, D // 2], sin: f32[T, 1, D // 2]
) -> tuple[f32[T, H, D], f32[T, H, D]]:
    """Queries and keys turned by their positions, in one launch."""
    return F.rope(q, cos, sin), F.rope(k, cos, sin)


@chain(M=4096, N=1024)
def swiglu(gate: f32[M, N], up: f32[M, N]) -> f32[M, N]:
    """silu(gate) * up."""
    return F.silu(gate) * up


@chain(M=4096, N=512)
def loss(logits: f32[M, N], labels: i32[M, 1]) -> f32[M, 1]:
    """Cross entropy with smoothed labels: of each, a share of SMOOTHING is spread over all N."""
    logp = F.log_softmax(logits)
    likely = F.sum(F.where(F.col_index(logits) == labels, logp, 0.0))
    return -(1.0 - SMOOTHING) * likely - SMOOTHING * F.mean(logp)


def plain_norm(x: Any, gain: Any) -> Any:
    return torch.rms_norm(x, gain.shape, gain, EPS)


def plain_rope(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    def turned(x: Any) -> Any:
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    return turned(q), turned(k)


def plain_swiglu(gate: Any, up: Any) -> Any:
    return nn.functional.silu(gate) * up


def plain_loss(logits: Any, labels: Any) -> Any:
    one_each = nn.functional.cross_entropy(logits, labels[:, 0].long(), reduction="none", label_smoothing=SMOOTHING)
    return one_each[:, None]


PLAIN: Mapping[str, Any] = {"norm": plain_norm, "rope": plain_rope, "swiglu": plain_swiglu, "loss": plain_loss}


def fused() -> Mapping[str, Any]:
    """The same functions as operators of torch."""
    return {
        "norm": fusegen.torch.op(norm, "example::norm", backward=norm_backward),
        "rope": fusegen.torch.op(rope, "example::rope", backward="derived", gradients=("q", "k")),
        "swiglu": fusegen.torch.op(swiglu, "example::swiglu", backward="derived"),
        "loss": fusegen.torch.op(loss, "example::loss", backward="derived"),
    }


def turns(batch: int, length: int, width: int, device: Any) -> Any:
    """By what angle each pair of numbers of a head of that width is turned: [batch * length, 1, width / 2]."""
    half = width // 2
    speeds = 10000.0 ** -(torch.arange(half, device=device) / half)
    return (torch.arange(length, device=device)[:, None, None] * speeds).repeat(batch, 1, 1)


class Block(nn.Module):  # type: ignore[misc]
    """Attention and an MLP, each behind a norm."""

    def __init__(self, width: int, heads: int, ops: Mapping[str, Any]) -> None:
        super().__init__()
        self.heads, self.ops = heads, ops
        self.gains = nn.ParameterList([torch.ones(width), torch.ones(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        batch, length, width = x.shape
        normed = self.ops["norm"](x.reshape(-1, width), self.gains[0])
        q, k, v = self.qkv(normed).view(batch * length, 3, self.heads, -1).unbind(1)
        q, k = self.ops["rope"](q, k, cos, sin)
        parts = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        normed = self.ops["norm"](x.reshape(-1, width), self.gains[1])
        hidden = self.ops["swiglu"](self.gate(normed), self.up(normed))
        return x + self.down(hidden).view_as(x)


class Model(nn.Module):  # type: ignore[misc]
    """Tokens to the loss of each next one."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, ops: Mapping[str, Any]) -> None:
        super().__init__()
        self.ops = ops
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, heads, ops) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens[:, :-1])
        batch, length, width = x.shape
        angles = turns(batch, length, width // self.blocks[0].heads, x.device)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        logits = self.head(x).reshape(-1, self.head.out_features)
        return self.ops["loss"](logits, tokens[:, 1:].reshape(-1, 1).int()).mean()


def losses(ops: Mapping[str, Any], steps: int, width: int, device: str) -> list[float]:
    """Of each step, from the same start and on the same tokens whatever the operators are."""
    torch.manual_seed(0)
    vocabulary = 96
    model = Model(vocabulary, width, heads=4, layers=2, ops=ops).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = (torch.arange(33) * torch.arange(1, 9)[:, None] % vocabulary).to(device)  # counting by ones, twos, ...
    found = []
    for _ in range(steps):
        value = model(tokens)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=64, help="of the model, a multiple of 8")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = losses(PLAIN, asked.steps, asked.width, device)
    own = losses(fused(), asked.steps, asked.width, device)
    print("step   torch    fusegen")
    for step, (one, other) in enumerate(zip(plain, own, strict=True)):
        print(f"{step:4}   {one:.4f}   {other:.4f}")


if __name__ == "__main__":
    main()
