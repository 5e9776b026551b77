"""Measures the database that comes with fusegen, anew, on this GPU: one command, a few minutes on an H200.

    python benchmarks/tune_shipped.py                            # all; to fusegen/data/tuned.jsonl
    python benchmarks/tune_shipped.py --only 'qkv|swiglu.*M=8 '  # cases whose text matches; others' rows stay
    python benchmarks/tune_shipped.py --kind products            # or rows, or selections
    python benchmarks/tune_shipped.py --list                     # the cases; needs no GPU

Every case is tuned: row chains of specs/, and the selections and products of docs/measured.md. Its validated candidates
are written: the winner, those close to it, and the cost model's own choice. The file is written after each chain,
whole, so an interrupted run leaves the rows it got to. Other GPUs' rows stay; this one's earlier rows go when the run
was complete. `--report` writes every candidate's time as JSON.
Run from the repository root with PYTHONPATH set to it, on a GPU that nobody else uses.

Exit code 1: a chain could not be tuned; the others were.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fusegen  # noqa: E402
from benchmarks import gemm, topk  # noqa: E402
from fusegen.cli import tuning as words  # noqa: E402
from fusegen.cli.showing import finite  # noqa: E402
from fusegen.database import Measurement, Unsound, read_lines, write_lines  # noqa: E402
from fusegen.emitting.golden import write_whole  # noqa: E402
from fusegen.errors import FusegenError  # noqa: E402
from fusegen.language.spec import Chain, load_chains  # noqa: E402
from fusegen.language.types import DTYPES  # noqa: E402
from fusegen.pipeline import choose_target  # noqa: E402
from fusegen.tuning import Bench, Effort, Report, Tuner, measurable  # noqa: E402

SHIPPED = Path(fusegen.__file__).parent / "data" / "tuned.jsonl"


KINDS = ("rows", "selections", "products")
# Beside the budget: of selections and products the estimates' first few are tried; to validate a product takes seconds.
EFFORTS: Mapping[str, dict[str, int]] = {
    "rows": {}, "selections": {"most": 6}, "products": {"most": 8, "finalists": 1},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A chain, its sizes, and another storage type than its own where one is named."""

    chain: str
    sizes: Mapping[str, int]
    dtype: str = ""
    kind: str = "rows"

    def __str__(self) -> str:
        return " ".join([self.chain, *(f"{k}={v}" for k, v in self.sizes.items()), self.dtype]).rstrip()


def heads(count: int, queries: int, keys: int) -> dict[str, int]:
    return {"B": 1, "H": count, "S": queries, "N": keys}


CASES = (
    Case("copy", {"n": 2**28}, "f32"),
    Case("bias_relu", {"M": 65536, "N": 4096}, "f32"),
    Case("bias_relu", {"M": 65536, "N": 4096}, "bf16"),
    Case("bias_gelu_residual_ln", {"M": 16384, "N": 4096}, "f16"),
    Case("bias_gelu_residual_ln", {"M": 32768, "N": 8192}, "f16"),
    Case("bias_gelu_residual_ln", {"M": 16384, "N": 16384}, "f16"),
    Case("bias_gelu_residual_ln", {"M": 4096, "N": 4096}, "f16"),
    Case("bias_gelu_residual_ln", {"M": 16384, "N": 4096}, "f32"),
    Case("bias_gelu_residual_ln", {"M": 16384, "N": 4096}, "bf16"),
    Case("bias_gelu_residual_ln", {"M": 4096, "N": 4096}, "f32"),
    Case("bias_gelu_residual_ln", {"M": 8192, "N": 32768}, "f16"),
    Case("scale_softmax", heads(32, 4096, 4096), "f16"),
    Case("scale_softmax", heads(16, 8192, 8192), "bf16"),
    Case("scale_softmax", heads(1, 1024, 131072), "bf16"),
    Case("scale_softmax", heads(1, 4096, 65536), "f16"),
    Case("scale_softmax", heads(1, 4096, 131072), "f16"),
    Case("scale_softmax", heads(1, 512, 1048576), "f16"),
    Case("scale_causal_softmax", heads(32, 4096, 4096), "f16"),
    Case("scale_causal_softmax", heads(16, 8192, 8192), "bf16"),
    Case("add_rmsnorm", {"M": 16384, "N": 4096}, "bf16"),
    Case("add_rmsnorm", {"M": 16384, "N": 8192}, "bf16"),
    Case("add_rmsnorm", {"M": 16384, "N": 2048}, "bf16"),
    Case("add_rmsnorm", {"M": 16384, "N": 5120}, "bf16"),
    Case("add_rmsnorm", {"M": 8, "N": 4096}, "bf16"),
    Case("log_softmax", {"T": 4096, "V": 32000}),
    Case("log_softmax", {"T": 1024, "V": 131072}),
    Case("swiglu_elementwise", {"M": 8192, "N": 14336}, "bf16"),
    Case("masked_softmax", {"B": 4, "H": 16, "S": 1024, "N": 1024}, "bf16"),
    Case("additive_mask_softmax", {"B": 4, "H": 16, "S": 1024, "N": 1024}),
    Case("rmsnorm", {"M": 262144, "N": 128}, "bf16"),
    Case("rmsnorm", {"M": 16384, "N": 4096}, "bf16"),
    Case("rmsnorm", {"M": 16384, "N": 8192}, "bf16"),
    Case("rmsnorm_quant_row", {"M": 16384, "N": 4096}),
    Case("add_rmsnorm_quant_row", {"M": 16384, "N": 4096}),
    Case("silu_mul_quant_row", {"M": 8192, "N": 14336}),
    Case("bias_gelu_residual_quant_row", {"M": 8192, "N": 4096}),
    Case("layernorm_quant_tensor_static", {"M": 8192, "N": 4096}),
    Case("dropout_residual_layernorm", {"M": 8192, "N": 4096}),
    Case("column_sum", {"M": 1048576, "N": 1024}),
    Case("column_sum", {"M": 4096, "N": 65536}),
    Case("layernorm_param_grads", {"M": 16384, "N": 4096}),
    *(Case(chain.name, sizes, kind="selections") for chain, sizes in topk.SHAPES),
    *(Case(row.chain, row.sizes, row.dtype, kind="products") for row in gemm.ROWS),
)


