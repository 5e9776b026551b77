"""Tokens drawn from logits by one fused kernel: temperature, top-k, top-p and a sample, each row by its own settings.

    python examples/sample.py                # on the GPU that is here; without one on the CPU, in the emulator

Random numbers are Philox's, of (seed, step, element): the same seed and step give the same tokens on every machine, and
in the kernel's numpy reference. What is drawn over many steps is shown beside what it should be.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import fusegen
from fusegen import load_chains

(top_p_sample,) = load_chains(Path(__file__).parents[1] / "specs" / "top_p_sample.py")
SETTINGS = ((1.0, 6, 1.0), (0.5, 6, 1.0), (1.0, 3, 1.0), (1.0, 6, 0.7))  # temperature, k, p: of a sequence each


def shares(logits: Any, temperature: float, k: int, p: float) -> Any:
    """How likely each token is to be drawn, in float64."""
    z = logits.astype(np.float64) / temperature
    order = np.argsort(-z, kind="stable")
    kept = np.zeros(len(z), bool)
    kept[order[:k]] = True
    weights = np.where(kept, np.exp(z - z.max()), 0.0)
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    kept[order[before >= p]] = False
    weights = np.where(kept, weights, 0.0)
    return weights / weights.sum()


def drawn(logits: Any, steps: int, seed: int) -> Any:
    """How often each token is drawn in so many steps, a row for each of SETTINGS."""
    count = len(SETTINGS)
    kernel = fusegen.compile(top_p_sample.at(M=count, V=len(logits)))
    bf16 = top_p_sample.graph.inputs[0].dtype.numpy
    rows = np.repeat(logits[None], count, axis=0).astype(bf16)
    temperature, k, p = (np.array(column)[:, None] for column in zip(*SETTINGS, strict=True))
    settings = temperature.astype(np.float32), k.astype(np.int32), p.astype(np.float32)
    found = np.zeros((count, len(logits)), np.int64)
    for step in range(steps):
        tokens = kernel(rows, *settings, np.array([seed], np.int32), np.array([step], np.int32))
        found[np.arange(count), tokens] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -1.0])
    found = drawn(logits, asked.steps, asked.seed) / asked.steps
    for (temperature, k, p), row in zip(SETTINGS, found, strict=True):
        print(f"temperature {temperature}, top-k {k}, top-p {p}")
        print("  drawn    ", " ".join(f"{share:6.3f}" for share in row))
        print("  should be", " ".join(f"{share:6.3f}" for share in shares(logits, temperature, k, p)))


if __name__ == "__main__":
    main()
