"""What `list`, `plan` and `explain` say: as tables for people, as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusegen.cli.showing import heading, labelled, mebibytes, points, prose, say, table, times
from fusegen.database import Choice
from fusegen.language import ops
from fusegen.language.graph import Kind, Op
from fusegen.language.spec import Chain
from fusegen.language.trace import OPS
from fusegen.language.types import shape_text
from fusegen.planner.heading import header_facts, summary, title
from fusegen.planner.model import Access, Candidates, Plan
from fusegen.reporting.explaining import Point, Section, in_place

# ---------------------------------------------------------------- list


def chain_facts(chain: Chain) -> dict[str, Any]:
    graph = chain.graph

    def tensors(found: Iterable[Any]) -> list[dict[str, Any]]:
        return [{"name": t.name, "dtype": str(t.dtype), "shape": [str(size) for size in t.shape]} for t in found]

    return {
        "name": chain.name,
        "doc": graph.doc,
        "file": graph.where.file,
        "line": graph.where.line,
        "signature": graph.signature,
        "inputs": tensors(graph.inputs),
        "outputs": tensors(graph.outputs),
        "sizes": dict(graph.sizes),
    }


def show_chains(chains: Iterable[Chain]) -> None:
    """A table; files are named where they are not all called after their chains, in one folder."""
    chains = list(chains)
    files = [Path(chain.graph.where.file) for chain in chains]
    columns = ("chain!", "operands and results", "sizes")
    rows = [(chain.name, chain.graph.signature, chain.graph.sizes_text()) for chain in chains]
    if len(chains) > 1 and files == [files[0].parent / f"{chain.name}.py" for chain in chains]:
        say(table(*columns, rows=rows, styles={0: "bold"}), "")
        say(prose(f"each in {files[0].parent}, in a file of its name"))
        return
    places = [(*row, str(file)) for row, file in zip(rows, files, strict=True)]
    say(table(*columns, "file", rows=places, styles={0: "bold", 3: "dim"}))


KINDS = {
    Kind.REDUCE: "reduction", Kind.SCAN: "scan", Kind.PRODUCT: "product", Kind.GATHER: "gather",
    Kind.SCATTER: "scatter",
}  # fmt: skip


def op_facts() -> list[dict[str, Any]]:
    """Every function that a spec can call, then what the operators of Python stand for."""
    facts = []
    for name in ops.FUNCTIONS:
        function = getattr(ops, name)
        kind = KINDS.get(OPS[name].kind, "elementwise") if name in OPS else "elementwise"
        if function in ops.COMPOSITES:
            kind = "composite"
        elif function in ops.SELECTIONS:
            kind = "selection"
        elif function in ops.VIEWS:
            kind = "view"
        words = parameters(function)
        call = f"F.{function.__name__}({', '.join(name + default for name, default in words.items())})"
        taken = [name for name, default in words.items() if not default]
        facts.append({"call": call, "kind": kind, "doc": first_line(function.__doc__), **device(name, taken)})
    symbols = [op for op in OPS.values() if op.symbol]
    facts += [{"call": symbol_text(op), "kind": "operator", "doc": op.doc, **device(op.name, [])} for op in symbols]
    return facts


def device(name: str, taken: list[str]) -> dict[str, Any]:
    """What a primitive is on the device and in the reference, of arguments by those names; a composite has its formula
    in `doc`."""
    op = OPS.get(name)
    if op is None or op.kind not in (Kind.MAP, Kind.REDUCE, Kind.SCAN):
        return {"device": None, "numpy": None, "flops": None}
    words = taken if len(taken) > 1 else ["x", "y"]  # a reduction's text adds one more to what there is
    return {"device": op.expr.format(*words), "numpy": op.ref.format(*words), "flops": op.flops}


def parameters(function: Any) -> dict[str, str]:
    """Each parameter's name and default: `x` and nothing, `axis` and `=-1`."""
    import inspect

    found = inspect.signature(function).parameters.values()
    return {p.name: "" if p.default is p.empty else f"={p.default!r}" for p in found}


def symbol_text(op: Op) -> str:
    return f"{op.symbol}x" if op.arity == 1 else f"x {op.symbol} y"


def first_line(doc: str | None) -> str:
    return (doc or "").strip().splitlines()[0] if doc else ""