def load(specs: str) -> Mapping[str, Chain]:
    """The chains of `specs`, and those of the table of selections, by name."""
    return {chain.name: chain for chain in (*load_chains(specs), *(chain for chain, _ in topk.SHAPES))}


def chain_of(case: Case, chains: Mapping[str, Chain]) -> Chain:
    """Raises FusegenError where there is no such chain, or where it has no such dim."""
    found = chains.get(case.chain)
    if found is None:
        raise FusegenError(f"{case}: there is no such chain in specs/ or in benchmarks/topk.py")
    sized = found.at(**case.sizes)
    return sized.with_dtype(DTYPES[case.dtype]) if case.dtype else sized


def read(path: Path) -> list[Measurement]:
    """The rows there; unsound ones are dropped and said."""
    rows = list(read_lines(path.read_text("utf-8"))) if path.is_file() else []
    for row in rows:
        if isinstance(row, Unsound):
            say(f"{path}: {row}; the line is dropped")
    return [row for row in rows if isinstance(row, Measurement)]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--specs", default="specs")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds for the first timings of a chain")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose text matches; the others' rows stay")
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=KINDS, help="cases of these kinds")
    parser.add_argument("--list", action="store_true", help="the cases, and leave")
    wanted = parser.parse_args()
    cases = [case for case in CASES if case.kind in wanted.kind and re.search(wanted.only, str(case))]
    if wanted.list:
        print("\n".join(map(str, cases)))
        return 0
    try:
        return measure(cases, wanted)
    except FusegenError as error:
        say(str(error))
        return error.exit_code


def measure(cases: Sequence[Case], wanted: argparse.Namespace) -> int:
    """Tune the cases, write as it goes, show the table. Raises MissingError without a GPU."""
    target = measurable(choose_target(None))
    chains = load(wanted.specs)
    before = read(wanted.out)
    new: list[Measurement] = []
    reports: list[Report] = []
    failed = 0
    start = time.monotonic()
    with Bench(target) as bench:
        for number, case in enumerate(cases, 1):
            tuner = Tuner(bench, None, Effort(wanted.budget, **EFFORTS[case.kind]), retry=True)
            try:
                report = tuner.tune(chain_of(case, chains))
            except FusegenError as error:
                say(f"{number}/{len(cases)} {case}: {error}")
                failed += 1
                continue
            reports.append(report)
            failed += report.winner is None
            say(f"{number}/{len(cases)} {time.monotonic() - start:.0f} s  {case}: {words.verdict(report)}")
            new += [row for row in report.rows() if row.may_win]
            anew = {row.problem for row in new}
            write_whole(wanted.out, write_lines([*new, *(row for row in before if row.problem not in anew)]))
            if wanted.report:
                write_whole(wanted.report, json.dumps(finite([each.facts() for each in reports]), indent=1) + "\n")
    if not failed and len(cases) == len(CASES):
        write_whole(wanted.out, write_lines([*new, *(row for row in before if row.target != target.name)]))
    words.show_reports(reports)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
