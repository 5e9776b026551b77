"""Times the planner's candidates of every spec on this GPU: what the cost model's constants are drawn from.

    python benchmarks/candidates.py [--out FILE] [--specs specs] [--most 40]

Each candidate is compiled, launched on torch tensors and timed by fusegen.measuring.timing: L2 cold, median of 15,
shares of a device copy measured in the same run. Its results are compared with the first candidate's on the GPU: rows
so many are more than validation would look at. Run from the repository root with PYTHONPATH set to it.
"""

from __future__ import annotations

import argparse
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fusegen.compiling import Binary, compile_source
from fusegen.emitting.rendering import render
from fusegen.language.graph import Graph
from fusegen.language.spec import load_chains
from fusegen.language.types import size_of
from fusegen.measuring.timing import Stopwatch
from fusegen.planner import candidates
from fusegen.planner.model import Layout, RowPlan, Source
from fusegen.runtime import Kernel, finding
from fusegen.targets import Target, target

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "b8": torch.bool}
REPEATS = 15
SCALAR = ("copy", "bias_relu")
SIZES: dict[str, list[dict[str, int]]] = {
    "copy": [{"n": 2**28}],
    "bias_relu": [{"M": 65536, "N": 2048}, {"M": 65536, "N": 4096}, {"M": 65536, "N": 8192}, {"M": 65536, "N": 4097}],
    "swiglu_elementwise": [{"M": 8192, "N": 14336}],
    "bias_gelu_residual_ln": [
        {"M": 16384, "N": 4096},
        {"M": 4096, "N": 4096},
        {"M": 32768, "N": 8192},
        {"M": 16384, "N": 16384},
        {"M": 16384, "N": 4097},
        {"M": 8192, "N": 32768},
    ],
    "add_rmsnorm": [
        {"M": 16384, "N": 4096},
        {"M": 16384, "N": 8192},
        {"M": 65536, "N": 768},
        {"M": 8, "N": 4096},
        {"M": 32768, "N": 5120},
        {"M": 32768, "N": 2047},
        {"M": 2048, "N": 131072},
    ],
    "scale_softmax": [
        {"B": 1, "H": 32, "S": 4096, "N": 4096},
        {"B": 1, "H": 16, "S": 8192, "N": 8192},
        {"B": 1, "H": 1, "S": 4096, "N": 65536},
        {"B": 1, "H": 1, "S": 4096, "N": 131072},
        {"B": 1, "H": 1, "S": 512, "N": 1048576},
        {"B": 1, "H": 1, "S": 262144, "N": 1000},
        {"B": 1, "H": 1, "S": 16384, "N": 50257},
    ],
    "scale_causal_softmax": [{"B": 1, "H": 32, "S": 4096, "N": 4096}, {"B": 1, "H": 16, "S": 8192, "N": 8192}],
    "masked_softmax": [{"B": 4, "H": 16, "S": 1024, "N": 1024}, {"B": 16, "H": 12, "S": 1000, "N": 1023}],
    "log_softmax": [{"T": 4096, "V": 32000}, {"T": 1024, "V": 131072}, {"T": 4096, "V": 32001}],
    "rmsnorm": [{"M": 262144, "N": 128}, {"M": 262144, "N": 127}, {"M": 65536, "N": 1027}, {"M": 1048576, "N": 37}],
}


def operands(graph: Graph) -> list[Any]:
    made: list[Any] = []
    for tensor in graph.inputs:
        shape = [size_of(s, graph.sizes) for s in tensor.shape]
        if not shape:
            made.append(0.125)
        elif tensor.dtype.name == "b8":
            made.append(torch.rand(shape, device="cuda") > 0.3)
        else:
            made.append(torch.randn(shape, device="cuda", dtype=TORCH[tensor.dtype.name]))
    return made


