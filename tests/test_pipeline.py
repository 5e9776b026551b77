"""From a chain to a proven kernel: what is remembered of a validation, and when it no longer counts."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import pytest

import fusegen
from fusegen import Chain, Kernel, chain, dims, f16, f32, pipeline
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import EmulatorUnavailable, toolchain
from fusegen.errors import ArgumentError, KernelError, RequestError, ValidationError
from fusegen.language.spec import load_chains
from fusegen.planner.launched import Text
from fusegen.planner.model import Layout, Plan, Source
from fusegen.planner.smaller import needs_smaller, smaller
from fusegen.runtime import finding
from fusegen.runtime.cache import Entry, KernelCache, key_of
from fusegen.runtime.devices import Loaded
from fusegen.targets import H200
from fusegen.validation import validate
from fusegen.validation.emulated import twin
from tests.pretend import PretendGpu
from tests.tools import needs_both

M, N = dims("M N")


@chain(M=4, N=40)
def doubled(x: f32[M, N]) -> f32[M, N]:
    """2 x."""
    return x + x


@chain(M=8, N=64)
def soft(x: f16[M, N]) -> f16[M, N]:
    """softmax(x)."""
    return F.softmax(x)


pytestmark = needs_both


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((len,), "is not a chain: pass a function under @chain"),
        (("specs/rmsnorm.py",), "'specs/rmsnorm.py' is not a chain"),
        ((doubled, 90), "target=90 is no target; name one, as in target='cuda:h200'"),
    ],
)
def test_what_is_no_chain_or_target_is_one_sentence(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        pipeline.compile(*arguments)
    with pytest.raises(RequestError, match="3 names no device"):
        pipeline.compile(doubled, on=cast(Any, 3))


@pytest.mark.parametrize("verb", [fusegen.bench, fusegen.validate, fusegen.render], ids=lambda verb: verb.__name__)
def test_a_chain_is_no_kernel_and_no_plan(verb: Callable[[Any], object]) -> None:
    wanted = (
        r"a plan, and .* is none\n  fusegen.plan\(" if verb is fusegen.render else r"a kernel, .*\n  fusegen.compile\("
    )
    with pytest.raises(RequestError, match=f"{verb.__name__} takes {wanted}"):
        verb(doubled)


@pytest.fixture
def validations(caches: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where each validation really ran. No kernel is known at first; the emulator's libraries are."""
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(caches))
    for folder in ("kernels", "sources"):
        shutil.rmtree(caches / folder, ignore_errors=True)
    found: list[str] = []

    def counted(kernel: Any, **options: Any) -> Any:
        found.append(str(kernel.device))
        return validate(kernel, **options)

    monkeypatch.setattr("fusegen.pipeline.run_validation", counted)
    return found


def made() -> Any:
    return pipeline.compile(doubled, H200, on="emulator")


def test_a_kernel_is_validated_once(validations: list[str]) -> None:
    first, second = made(), made()
    assert len(validations) == 1
    assert first.report == second.report
    assert second.report.ok


