"""Llama 3 decoding with random weights, each layer one fusegen program: tokens a second, and logits beside torch's.

    python examples/llama.py --size tiny                   # on the CPU, in the emulator: a few seconds
    python examples/llama.py --size 8b --batch 8           # on a GPU, 32 layers, beside torch eager and torch.compile

A step embeds a token of each sequence, goes through the layers of `specs/decoder_layer.py`, and chooses the likeliest
next token. On a GPU it is captured once as a CUDA graph of torch's and replayed. `--prompt 512` reads so many tokens of
each sequence before the first step, by the layers of `specs/decoder_layer_prefill.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fusegen
from fusegen import bf16, chain, dims, f32, i32, load_chains
from fusegen import ops as F

SPECS = Path(__file__).parents[1] / "specs"
(decoder_layer,) = load_chains(SPECS / "decoder_layer.py")
(decoder_layer_prefill,) = load_chains(SPECS / "decoder_layer_prefill.py")
B, D, V = dims("B D V")
ROPE_BASE = 500_000.0  # of Llama 3


@chain(B=8, D=4096, V=128256)
def head(x: bf16[B, D], norm: bf16[D], w: bf16[V, D]) -> tuple[f32[B, V], i32[B, 1]]:
    """The logits of the next token, and the likeliest."""
    logits = F.rmsnorm(x, norm) @ w.T
    return logits, F.argmax(logits)


@dataclass(frozen=True)
class Size:
    """A model: width, KV heads, queries of each, width of a head, width of the MLP, vocabulary, layers, slots."""

    width: int
    kv_heads: int
    group: int
    head: int
    mlp: int
    vocabulary: int
    layers: int
    slots: int

    @property
    def dims(self) -> dict[str, int]:
        """Those of `decoder_layer`."""
        return {"D": self.width, "H": self.kv_heads, "G": self.group, "E": self.head, "T": self.slots, "U": self.mlp}


SIZES = {
    "tiny": Size(64, 2, 2, 16, 96, 160, 2, 32),
    "small": Size(1024, 4, 2, 128, 3584, 32000, 8, 1024),
    "8b": Size(4096, 8, 4, 128, 14336, 128256, 32, 2048),
}
WEIGHTS = ("norm", "wq", "wk", "wv", "wo", "norm_2", "gate", "up", "down")


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Of a layer's weights."""
    queries, keys = size.kv_heads * size.group * size.head, size.kv_heads * size.head
    return {
        "norm": (size.width,), "wq": (queries, size.width), "wk": (keys, size.width), "wv": (keys, size.width),
        "wo": (size.width, queries), "norm_2": (size.width,), "gate": (size.mlp, size.width),
        "up": (size.mlp, size.width), "down": (size.width, size.mlp),
    }  # fmt: skip


class OnCpu:
    """numpy's arrays, for the emulator."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, shape: tuple[int, ...], scale: float) -> Any:
        return (self.rng.standard_normal(shape) * scale).astype(bf16.numpy)

    def zeros(self, shape: tuple[int, ...], dtype: str = "bf16") -> Any:
        return np.zeros(shape, {"bf16": bf16.numpy, "f32": np.float32, "i32": np.int32}[dtype])

    def put(self, to: Any, values: Any) -> None:
        to[...] = values

    def rows(self, table: Any, ids: Any) -> Any:
        return table[ids]

    def stack(self, rows: list[Any]) -> Any:
        return np.stack(rows)


class OnGpu:
    """torch's tensors on the current GPU."""

    def __init__(self, seed: int) -> None:
        import torch

        self.torch = torch
        torch.manual_seed(seed)

    def normal(self, shape: tuple[int, ...], scale: float) -> Any:
        return (self.torch.randn(shape, device="cuda") * scale).bfloat16()

    def zeros(self, shape: tuple[int, ...], dtype: str = "bf16") -> Any:
        kinds = {"bf16": self.torch.bfloat16, "f32": self.torch.float32, "i32": self.torch.int32}
        return self.torch.zeros(shape, dtype=kinds[dtype], device="cuda")

    def put(self, to: Any, values: Any) -> None:
        to.copy_(self.torch.as_tensor(values).to(to.dtype))

    def rows(self, table: Any, ids: Any) -> Any:
        return table[self.torch.as_tensor(ids, device="cuda").long()]

    def stack(self, rows: list[Any]) -> Any:
        return self.torch.stack(rows)


