"""A small language model in torch whose norms, SwiGLU and loss are fusegen operators, trained for a few steps.

    python examples/train.py                 # on the GPU that is here; without one on the CPU, in the emulator
    python examples/train.py --steps 50 --width 512

Each operator is two chains, of its values and of its gradients, and stands where torch's own function would: `PLAIN`
and `fused()` are two ways to fill the same model. Both are trained from the same start on the same tokens, and their
losses are shown side by side.
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


@chain(M=4096, N=1024)
def swiglu(gate: f32[M, N], up: f32[M, N]) -> f32[M, N]:
    """silu(gate) * up."""
    return F.silu(gate) * up


@chain(M=4096, N=1024)
def swiglu_backward(gate: f32[M, N], up: f32[M, N], dout: f32[M, N]) -> tuple[f32[M, N], f32[M, N]]:
    """silu'(g) = s + g s (1 - s), where s = sigmoid(g)."""
    s = F.sigmoid(gate)
    dgate = dout * up * (s + gate * s * (1.0 - s))
    dup = dout * gate * s
    return dgate, dup


@chain(M=4096, N=512)
def loss(logits: f32[M, N], labels: i32[M, 1]) -> f32[M, 1]:
    """Cross entropy with smoothed labels: of each, a share of SMOOTHING is spread over all N."""
    logp = F.log_softmax(logits)
    likely = F.sum(F.where(F.col_index(logits) == labels, logp, 0.0))
    return -(1.0 - SMOOTHING) * likely - SMOOTHING * F.mean(logp)


@chain(M=4096, N=512)
def loss_backward(logits: f32[M, N], labels: i32[M, 1], dout: f32[M, 1]) -> f32[M, N]:
    """softmax(logits) less the smoothed labels."""
    wanted = F.where(F.col_index(logits) == labels, 1.0 - SMOOTHING, 0.0) + SMOOTHING / N
    return (F.softmax(logits) - wanted) * dout


def plain_norm(x: Any, gain: Any) -> Any:
    return torch.rms_norm(x, gain.shape, gain, EPS)


def plain_swiglu(gate: Any, up: Any) -> Any:
    return nn.functional.silu(gate) * up


def plain_loss(logits: Any, labels: Any) -> Any:
    one_each = nn.functional.cross_entropy(logits, labels[:, 0].long(), reduction="none", label_smoothing=SMOOTHING)
    return one_each[:, None]


PLAIN: Mapping[str, Any] = {"norm": plain_norm, "swiglu": plain_swiglu, "loss": plain_loss}


def fused() -> Mapping[str, Any]:
    """The same functions as operators of torch."""
    return {
        "norm": fusegen.torch.op(norm, "example::norm", backward=norm_backward),
        "swiglu": fusegen.torch.op(swiglu, "example::swiglu", backward=swiglu_backward),
        "loss": fusegen.torch.op(loss, "example::loss", backward=loss_backward, gradients=("logits",)),
    }


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

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        normed = self.ops["norm"](x.reshape(-1, width), self.gains[0]).view_as(x)
        parts = self.qkv(normed).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
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
        for block in self.blocks:
            x = block(x)
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
    parser.add_argument("--width", type=int, default=64, help="of the model, a multiple of 4")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = losses(PLAIN, asked.steps, asked.width, device)
    own = losses(fused(), asked.steps, asked.width, device)
    print("step   torch    fusegen")
    for step, (one, other) in enumerate(zip(plain, own, strict=True)):
        print(f"{step:4}   {one:.4f}   {other:.4f}")


if __name__ == "__main__":
    main()