def test_another_meaning_is_validated_anew(validations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who corrects an op's numpy text and leaves its device text has not proven the kernel."""
    made()

    def reworded(plan: Plan) -> Source:
        source = render(plan)
        return replace(source, reference=f"{source.reference}\n# said in other words\n")

    monkeypatch.setattr("fusegen.pipeline.render", reworded)
    monkeypatch.setattr("fusegen.emitting.sources.code_stamp", lambda: "another op table")
    made()
    assert len(validations) == 2


def test_the_fast_build_does_not_stand_for_the_checking_one(
    validations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in (False, True):
        monkeypatch.setattr("fusegen.emulator.toolchain.can_check", lambda check=check: check)
        if check and not toolchain.can_check():
            pytest.skip("the checking build needs g++")
        kernel = made()
        assert kernel.report.on == f"emulator ({'checking' if check else 'fast build'}), warp 32"
    assert validations == ["emulator (fast build)", "emulator"]


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no report": lambda verdict: verdict.pop("report"),
    "a report that is no table": lambda verdict: verdict.update(report=[1]),
    "a case that lacks its fields": lambda verdict: verdict["report"].update(cases=[{"name": "normal"}]),
    "a number that is none": lambda verdict: verdict["report"]["cases"][0].update(share="much"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_verdict_that_can_not_be_read_is_none(validations: list[str], broken: str) -> None:
    kernel = made()
    store, key = KernelCache(), key_of(kernel.source)
    entry = store.load(key, H200)
    assert entry is not None
    assert entry.verdict is not None
    verdict = dict(entry.verdict)
    BROKEN[broken](verdict)
    store.store(key, Entry(entry.binary, verdict))
    assert made().report.ok
    assert len(validations) == 2


class Slice(PretendGpu):
    """A part of a GPU, with room for clusters of `room` blocks."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def load(self, source: Text, binary: Any) -> Loaded:
        if source.plan.cluster > self.room:
            raise KernelError(f"no room for a cluster of {source.plan.cluster} blocks")
        return super().load(source, binary)


@pytest.mark.parametrize("room", [1, 2, 8])
def test_clusters_that_a_gpu_has_no_room_for_lose(room: int) -> None:
    long = soft.graph.at(M=512, N=1 << 20)
    wanted = pipeline.build(long, H200, tuned=False)
    assert wanted.source.plan.cluster == 8
    built = pipeline.build(long, H200, tuned=False, device=Slice(room))
    assert built.source.plan.cluster <= room
    assert built.verdicts[-1].passed
    refused = [verdict for verdict in built.verdicts if not verdict.passed]
    assert [v.plan.cluster > room for v in refused] == [True] * len(refused)
    assert bool(refused) == (room < 8)
    assert all("no room for a cluster" in v.reason for v in refused)


def test_a_gpu_that_has_room_for_nothing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MOST_GATED", 1)
    with pytest.raises(KernelError, match="no room for a cluster of 8 blocks"):
        pipeline.build(soft.graph.at(M=512, N=1 << 20), H200, tuned=False, device=Slice(1))


def test_a_kernel_travels(caches: Path) -> None:
    """A copy is the kernel itself; a pickle is compiled again."""
    kernel = made()
    assert copy.copy(kernel) is copy.deepcopy({"k": kernel})["k"] is kernel
    there = pickle.loads(pickle.dumps(kernel))
    assert there is not kernel
    assert (repr(there), there.source.text) == (repr(kernel), kernel.source.text)
    x = np.ones((3, 4), np.float32)
    assert np.array_equal(there(x), kernel(x))
    with pytest.raises(TypeError, match=r"a prepared call can't be pickled: .*; pickle its kernel"):
        pickle.dumps(kernel.prepare(x))
    alone = Kernel(kernel.source, None, kernel.device, lambda layout: (kernel.source, None))
    with pytest.raises(TypeError, match=r"doubled can't be pickled: it was not made by fusegen.compile"):
        pickle.dumps(alone)


def test_arrays_that_no_kernel_is_for(caches: Path) -> None:
    """Advice that fails is none: there is no kernel of rows without columns, or with fewer than are chosen of them."""
    with pytest.raises(
        ArgumentError, match=r"x on axis 1 has 0\n  there is no kernel for such arrays: soft: N=0 is not"
    ):
        pipeline.compile(soft, H200, on="emulator")(np.zeros((3, 0), np.float16))
    with pytest.raises(ArgumentError, match=r"x on axis 1 has 5\n  compile soft.at\(N=5\) for such arrays"):
        pipeline.compile(soft, H200, on="emulator")(np.zeros((3, 5), np.float16))


@pytest.mark.parametrize("name", [None, 90, b"cuda"])
def test_a_target_s_name_is_text(name: Any) -> None:
    with pytest.raises(RequestError, match=r"is not a target; name one, as in fusegen.target\('cuda:h200'\)"):
        fusegen.target(name)


# ---------------------------------------------------------------- candidates that fail their validation


def tripled(plans: Callable[[Plan], bool]) -> Callable[[Plan], Source]:
    """Rendering with a fault: of the plans chosen, the kernel adds once too often."""

    def rendered(plan: Plan) -> Source:
        source = render(plan)
        assert "x + x;" in source.text
        return replace(source, text=source.text.replace("x + x;", "x + x + x;")) if plans(plan) else source

    return rendered


def test_a_candidate_that_fails_its_validation_loses_to_the_next(
    validations: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = pipeline.plan(doubled, H200)
    broken = tripled(lambda plan: plan.configuration == first.configuration)
    monkeypatch.setattr(pipeline, "remembered", lambda plan, _: broken(plan))
    kernel = made()
    assert len(validations) == 2
    assert kernel.report.ok
    assert kernel.plan.configuration != first.configuration
    x = np.arange(80, dtype=np.float32).reshape(2, 40)
    assert (kernel(x) == 2 * x).all()
    padded = np.zeros((2, 41), np.float32)[:, :40]
    padded[:] = x
    assert (kernel(padded) == 2 * x).all()  # nor is it taken for another layout
    assert "failed its validation: normal: " in kernel.gate[0].reason
    assert kernel.gate[0].plan.configuration == first.configuration
    assert f"fault of fusegen, please report it\n  {first.configuration}: normal: " in caplog.text


def test_a_chain_whose_candidates_all_fail_is_refused(
    validations: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tripled(lambda plan: True)
    monkeypatch.setattr(pipeline, "remembered", lambda plan, _: broken(plan))
    with pytest.raises(ValidationError, match="doubled on cuda:h200 failed its validation\n") as refused:
        made()
    assert len(validations) == pipeline.MOST_VALIDATED
    assert caplog.text.count("the next candidate is tried") == len(validations) - 1
    assert "elements are wrong" in str(refused.value)


# ---------------------------------------------------------------- on a GPU


RACE = "    __shared__ int last;\n    last = threadIdx.x;\n"  # changes no number


def no_other(layout: Layout) -> NoReturn:
    pytest.fail(f"a variant was made for {layout}")


def on_pretended_gpu(chosen: Chain, racing: bool) -> Kernel:
    source = render(pipeline.plan(chosen, H200))
    if racing:
        place = source.text.index("{\n", source.text.index("__global__")) + 2
        source = replace(source, text=source.text[:place] + RACE + source.text[place:])
    return Kernel(source, None, PretendGpu(), no_other)


@pytest.mark.parametrize("racing", [False, True])
def test_a_race_that_changes_no_number_is_seen_in_the_emulator(racing: bool) -> None:
    report = validate(on_pretended_gpu(soft, racing), quick=True)
    faults = {case.name: case.problem for case in report.cases if not case.ok}
    assert "emulated" in {case.name for case in report.cases}
    if racing:
        assert faults.keys() == {"emulated"}
        assert "race" in faults["emulated"]
    assert report.ok != racing


def test_without_the_checking_build_the_report_says_what_was_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*, check: bool) -> NoReturn:
        raise EmulatorUnavailable("the checking build needs g++")

    kernel = on_pretended_gpu(soft, racing=True)
    loaded = kernel.device.load(kernel.source, None)  # the pretended GPU needs a compiler, too
    monkeypatch.setattr("fusegen.emulator.toolchain.compiler_for", missing)
    monkeypatch.setattr(kernel.device, "load", lambda *_: loaded)
    report = validate(kernel, quick=True)
    assert report.ok
    assert report.on == "Pretend (cuda:0); races were not looked for: the checking build needs g++"


def test_a_large_product_has_a_smaller_twin_of_its_own_configuration() -> None:
    (spec,) = load_chains(Path("specs/gemm_bias_gelu.py"))
    large = spec.at(M=4096, K=4096 + 8, N=4096 + 24)
    for name in ("cuda:h200", "cuda:a100", "hip:mi300x"):
        plan = pipeline.plan(large, name)
        other = twin(Kernel(render(plan), None, finding.find(plan.target, "emulator"), no_other)).plan
        assert other.graph.sizes == {"M": 4096, "K": 512 + 8, "N": 512 + 24}
        assert other.configuration == plan.configuration
    small = pipeline.plan(spec.at(M=64, K=64, N=64))
    source = render(small)
    assert twin(Kernel(source, None, finding.find(small.target, "emulator"), no_other)).source is source


def test_attention_whose_queries_are_its_keys_is_judged_at_fewer_of_both() -> None:
    """Of 4096 tokens that are one dim every launch has 4096 x 4096 scores: a reference took 70 s for some of them."""
    (retention,) = load_chains(Path("specs/retention.py"))
    (causal,) = load_chains(Path("specs/causal_attention.py"))
    for name in ("cuda:h200", "cuda:a100", "hip:mi300x"):
        plan = pipeline.plan(retention.at(S=4096 + 20), name)
        assert needs_smaller(plan)
        other = smaller(plan)
        assert other.graph.sizes["S"] == 512 + 20
        assert other.configuration == plan.configuration
        assert not needs_smaller(other)
        assert not needs_smaller(pipeline.plan(causal, name))  # whose queries may be few