class Model:
    """Weights, caches, and the compiled programs. `step` decodes a token of each sequence."""

    def __init__(self, size: Size, batch: int, on: str, target: str | None = None, seed: int = 0) -> None:
        self.size, self.batch = size, batch
        self.arrays: Any = OnGpu(seed) if on == "gpu" else OnCpu(seed)
        few = size.width <= SIZES["tiny"].width  # where errors leave something to be judged
        made = decoder_layer.at(B=batch, **size.dims)
        self.layer: Any = fusegen.compile(made, target=target, on=on, validate=few)
        last = head.at(B=batch, D=size.width, V=size.vocabulary)
        self.head: Any = fusegen.compile(last, target=target, on=on, validate=few)
        self.layers = [self.new_layer() for _ in range(size.layers)]
        self.embedding = self.arrays.normal((size.vocabulary, size.width), 1.0)
        self.norm = self.arrays.zeros((size.width,)) + 1
        self.out = self.arrays.normal((size.vocabulary, size.width), size.width**-0.5)
        self.tokens = self.arrays.zeros((batch, 1), "i32")
        self.cos = self.arrays.zeros((batch, 1, size.head // 2), "f32")
        self.sin = self.arrays.zeros((batch, 1, size.head // 2), "f32")
        self.position = self.arrays.zeros((batch, 1, 1, 1), "i32")
        self.slots = self.arrays.zeros((batch,), "i32")

    def new_layer(self) -> dict[str, Any]:
        """Random weights at a scale that keeps values of unit size, and empty caches."""
        size, found = self.size, dict[str, Any]()
        for name, shape in shapes(size).items():
            gain = len(shape) == 1
            found[name] = self.arrays.zeros(shape) + 1 if gain else self.arrays.normal(shape, shape[-1] ** -0.5)
        cache = (self.batch * size.slots, size.kv_heads, size.head)
        return {**found, "k_cache": self.arrays.zeros(cache), "v_cache": self.arrays.zeros(cache)}

    def at(self, position: int) -> None:
        """What of a step depends on the position, which all sequences share."""
        half = self.size.head // 2
        angles = position * ROPE_BASE ** (-np.arange(half) / half)
        put, ones = self.arrays.put, np.ones((self.batch, 1, 1))
        put(self.cos, ones * np.cos(angles))
        put(self.sin, ones * np.sin(angles))
        put(self.position, np.full((self.batch, 1, 1, 1), position))
        put(self.slots, np.arange(self.batch) * self.size.slots + position)

    def step(self) -> tuple[Any, Any]:
        """The logits and the next tokens, at the position that `at` has set."""
        x = self.arrays.rows(self.embedding, self.tokens[:, 0])
        for w in self.layers:
            x, *_ = self.layer(
                x, w["norm"], w["wq"], w["wk"], w["wv"], self.cos, self.sin, self.position, self.slots,
                w["k_cache"], w["v_cache"], w["wo"], w["norm_2"], w["gate"], w["up"], w["down"],
            )  # fmt: skip
        return self.head(x, self.norm, self.out)  # type: ignore[no-any-return]


class Prompt:
    """Reads `count` tokens of each sequence, one sequence after the other, into the caches of a model."""

    def __init__(self, model: Model, count: int, on: str, target: str | None = None) -> None:
        size, self.model, self.count = model.size, model, count
        slots = model.batch * size.slots
        dims = {"D": size.width, "H": size.kv_heads, "G": size.group, "E": size.head, "U": size.mlp}
        made = decoder_layer_prefill.at(S=count, V=slots, **dims)
        few = size.width <= SIZES["tiny"].width
        self.layer: Any = fusegen.compile(made, target=target, on=on, validate=few)
        arrays, half = model.arrays, size.head // 2
        angles = np.arange(count)[:, None, None] * ROPE_BASE ** (-np.arange(half) / half)
        self.cos, self.sin = (arrays.zeros((count, 1, half), "f32") for _ in range(2))
        arrays.put(self.cos, np.cos(angles))
        arrays.put(self.sin, np.sin(angles))
        self.slots = arrays.zeros((count,), "i32")

    def read(self, tokens: Any) -> tuple[Any, Any]:
        """The logits behind the last token of each sequence, and the next tokens; `tokens` are [sequences, count]."""
        model, last = self.model, []
        for sequence in range(model.batch):
            model.arrays.put(self.slots, sequence * model.size.slots + np.arange(self.count))
            x = model.arrays.rows(model.embedding, tokens[sequence])
            for w in model.layers:
                x, *_ = self.layer(
                    x, w["norm"], w["wq"], w["wk"], w["wv"], self.cos, self.sin, self.slots, w["k_cache"],
                    w["v_cache"], w["wo"], w["norm_2"], w["gate"], w["up"], w["down"],
                )  # fmt: skip
            last.append(x[-1])
        return model.head(model.arrays.stack(last), model.norm, model.out)  # type: ignore[no-any-return]


def decode(model: Model, count: int, step: Callable[[], tuple[Any, Any]], first: int = 0) -> Iterator[tuple[Any, Any]]:
    """Logits and tokens of `count` steps from a position on, each token the next step's."""
    for position in range(first, first + count):
        model.at(position)
        logits, tokens = step()
        yield logits, tokens
        model.arrays.put(model.tokens, tokens)


# ---------------------------------------------------------------- beside torch


def torch_layer(torch: Any, model: Model, w: dict[str, Any], x: Any, position: int) -> Any:
    """The same layer as one writes it in torch."""
    size, batch = model.size, model.batch
    norm = torch.nn.functional.rms_norm
    normed = norm(x, (size.width,), w["norm"], 1e-6)
    heads = size.kv_heads * size.group
    q = (normed @ w["wq"].T).view(batch, heads, size.head)
    k = (normed @ w["wk"].T).view(batch, size.kv_heads, size.head)
    keys = w["k_cache"].view(batch, size.slots, size.kv_heads, size.head)
    values = w["v_cache"].view(batch, size.slots, size.kv_heads, size.head)
    keys[:, position] = turned(torch, k, model)
    values[:, position] = (normed @ w["wv"].T).view(batch, size.kv_heads, size.head)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        turned(torch, q, model)[:, :, None], keys[:, : position + 1].transpose(1, 2),
        values[:, : position + 1].transpose(1, 2), enable_gqa=True,
    )  # fmt: skip
    h = x + mixed.reshape(batch, heads * size.head) @ w["wo"].T
    normed = norm(h, (size.width,), w["norm_2"], 1e-6)
    return h + (torch.nn.functional.silu(normed @ w["gate"].T) * (normed @ w["up"].T)) @ w["down"].T


def turned(torch: Any, x: Any, model: Model) -> Any:
    low, high = x.float().chunk(2, -1)
    both = (low * model.cos - high * model.sin, high * model.cos + low * model.sin)
    return torch.cat(both, -1).bfloat16()


def torch_step(torch: Any, model: Model, position: int) -> tuple[Any, Any]:
    x = model.arrays.rows(model.embedding, model.tokens[:, 0])
    for w in model.layers:
        x = torch_layer(torch, model, w, x, position)
    logits = torch.nn.functional.rms_norm(x, (model.size.width,), model.norm, 1e-6) @ model.out.T
    return logits.float(), logits.argmax(-1, keepdim=True).int()


def compare(model: Model, count: int) -> None:
    """Tokens a second and the largest difference of logits, on a GPU."""
    torch = model.arrays.torch
    model.at(model.size.slots - 1)
    step = model.step
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    rows = {"fusegen, one CUDA graph": graph.replay}
    position = model.size.slots - 1
    rows["torch eager"] = lambda: torch_step(torch, model, position)
    compiled = torch.compile(torch_step, mode="max-autotune")
    rows["torch.compile max-autotune"] = lambda: compiled(torch, model, position)
    graph.replay()
    wanted, _ = torch_step(torch, model, position)
    error = (captured[0] - wanted).abs().max().item() / wanted.abs().max().item()
    print(f"largest difference of logits: {error:.1e} of the largest")
    for name, run in rows.items():
        run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        torch.cuda.synchronize()
        us = (time.perf_counter() - start) / count * 1e6
        print(f"{name:<28}{us:10.0f} us a step{model.batch * 1e6 / us:10.0f} tokens/s")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--size", choices=SIZES, default="tiny")
    asked.add_argument("--batch", type=int, default=2)
    asked.add_argument("--steps", type=int, default=6)
    asked.add_argument("--prompt", type=int, default=0, help="tokens of each sequence that are read first")
    asked.add_argument("--on", choices=("gpu", "emulator"), help="without it the emulator for tiny, else a GPU")
    given = asked.parse_args()
    given.on = given.on or ("emulator" if given.size == "tiny" else "gpu")
    if given.on == "emulator" and given.size == "8b":
        asked.error("the emulator would take hours for each token of 8b: use --on gpu, or --size tiny")
    size = SIZES[given.size]
    start = time.perf_counter()
    model = Model(size, given.batch, given.on)
    print(f"{len(model.layer.kernels)} kernels a layer, ready after {time.perf_counter() - start:.0f} s")
    if given.prompt:
        prompt = Prompt(model, given.prompt, given.on)
        read = np.random.default_rng(0).integers(0, size.vocabulary, (given.batch, given.prompt))
        prompt.read(read)
        start = time.perf_counter()
        _, tokens = prompt.read(read)
        found = tokens.tolist()  # waits for all of it
        rate = given.batch * given.prompt / (time.perf_counter() - start)
        print(f"{given.prompt} tokens of each sequence read, {rate:.0f} tokens/s; next {np.ravel(found)}")
        model.arrays.put(model.tokens, tokens)
    for number, (_, tokens) in enumerate(decode(model, given.steps, model.step, given.prompt), 1):
        print(f"\r{number} of {given.steps} steps, tokens {np.asarray(tokens.tolist()).ravel()}", end="", flush=True)
    print()
    if given.on == "gpu":
        compare(model, max(given.steps, 20))


if __name__ == "__main__":
    main()
