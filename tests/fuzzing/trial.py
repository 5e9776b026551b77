"""One seed, from its text to a verdict.

Classes of what came of it:

    right        every element that can be judged is what is meant, in every call
    refused      a clear error of a spec, a plan or a call, in a sentence
    wrong        the kernel passed fusegen's validation, and is not what is meant
    false-alarm  fusegen refuses a kernel that is right, or a layout that docs/calling.md takes
    caught       fusegen's validation refuses a kernel, and rightly
    crash        any other exception, or the process dies
    hang         over the time limit
    harness      an error of the fuzz itself, or nothing here to run kernels with

Only `right` and `refused` are well.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import random
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import fusegen
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError, RequestError, ValidationError
from fusegen.language.spec import Chain
from fusegen.planner import candidates
from fusegen.planner.model import Layout, Plan, Source
from fusegen.runtime import Kernel, finding
from fusegen.targets import target as target_named
from fusegen.validation import validate
from tests.fuzzing.bounded import STORED, Array
from tests.fuzzing.judging import Verdict, difference, judge, judge_columns
from tests.fuzzing.operands import TAKEN, Laid, lay, sized
from tests.fuzzing.seeds import Call, Case, call_of, case, meaning

WELL = ("right", "refused")
LAUNCH_S = 100.0  # that the emulator gives one launch


@dataclass
class Outcome:
    """What came of one seed."""

    seed: int
    kind: str = ""
    target: str = ""
    result: str = "harness"
    why: str = ""
    any: bool = False
    regime: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    called: dict[str, int] = field(default_factory=dict)
    operands: list[str] = field(default_factory=list)
    out: list[str] | None = None
    over: dict[str, str] = field(default_factory=dict)  # the outputs that were written over operands as well
    elements: int = 0
    unjudged: int = 0
    seconds: float = 0.0
    failed: str = ""  # what fusegen's validation said
    text: str = ""

    @property
    def well(self) -> bool:
        return self.result in WELL

    @property
    def again(self) -> str:
        """The command that shows it."""
        return f"python -m tests.fuzzing --seeds {self.seed}{' --any' if self.any else ''} --show"

    def json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in ("", None, {})}


def run_trial(seed: int, any_candidate: bool = False) -> Outcome:
    """What comes of one seed; of the planner's first choice, or of any of its candidates."""
    outcome, started = Outcome(seed, any=any_candidate), time.monotonic()
    try:
        found = case(seed)
        describe(outcome, found)
        trial(outcome, found)
    except Exception:
        outcome.result, outcome.why = "harness", traceback.format_exc()[-2000:]
    outcome.seconds = round(time.monotonic() - started, 2)
    return outcome


def describe(outcome: Outcome, found: Case) -> None:
    draft = found.draft
    outcome.kind, outcome.target, outcome.text = draft.kind, found.target, draft.text
    outcome.sizes = {name: draft.sizes[name] for name in draft.dims}
    outcome.called = {name: found.sizes[name] for name in draft.dims}
    pairs = zip(draft.everything, found.fills, draft.used, strict=True)
    outcome.operands = [
        f"{o.name}: {f.style}, {f.layout}{', special' * bool(f.special)}" for o, f, used in pairs if used
    ]
    outcome.out = None if found.outs is None else [fill.layout for fill in found.outs]


def trial(outcome: Outcome, found: Case) -> None:
    """Compile, call, judge."""
    with warnings_of_fusegen() as said:
        try:
            kernel = compiled(outcome, found)
        except RequestError as error:
            outcome.result, outcome.why = "refused", f"{type(error).__name__}: {error}"
            return
        except MissingError as error:
            outcome.why = str(error)
            return
        except Exception as error:
            outcome.result, outcome.why = "crash", crashed(error)
            return
        outcome.regime = str(getattr(kernel.plan, "regime", "a program"))
        call = call_of(found)
        try:
            complaints = calls(outcome, found, call, kernel)
        except Exception as error:
            outcome.result, outcome.why = "crash", crashed(error)
            if outcome.failed:
                outcome.result = "caught"
            return
    outcome.why = "; ".join([*complaints, *said])
    if complaints:
        only_layouts = all(one.startswith(REFUSES) for one in complaints)
        outcome.result = "caught" if outcome.failed else "false-alarm" if only_layouts else "wrong"
    elif outcome.failed:
        faulty = "race" in outcome.failed or "fault" in outcome.failed or not outcome.elements
        outcome.result = "caught" if faulty else "false-alarm"  # without rows, nothing says that it is right
    else:
        outcome.result = "caught" if said else "right"