def show_ops() -> None:
    rows = []
    for fact in op_facts():
        meaning = prose(fact["doc"])
        if fact["device"]:
            meaning.append(f"\n{fact['device']}", "dim")
        rows.append((fact["call"], fact["kind"], meaning))
    say(table("in a spec", "kind!", "meaning, and on the device", rows=rows, styles={0: "bold"}), "")
    also = "-x, abs(x), x ** number, and numbers wherever an operand may stand; F is `from fusegen import ops as F`"
    say(prose(f"also {also}"))


# ---------------------------------------------------------------- plan


def plan_facts(plan: Plan) -> dict[str, Any]:
    traffic = plan.cost.traffic
    return {
        "chain": plan.name,
        "signature": plan.graph.signature,
        "sizes": dict(plan.graph.sizes),
        "target": plan.target.name,
        "arch": plan.target.arch,
        "bytes": {
            "per_element_unfused": traffic.per_element_unfused,
            "per_element_fused": traffic.per_element_fused,
            "per_element_unfused_each": traffic.bytes_per_element_unfused,
            "per_element_fused_each": traffic.bytes_per_element_fused,
            "unfused": traffic.unfused,
            "products_apart": traffic.per_element_unfused if traffic.product_flops else None,
            "ideal": traffic.ideal,
            "moved": traffic.moved,
        },
        "tensors": [asdict(t) for t in traffic.tensors],
        "accesses": [access_facts(plan, a) for a in plan.accesses],
        "flops": traffic.flops,
        "product_flops": traffic.product_flops,
        "special_calls": traffic.special,
        "intensity": traffic.intensity,
        "launches": {"fused": 1, "unfused": traffic.launches_unfused},
        "rounding": list(plan.rounding),
        "decisions": [asdict(d) for d in plan.decisions],
        "in_place": [{"output": output, "operand": operand} for output, operand in sorted(plan.in_place)],
        **candidate_facts(plan),
    }


def choice_facts(choice: Choice) -> dict[str, Any]:
    """The plan that is tried first, and what was measured of it (None where the estimate chose)."""
    hit = choice.hit
    tuned = hit and {
        "time_us": hit.row.time_us,
        "share": hit.row.share,
        "sizes": hit.row.sizes,
        "target": hit.row.target,
        "compiler": hit.row.compiler,
        "fusegen": hit.row.fusegen,
        "at": hit.row.at,
        "shipped": hit.shipped,
    }
    return {**plan_facts(choice.plan), "tuned": tuned, "lookup": list(choice.steps)}


def candidate_facts(plan: Plan) -> dict[str, Any]:
    """What tells one candidate from another."""
    return {
        "configuration": plan.configuration,
        "rule": plan.rule,
        "regime": plan.regime,
        **plan.facts,
        "blocks": plan.blocks(plan.graph.rows * plan.graph.cols if plan.flat else plan.graph.rows),
        "shared_bytes": plan.shared_bytes + plan.static_shared_bytes,
        "registers_estimated": plan.cost.registers,
        "blocks_per_sm": plan.cost.blocks_per_sm,
        "in_flight_bytes": plan.cost.in_flight_bytes,
        "bytes_moved": plan.cost.traffic.moved,
        "floor_us": plan.cost.floor_us,
        "time_us": plan.cost.time_us,
        "bound": plan.cost.bound,
    }


def access_facts(plan: Plan, access: Access) -> dict[str, Any]:
    return {
        "tensor": access.tensor,
        "dtype": str(access.dtype),
        "shape": [str(size) for size in access.shape],
        "output": access.output,
        "mode": access.mode,
        "vector_bytes": access.vector_bytes,
        "strides": [p.name for p in plan.params if p.kind in ("stride", "map") and p.tensor == access.tensor],
    }


def show_plan(found: Candidates, choice: Choice, every: bool, least_us: float | None = None) -> None:
    """The header of the kernel, the bytes by each counting, each tensor; with `every`, all candidates and refusals.
    `least_us`: of candidates for one order of sums, what the cheapest of any order would take."""
    plan = choice.plan
    doc = summary(plan.graph)
    say(prose(title(plan), "bold"), *([prose(doc)] if doc else []), "", labelled(header_facts(plan), 9))
    say("", countings(plan), "", tensors(plan), "")
    facts = [*numbers(plan), ("in place", "; ".join(in_place(plan))), ("tuned", str(choice))]
    if least_us is not None:
        facts.append(("batch", batch_text(plan.cost.time_us, least_us)))
    say(labelled(facts, 10))
    if every:
        say("", candidates(found, plan), points(f"{refusal.rule}: {refusal.reason}" for refusal in found.refusals))


def batch_text(time_us: float, least_us: float) -> str:
    """What one order of sums costs."""
    return f"one order of sums for any number of rows: {time_us:.1f} us expected, {least_us:.1f} without it"


