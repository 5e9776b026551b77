"""The profiling checklist of one kernel: which counters to read, with which command, and what to expect.

    fusegen inspect specs/rmsnorm.py --what profile
    fusegen launch specs/rmsnorm.py --target cuda:h200          # what the profilers are given to run

The bytes, sectors, registers and occupancy expected here were held against ncu on an H200 for four kernels: reads came
within 0.1 %, writes were short by what stayed in L2, the rest agreed. Nothing was held against AMD's counters yet.

Every expectation follows from the plan (bytes, sectors, flops) or from the compiled binary (registers, spills,
occupancy), so a counter that disagrees points at the plan, the hardware's caches or the compiler, in that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusegen.measuring.operands import operands
from fusegen.planner.model import Access, Plan, RowPlan
from fusegen.planner.programs.side_by_side import JoinedPlan
from fusegen.planner.rows.duration import COPY_SHARE

if TYPE_CHECKING:
    from fusegen.compiling import Binary
    from fusegen.language.spec import Chain
    from fusegen.targets import Target

SECTOR_BYTES = 32  # bytes: the unit in which NVIDIA's L1 and L2 move data
LAUNCHES = 5  # that the profiled program makes; the first ones warm up


@dataclass(frozen=True, slots=True)
class Counter:
    """One thing to read: the profiler's name for it, what it means, and what this kernel should show."""

    name: str
    meaning: str
    expect: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of a profiler, ready to paste."""

    tool: str
    text: str


@dataclass(frozen=True, slots=True)
class Checklist:
    """Commands and expectations for one kernel; `notes` say what makes counters differ from them honestly."""

    kernel: str
    target: str
    commands: tuple[Command, ...]
    counters: tuple[Counter, ...]
    notes: tuple[str, ...]


def checklist(plan: Plan, binary: Binary | None, spec: str, sizes: Mapping[str, int] | None = None) -> Checklist:
    """The checklist for `plan`; `spec` is the command line's name of the chain, and `sizes` are the chain's where the
    kernel is one of several. Without a `binary`, estimates do."""
    words = "".join(f" --set {name}={size}" for name, size in (sizes or plan.graph.sizes).items())
    application = f"fusegen launch {spec} --target {plan.target.name}{words}"
    make = nvidia if plan.target.vendor == "cuda" else amd
    return make(plan, binary, application)


# ---------------------------------------------------------------- what both vendors expect


def bytes_read(plan: Plan | JoinedPlan) -> int:
    return sum(t.moved for t in plan.cost.traffic.tensors if not t.output)


def bytes_written(plan: Plan | JoinedPlan) -> int:
    return sum(t.moved for t in plan.cost.traffic.tensors if t.output)


def occupancy_text(plan: Plan, binary: Binary | None) -> str:
    if binary is not None:
        return f"up to {binary.occupancy}"
    blocks = plan.cost.blocks_per_sm
    share = blocks * plan.threads / plan.target.threads_per_sm
    return f"up to {share:.0%} by the planner's estimate of {plan.cost.registers} registers (not compiled here)"


def spill_text(binary: Binary | None) -> str:
    if binary is None:
        return "0 (not compiled here, so not known)"
    return (
        "0"
        if not binary.resources.stack_bytes
        else f"not 0: a stack frame of {binary.resources.stack_bytes} B a thread"
    )


def shared_text(plan: Plan) -> str:
    if not plan.shared_bytes and not plan.static_shared_bytes:
        return "0: the kernel uses no shared memory"
    return "0, or a few for each row: the counter also counts clashes with other traffic"


def duration_text(plan: Plan) -> str:
    cost = plan.cost
    return f"{cost.floor_us:.1f} us is the floor, {cost.time_us:.1f} us the planner's estimate"


def throughput_text(plan: Plan) -> str:
    share = plan.cost.traffic.moved / plan.cost.time_us / (plan.target.dram_gbs * 1e3)
    return f"{share:.0%} by the planner's estimate; a plain copy of much data reaches {COPY_SHARE:.0%}"


def matrix_text(plan: Plan) -> str:
    share = plan.cost.traffic.product_flops / plan.cost.time_us / (plan.matrix_tflops * 1e6)
    return f"{share:.0%} by the planner's estimate; whole tiles and edges that are computed and thrown away count too"


def notes_for(plan: Plan) -> tuple[str, ...]:
    written = bytes_written(plan)
    notes = [
        "profile at sizes whose tensors exceed L2 "
        f"({plan.target.l2_bytes / 2**20:.0f} MiB here), or reads may be served from it"
    ]
    notes.append(
        f"writes may be short by what still sits in L2 when the kernel ends: up to "
        f"{min(written, plan.target.l2_bytes) / 2**20:.1f} MiB"
    )
    if isinstance(plan, RowPlan) and plan.staging == "stream" and len(plan.passes) > 1:
        notes.append("this plan reads its rows again: rows that are still in L2 the second time lower the bytes read")
    return tuple(notes)


def weighted_sectors(accesses: Iterable[Access], warp: int) -> float:
    """Sectors that one warp-wide instruction touches: the mean over accesses by column, weighted by their number."""
    moving = [a for a in accesses if a.by_column]
    if not moving:
        return 0.0
    counts = [a.dtype.bytes / a.vector_bytes for a in moving]
    return sum(n * sectors(a, warp) for n, a in zip(counts, moving, strict=True)) / sum(counts)


def sectors(access: Access, warp: int) -> float:
    """Of one instruction. Lanes lie side by side; element by element they are as far apart as whole vectors."""
    apart = access.vector * access.dtype.bytes if access.mode == "element" else access.vector_bytes
    return max(1.0, min(warp, warp * apart / SECTOR_BYTES))


# ---------------------------------------------------------------- NVIDIA


def nvidia(plan: Plan, binary: Binary | None, application: str) -> Checklist:
    """For Nsight Compute, and Nsight Systems for the number of launches."""
    loads, stores = (weighted_sectors(side, plan.target.warp) for side in (plan.inputs, plan.outputs))
    aligned = plan.flat or all(plan.cols * a.dtype.bytes % SECTOR_BYTES == 0 for a in plan.accesses if a.by_column)
    edge = "" if aligned else " to 1 more: rows start inside of sectors"
    registers = str(binary.resources.registers) if binary else f"about {plan.cost.registers} (not compiled here)"
    sectors_touched = (
        Counter("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
                "32-byte sectors a load instruction of a warp touches", f"{loads:.3g}{edge}"),
        Counter("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
                "32-byte sectors a store instruction of a warp touches", f"{stores:.3g}{edge}"),
    )  # fmt: skip
    tensor_pipe = (
        Counter("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "cycles in which tensor cores work",
                matrix_text(plan)),
    )  # fmt: skip
    counters = (
        Counter("dram__bytes_read.sum", "bytes read from memory", exact_bytes(bytes_read(plan))),
        Counter("dram__bytes_write.sum", "bytes written to memory", exact_bytes(bytes_written(plan))),
        Counter("gpu__time_duration.sum", "time of the kernel", duration_text(plan)),
        Counter("dram__throughput.avg.pct_of_peak_sustained_elapsed", "share of the memory's peak rate",
                throughput_text(plan)),
        *(tensor_pipe if plan.graph.products else sectors_touched),
        Counter("sm__warps_active.avg.pct_of_peak_sustained_active", "occupancy reached", occupancy_text(plan, binary)),
        Counter("launch__registers_per_thread", "registers of a thread", registers),
        Counter("l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum", "sectors read from local memory: spills, stack",
                spill_text(binary)),
        Counter("l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum", "sectors written to local memory", spill_text(binary)),
        Counter("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum", "bank conflicts in shared memory",
                shared_text(plan)),
    )  # fmt: skip
    metrics = ",\\\n".join(c.name for c in counters)
    commands = (
        Command(
            "Nsight Compute",
            f"ncu --kernel-name {plan.name} --launch-skip 2 --launch-count 1 --metrics \\\n"
            f"{metrics} \\\n  {application}",
        ),
        Command("Nsight Compute, everything", f"ncu --kernel-name {plan.name} --set full -o {plan.name} {application}"),
        Command(
            "Nsight Systems: one launch a call", f"nsys profile --trace=cuda --stats=true -o {plan.name} {application}"
        ),
    )
    clocks = "ncu holds the clocks at their base; with --clock-control none the time is what a user sees"
    return Checklist(plan.name, plan.target.name, commands, counters, (*notes_for(plan), clocks))


# ---------------------------------------------------------------- AMD


def amd(plan: Plan, binary: Binary | None, application: str) -> Checklist:
    """For rocprofv3, its predecessor rocprof, and rocprof-compute (once omniperf)."""
    resources = binary.resources if binary else None
    moving = (
        Counter("SQ_INSTS_VMEM_RD", "vector loads, all waves", f"about {vector_instructions(plan, False):,}"),
        Counter("SQ_INSTS_VMEM_WR", "vector stores, all waves", f"about {vector_instructions(plan, True):,}"),
    )
    matrix_unit = (Counter("MfmaUtil", "percent of time that matrix units work", matrix_text(plan)),)
    counters = (
        Counter("FETCH_SIZE", "KiB read from memory (through the Infinity Cache, where there is one)",
                f"{bytes_read(plan) / 1024:,.0f}"),
        Counter("WRITE_SIZE", "KiB written to memory", f"{bytes_written(plan) / 1024:,.0f}"),
        *(matrix_unit if plan.graph.products else moving),
        Counter("L2CacheHit", "hits in L2, percent", "what vectors shared by rows give; the rest is read once"),
        Counter("OccupancyPercent", "occupancy reached", occupancy_text(plan, binary)),
        Counter("LDSBankConflict", "percent of time lost to LDS bank conflicts", shared_text(plan)),
    )  # fmt: skip
    columns = (
        Counter("Scratch_Size (a column)", "bytes a thread keeps in memory: spills, stack", spill_text(binary)),
        Counter("VGPR_Count + Accum_VGPR_Count", "vector registers, as they are handed out",
                f"{resources.registers} or the next multiple of {plan.target.register_unit}" if resources
                else f"about {plan.cost.registers} (not compiled here)"),
        Counter("End_Timestamp - Start_Timestamp", "time of the kernel, ns", duration_text(plan)),
    )  # fmt: skip
    names = " ".join(c.name for c in counters)
    lines = "\n".join(f"pmc: {c.name}" for c in counters)
    commands = (
        Command(
            "rocprofv3, one counter a run",
            f"for counter in {names}; do\n"
            f"  rocprofv3 --kernel-include-regex '^{plan.name}$' --pmc $counter -d profile -o $counter -f csv -- \\\n"
            f"    {application}\ndone",
        ),
        Command(
            "rocprof, where there is no rocprofv3",
            f"cat > counters.txt <<'END'\n{lines}\nkernel: {plan.name}\nEND\n"
            f"rocprof -i counters.txt -o {plan.name}.csv {application}",
        ),
        Command(
            "rocprof-compute (before ROCm 6.2: omniperf)",
            f"rocprof-compute profile -n {plan.name} -k {plan.name} -- {application}\n"
            f"rocprof-compute analyze -p workloads/{plan.name}/*",
        ),
    )
    return Checklist(plan.name, plan.target.name, commands, (*counters, *columns), notes_for(plan))


def vector_instructions(plan: Plan, stores: bool) -> int:
    """Wave-wide memory instructions of the whole launch: each moves `vector_bytes` a lane."""
    graph, total = plan.graph, 0.0
    rows = 1 if plan.flat else graph.rows
    cols = graph.rows * graph.cols if plan.flat else graph.cols
    for access in accesses_in_order(plan, stores):
        total += rows * cols * access.dtype.bytes / access.vector_bytes if access.by_column else 0
    return math.ceil(total / plan.target.warp)


def accesses_in_order(plan: Plan, stores: bool) -> Iterator[Access]:
    """What each pass reads or writes, one pass after another."""
    for row_pass in plan.passes if isinstance(plan, RowPlan) else ():
        yield from (s.access for s in row_pass.stores) if stores else (load.access for load in row_pass.reads)


def exact_bytes(count: int) -> str:
    return f"{count:,} ({count / 1e6:.1f} MB)"


# ---------------------------------------------------------------- the program that is profiled


def run(chain: Chain, target: Target, *, on: str = "gpu", launches: int = LAUNCHES) -> str:
    """Launch the chain's kernels at its sizes, on noise; says on what. Raises MissingError without a matching GPU."""
    from fusegen.pipeline import compile as build

    kernel = build(chain, target, on=on, validate=False)
    made = operands(kernel.device, chain.graph)
    for _ in range(launches):
        kernel(*made.inputs, out=made.out)
    kernel.device.synchronize()
    return str(kernel.device)