REFUSES = "refuses a layout"


def crashed(error: Exception) -> str:
    place = traceback.format_exception(error)[-3:]
    return f"{type(error).__name__}: {error}\n{''.join(place)[-1200:]}"


@contextlib.contextmanager
def warnings_of_fusegen() -> Iterator[list[str]]:
    """What fusegen warns of meanwhile: a candidate that failed its validation, where another one was taken."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: "validation" in record.getMessage())
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fusegen")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


# ---------------------------------------------------------------- the kernel


def compiled(outcome: Outcome, found: Case) -> Kernel:
    """The kernel; where its validation fails, the same unproven, and `outcome.failed` says why."""
    chain = chain_of(found)
    if outcome.any:
        return any_kernel(outcome, chain, found)
    try:
        return fusegen.compile(chain, found.target, on="emulator")
    except ValidationError as error:
        outcome.failed = str(error)
        return fusegen.compile(chain, found.target, on="emulator", validate=False)


def chain_of(found: Case) -> Chain:
    """The chain of the drawn text, as a file of a user would define it."""
    text, name = found.draft.text, f"<fuzz {found.seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    module: dict[str, Any] = {"__name__": f"fuzz_{found.seed}"}
    exec(compile(text, name, "exec"), module)
    chain: Chain = module["fuzz"]
    return chain


def any_kernel(outcome: Outcome, chain: Chain, found: Case) -> Kernel:
    """A kernel of one candidate, whatever its cost, since tuning may choose it; rare templates are drawn as often as
    common ones. It is validated as `compile` does."""
    target, rng = target_named(found.target), random.Random(f"candidate {found.seed}")
    groups: dict[tuple[object, ...], list[Plan]] = defaultdict(list)
    for plan in candidates(chain.graph, target).need():
        ways = ("staging", "keeps", "packed")
        groups[plan.template, plan.cluster > 1, *(getattr(plan, way, None) for way in ways)].append(plan)
    chosen = rng.choice(groups[rng.choice(list(groups))])

    def variant(layout: Layout) -> tuple[Source, None]:
        plans = candidates(chain.graph, target, layout).need()
        alike = [plan for plan in plans if plan.configuration == chosen.configuration]
        return render((alike or plans)[0]), None

    kernel = Kernel(render(chosen), None, finding.find(target, "emulator"), variant)
    kernel.device.timeout_s = LAUNCH_S  # type: ignore[attr-defined]
    report = validate(kernel, quick=True)
    if not report.ok:
        outcome.failed = f"{chosen.regime}\n{report}"
    return kernel


# ---------------------------------------------------------------- its calls


def calls(outcome: Outcome, found: Case, call: Call, kernel: Kernel) -> list[str]:
    """Call it on plain operands, and on the same laid out as drawn; what is wrong with what comes.

    The bits of two calls are compared: of both layouts where they have to agree, else of one that is called again.
    """
    complaints: list[str] = []
    plain = results(kernel(*call.plain))
    complaints += [f"plain operands: {one}" for one in judged(outcome, found, call, plain)]
    before = [one.room.copy() for one in call.laid if isinstance(one, Laid)]
    outs = [
        lay(np.full(sized(out.term.shape, found.sizes), 77).astype(STORED[out.dtype]), fill)
        for out, fill in zip(found.draft.outputs, found.outs or (), strict=False)
    ]
    around = [out.around for out in outs]
    alike = not found.laid or (found.rowwise and not outcome.any)  # the same bits, whatever the layout
    try:
        if outs:
            into = tuple(out.array for out in outs)
            kernel(*call.operands, out=into if len(into) > 1 else into[0])
            got = [np.array(out.array) for out in outs]
        else:
            got = results(kernel(*call.operands))
        again = plain if alike else results(kernel(*call.operands))
    except RequestError as error:
        layouts = {fill.layout for fill, used in zip(found.fills, found.draft.used, strict=True) if used}
        layouts |= {fill.layout for fill in found.outs or ()}
        if layouts <= TAKEN.keys():
            complaints.append(f"{REFUSES} that docs/calling.md takes: {type(error).__name__}: {error}")
        return complaints
    complaints += [f"operands laid out: {one}" for one in judged(outcome, found, call, got)]
    differ = "bits depend on the layout" if alike and found.laid else "a second call differs"
    complaints += [f"{differ}: {one}" for one in apart(found, again, got)] if not complaints else []
    arrays = [one for one in call.laid if isinstance(one, Laid)]
    if any(one.room.tobytes() != room.tobytes() for one, room in zip(arrays, before, strict=True)):
        complaints.append("an operand, or what lies beside it, was changed")
    if any(out.around != beside for out, beside in zip(outs, around, strict=True)):
        complaints.append("what lies beside out= was changed")
    return complaints or over_operands(outcome, found, kernel, plain)


def over_operands(outcome: Outcome, found: Case, kernel: Kernel, plain: list[Array]) -> list[str]:
    """What is wrong with one more call, which writes outputs over some of the operands that the plan names."""
    rng = random.Random(f"over {found.seed}")
    if not kernel.in_place:
        return []
    call = call_of(found)
    fills = [fill for fill, used in zip(found.fills, found.draft.used, strict=True) if used]
    fitting = {
        t.name: one for t, one, fill in zip(kernel.operands, call.laid, fills, strict=True)
        if isinstance(one, Laid) and fill.layout != "broadcast"
    }  # fmt: skip
    pairs = [pair for pair in sorted(kernel.in_place) if pair[1] in fitting]
    for output, operand in rng.sample(pairs, len(pairs)):
        if output not in outcome.over and operand not in outcome.over.values():
            outcome.over[output] = operand
    if not outcome.over:
        return []
    into = [
        fitting[outcome.over[t.name]].array if t.name in outcome.over else np.empty_like(array)
        for t, array in zip(kernel.outputs, plain, strict=True)
    ]
    around = {name: one.around for name, one in fitting.items()}
    before = {name: one.room.copy() for name, one in fitting.items() if name not in outcome.over.values()}
    kernel(*call.operands, out=tuple(into) if len(into) > 1 else into[0])
    complaints = judged(outcome, found, call, into)
    if not complaints and found.rowwise and not outcome.any:
        complaints = apart(found, plain, into)
    if any(one.around != around[name] for name, one in fitting.items()):
        complaints.append("what lies beside an operand was changed")
    if any(fitting[name].room.tobytes() != room.tobytes() for name, room in before.items()):
        complaints.append("another operand was changed")
    return [f"in place, {outcome.over}: {one}" for one in complaints]


def results(returned: Any) -> list[Array]:
    return list(returned) if isinstance(returned, tuple) else [returned]


def apart(found: Case, one: list[Array], other: list[Array]) -> list[str]:
    """Where two results differ; a selection in any order may be in another each time."""
    if not found.draft.ordered:
        return []
    names = [out.term.text for out in found.draft.outputs]
    return [f"{name}: {said}" for name, a, b in zip(names, one, other, strict=True) if (said := difference(a, b))]


def judged(outcome: Outcome, found: Case, call: Call, got: list[Array]) -> list[str]:
    """Complaints of one call's results; counts what is judged."""
    draft, meant = found.draft, meaning(found, call)
    wants = meant.outputs
    verdicts: dict[int, Verdict] = {}
    shapes = [sized(out.term.shape, found.sizes) for out in draft.outputs]
    if (at := draft.chosen_at) is not None:
        assert meant.choice is not None
        verdicts[at] = judge_columns(got[at], meant.choice, shapes[at], ordered=draft.ordered)
        if not draft.ordered:
            if verdicts[at].complaint:
                return [f"{draft.outputs[at].term.text}: {verdicts[at].complaint}"]
            wants = meaning(found, call, got[at]).outputs
    for index, (out, array, want, shape) in enumerate(zip(draft.outputs, got, wants, shapes, strict=True)):
        if index not in verdicts:
            verdicts[index] = judge(array, want, out.dtype, shape)
    outcome.elements += sum(one.elements for one in verdicts.values())
    outcome.unjudged += sum(one.unjudged for one in verdicts.values())
    return [f"{draft.outputs[i].term.text}: {one.complaint}" for i, one in sorted(verdicts.items()) if one.complaint]
