"""Chains after fused kernels of vLLM, SGLang, Liger, TensorRT-LLM, FlashInfer, Apex and Hugging Face's models.

Each is a spec as its user would write it, at a small size. `CASES` holds them all; `python -m tests.corpus` plans every
one, and with `--all` validates every one in the emulator.
"""

from __future__ import annotations

from importlib import import_module

from tests.corpus.cases import CASES, Case

for _kind in ("norms", "activations", "rotations", "sampling", "experts", "losses", "optimizers", "quantizers",
              "embeddings", "masks"):  # fmt: skip
    import_module(f"tests.corpus.{_kind}")

__all__ = ["CASES", "Case"]
