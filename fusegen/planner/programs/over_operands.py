"""Which outputs of a program may be written over which operands.

one launch writes it    and no other step of that launch, and none of a later one, reads the operand
in the same parts       each part of the operand that the writing step reads is one that it writes, and its plan may
                        write that over this: parts of one output never lie in the same bytes
"""

from __future__ import annotations

from fusegen.planner.programs.model import ProgramPlan, Step

Pairs = frozenset[tuple[str, str]]  # (output, operand)


def overwritable(program: ProgramPlan) -> Pairs:
    """The pairs (output, operand) of the program."""
    graph = program.graph
    return frozenset(
        (output.name, operand.name)
        for output in graph.outputs
        for operand in graph.inputs
        if output.type == operand.type and may_overwrite(program, output.name, operand.name)
    )


def may_overwrite(program: ProgramPlan, output: str, operand: str) -> bool:
    writing = [place for place in range(len(program.launches)) if output in program.written(place)]
    if output in program.graph.updates or not writing:
        return False
    for place, steps in enumerate(program.launches):
        for step in steps:
            reads = any(binding.base == operand for binding in step.reads)
            writes = any(binding.base == output for binding in step.writes)
            if reads and place >= writing[0] and not writes:
                return False
            if reads and writes and (len(writing) > 1 or not in_own_parts(step, output, operand)):
                return False
            if writes and not reads and any(b.base == operand for other in steps for b in other.reads):
                return False
    return True


def in_own_parts(step: Step, output: str, operand: str) -> bool:
    """Is all that the step reads of the operand what its plan may write the output's same part over?"""
    written = {binding.view: binding.tensor for binding in step.writes if binding.base == output}
    read = [binding for binding in step.reads if binding.base == operand]
    return all(b.view in written and (written[b.view], b.tensor) in step.plan.in_place for b in read)


def overwritten_by(step: Step, pairs: Pairs) -> Pairs:
    """What of `pairs` that is among the step's own tensors."""
    return frozenset(
        (written.tensor, read.tensor)
        for written in step.writes
        for read in step.reads
        if (written.base, read.base) in pairs and written.view == read.view
    )