def compiled(source: Source) -> Binary:
    plan = source.plan
    return compile_source(
        source.text, plan.name, plan.target, filename=source.filename, threads=plan.threads,
        dynamic_shared=plan.shared_bytes,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("candidates.json"))
    parser.add_argument("--specs", default="specs")
    parser.add_argument("--target", default="cuda:h200")
    parser.add_argument("--most", type=int, default=40)
    parser.add_argument("--only", default="", help="chains and sizes that match this, as in 'rmsnorm.*N=128'")
    wanted = parser.parse_args()
    chosen = target(wanted.target)
    device = finding.find(chosen, "gpu")
    watch = Stopwatch(device)
    copy_rate = watch.copy_rate()
    print(f"{device}: device copy {copy_rate / 1e3:.0f} GB/s")
    rows: list[dict[str, Any]] = []
    for chain in load_chains(wanted.specs):
        for sizes in SIZES.get(chain.name, []):
            if not re.search(wanted.only, f"{chain.name} {chain.graph.at(**sizes).sizes_text()}"):
                continue
            rows += sweep(chain.graph.at(**sizes), chosen, watch, wanted.most)
            wanted.out.write_text(json.dumps({"copy_gbs": copy_rate / 1e3, "rows": rows}, indent=1))
    return 0


def sweep(graph: Graph, chosen: Target, watch: Stopwatch, most: int) -> list[dict[str, Any]]:
    """What was found of the graph's first `most` candidates; those that fail are said and left out."""
    plans = list(candidates(graph, chosen).plans[:most])
    if graph.name in SCALAR:  # the same work by single elements, which is also what an unaligned view gets
        names = frozenset(t.name for t in (*graph.inputs, *graph.outputs))
        plans.append(candidates(graph, chosen, Layout(unaligned=names)).plans[0])
    sources = [render(plan) for plan in plans]
    with ThreadPoolExecutor(16) as pool:
        binaries = list(pool.map(compiled, sources))
    arrays = operands(graph)
    found: list[dict[str, Any]] = []
    first = None
    for rank, (source, binary) in enumerate(zip(sources, binaries, strict=True)):
        plan, need = source.plan, binary.resources
        assert isinstance(plan, RowPlan), f"{graph.name} is no chain of rows"
        try:
            kernel = Kernel(source, binary, watch.device, lambda layout: (source, binary))  # noqa: B023
            out = kernel(*arrays)
            results = [t.double() for t in (out if isinstance(out, tuple) else (out,))]
            if first is None:
                first = results
            apart = max(
                float((a.nan_to_num(0, 0, 0) - b.nan_to_num(0, 0, 0)).norm() / b.nan_to_num(0, 0, 0).norm())
                for a, b in zip(results, first, strict=True)
            )
            del results
            launch = kernel.prepare(*arrays, out=out)
            us = watch.time([launch], REPEATS).median
        except Exception as error:  # a candidate that fails is a finding, not the end of the sweep
            print(f"{graph.name} {plan.regime}: {type(error).__name__}: {str(error)[:200]}")
            continue
        found.append(
            {
                "chain": graph.name, "sizes": graph.sizes_text(), "rank": rank, "staging": plan.staging,
                "regime": plan.regime, "cluster": plan.tile.cluster, "kept": plan.tile.kept,
                "configuration": plan.configuration, "scalar": bool(plan.layout.unaligned),
                "threads": plan.threads, "per_row": plan.tile.threads_per_row, "vector": plan.tile.vector,
                "per_thread": plan.tile.per_thread, "apart": apart,
                "estimate": plan.cost.registers, "registers": need.registers, "spills": need.spill_bytes,
                "occupancy": binary.occupancy.fraction, "us": us,
                "share": plan.cost.traffic.ideal / us / watch.copy_rate(), "predicted_us": plan.cost.time_us,
            }
        )  # fmt: skip
    if not found:
        return []
    chosen_us = next((f"{r['us']:.1f} us" for r in found if r["rank"] == 0), "failed")
    print(f"\n{graph.name} {graph.sizes_text()}: chosen {chosen_us}, best {min(r['us'] for r in found):.1f} us")
    for row in sorted(found, key=lambda r: r["us"])[:6] + found[:1]:
        print(
            f"  {row['us']:8.1f} us {row['share']:.3f}  rank {row['rank']:<3} {row['configuration']:58} "
            f"reg {row['registers']} (est {row['estimate']}) spill {row['spills']} "
            f"occ {row['occupancy']:.2f} said {row['predicted_us']:.1f}{' scalar' * row['scalar']}"
            f"{' APART ' + str(row['apart']) if row['apart'] > 1e-2 else ''}"
        )
    return found


if __name__ == "__main__":
    raise SystemExit(main())