def countings(plan: Plan) -> Any:
    """Bytes unfused and fused: as papers count, at least, and as this plan moves them."""
    t = plan.cost.traffic
    first = [
        ("per element: every operand counted for every element",
            f"{t.bytes_per_element_unfused:.4g} B", mebibytes(t.per_element_unfused),
            f"{t.bytes_per_element_fused:.4g} B", mebibytes(t.per_element_fused),
            times(t.per_element_unfused, t.per_element_fused)),
    ]  # fmt: skip
    if t.product_flops:
        first = [
            ("apart: each product a kernel, one before, one behind", f"{t.intensity_apart:.1f} flop/B",
                mebibytes(t.per_element_unfused), f"{t.intensity:.1f} flop/B", mebibytes(t.moved),
                times(t.per_element_unfused, t.moved)),
        ]  # fmt: skip
    rows = [
        *first,
        ("ideal: every tensor once",
            "", mebibytes(t.unfused), "", mebibytes(t.ideal), times(t.unfused, t.ideal)),
        ("moved: what this plan asks of memory",
            "", mebibytes(t.unfused), "", mebibytes(t.moved), times(t.unfused, t.moved)),
    ]  # fmt: skip
    return table("bytes", ">", "unfused>", ">", "fused>", "saved>", rows=rows)


def tensors(plan: Plan) -> Any:
    by_name = {t.tensor: t for t in plan.cost.traffic.tensors}
    rows = []
    for access in plan.accesses:
        t = by_name[access.tensor]
        facts = access_facts(plan, access)
        mode = access.mode if access.by_column else "one a row"
        along = "flat" if plan.flat else ", ".join(dict.fromkeys(facts["strides"])) or "shared by every row"
        rows.append(
            (
                f"{'write' if access.output else 'read'} {access.tensor}",
                f"{access.dtype}{shape_text(access.shape)}; {mode}, {access.vector_bytes} B; {along}",
                mebibytes(t.per_element),
                mebibytes(t.ideal),
                mebibytes(t.moved),
            )
        )
    columns = ("tensor!", "type; access, at a time; strides", "per element>", "ideal>", "moved>")
    return table(*columns, rows=rows)


def numbers(plan: Plan) -> list[tuple[str, str]]:
    cost, traffic, target = plan.cost, plan.cost.traffic, plan.target
    special = f", {traffic.special / 1e6:,.1f} M of them calls such as exp" if traffic.special else ""
    products = f", {traffic.product_flops / 1e6:,.1f} M of products" if traffic.product_flops else ""
    at = f" at {plan.matrix_tflops:g} TFLOP/s" if traffic.product_flops else ""
    return [
        ("launches", f"1 fused, {traffic.launches_unfused} unfused"),
        ("flops", f"{traffic.flops / 1e6:,.1f} M{products}{special}; "
                  f"{traffic.intensity:.2f} flop/B, {cost.bound}-bound"),
        ("floor", f"{cost.floor_us:.1f} us: the ideal bytes at {target.dram_gbs / 1000:g} TB/s, or the flops{at}"),
        ("estimate", f"{cost.time_us:.1f} us, launch included"),
        ("threads", f"{plan.threads} a block, about {cost.registers} registers each; {cost.blocks_per_sm} blocks "
                    f"per SM, {mebibytes(cost.in_flight_bytes)} of loads in flight"),
    ]  # fmt: skip


def candidates(found: Candidates, chosen: Plan) -> Any:
    rows = []
    for p in found.plans:
        rows.append(
            (
                "*" if p is chosen else "",
                f"{p.cost.time_us:.1f} us",
                mebibytes(p.cost.traffic.moved),
                str(p.cost.registers),
                mebibytes(p.shared_bytes + p.static_shared_bytes),
                str(p.cost.blocks_per_sm),
                f"{p.rule}: {p.regime}",
            )
        )
    columns = ("!", "estimate>", "moved>", "regs>", "shared>", "blocks\nper SM>", "candidate")
    return table(*columns, rows=rows)


# ---------------------------------------------------------------- explain


def show_explanation(plan: Plan, sections: Iterable[Section]) -> None:
    say(prose(f"{title(plan)}  for {plan.target}", "bold"))
    for section in sections:
        heading(section.title)
        say(points(point_text(point) for point in section.points))


def point_text(point: Point) -> str:
    """Its sentence, and what that saves."""
    return f"{point.text}   saves {mebibytes(point.bytes_saved)}" if point.bytes_saved else point.text
