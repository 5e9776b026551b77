"""`bench` on a pretended GPU, whose clock is known: floors, shares, refusals, peers, counters, picture, verb."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fusegen
from fusegen import Program, bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.cli import app
from fusegen.errors import MissingError, RequestError
from fusegen.language.graph import Graph
from fusegen.language.spec import load_chains
from fusegen.measuring import plotting
from fusegen.measuring.benchmark import Bench, bench
from fusegen.measuring.counters import READ, WRITTEN, count_bytes, read_csv
from fusegen.measuring.entries import work_of
from fusegen.measuring.peers import gist, load_peers
from fusegen.pipeline import plan
from fusegen.runtime import finding
from fusegen.runtime.finding import present, target_of
from fusegen.targets import H200
from tests.chains_cut import residual_norm
from tests.pretend import LAUNCH_US, RATE, PretendGpu
from tests.tools import needs_compiler

M, N, K = dims("M N K")
ROOT = Path(__file__).resolve().parents[2]
SPECS = {c.name: c for c in load_chains(ROOT / "specs")}
NCU = """#!{python}
import sys
sys.stderr.write("==PROF== Connected\\n")
arguments = sys.argv[1:]
assert arguments[arguments.index("--kernel-name") + 1] == "bias_relu", arguments
assert arguments[-6:] == ["--set", "M=64", "--set", "N=512", "--dtype", "bf16"], arguments
print("bias_relu: 3 launches")
print('"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"')
print('"0","77","bias_relu","dram__bytes_read.sum","byte","66,560"')
print('"0","77","bias_relu","dram__bytes_write.sum","byte","60000"')
"""


@chain(M=64, N=512)
def largest(x: f32[M, N]) -> f32[M, 1]:
    """Reads, and hardly writes."""
    return F.max(x)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PretendGpu:
    """A pretended GPU that every request for one gets; neither ncu nor torch.compile's own compilers are here."""
    found = PretendGpu()
    monkeypatch.setattr(finding, "find", lambda target, on="auto", check=None: found)
    monkeypatch.setenv("PATH", str(tmp_path / "bin") + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr("fusegen.measuring.counters.USUAL_PLACE", str(tmp_path / "nowhere"))
    if have_torch():
        import torch

        monkeypatch.setattr(torch, "compile", lambda function, mode, dynamic: function)
    return found


def have_torch() -> bool:
    return find_spec("torch") is not None


def kernel_for(graph: Graph) -> Any:
    try:
        return fusegen.compile(graph, "cuda:h200", validate=False)
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])


def entry(report: Bench, name: str) -> Any:
    (found,) = [e for e in report.entries if e.name == name]
    return found


# ---------------------------------------------------------------- figures


@needs_compiler
def test_shares_are_of_the_floor_and_pieces_add_up(gpu: PretendGpu) -> None:
    kernel = kernel_for(SPECS["bias_gelu_residual_ln"].graph.at(M=64, N=1024))
    report = bench(kernel, peers=False, counters=False, repeats=4)
    ideal = 3 * 64 * 1024 * 2 + 3 * 1024 * 2
    assert (report.ideal_bytes, report.whole_bytes) == (ideal, ideal)
    assert report.floor_us == pytest.approx(ideal / RATE)
    own = LAUNCH_US + ideal / (RATE * 0.9)
    assert report.own.us == pytest.approx(own)
    assert report.own.share == pytest.approx(ideal / RATE / own)
    assert report.gbs(report.own) == pytest.approx(ideal / own / 1e3)
    pieces = [e for e in report.entries if e.kind == "piece"]
    assert [p.name for p in pieces] == ["add", "gelu", "add", "layernorm"]
    gelu = 2 * 64 * 1024 * 2
    assert pieces[1].share == pytest.approx(gelu / RATE / (LAUNCH_US + gelu / (RATE * 0.9)))
    total = sum(p.us or 0.0 for p in pieces)
    assert entry(report, "unfused, one after another").us == pytest.approx(total)
    assert entry(report, "unfused, each with a cold L2").us == pytest.approx(total)
    assert entry(report, "unfused, each with a cold L2").launches == 4
    assert total > 2 * own


@needs_compiler
def test_a_masked_operand_counts_for_what_is_read(gpu: PretendGpu) -> None:
    kernel = kernel_for(SPECS["scale_causal_softmax"].graph.at(H=1, S=256, N=256))
    report = bench(kernel, peers=False, alone=False, counters=False, repeats=1)
    whole = 2 * 256 * 256 * 2
    assert report.whole_bytes == whole
    assert 0.74 * whole < report.ideal_bytes < 0.78 * whole
    assert "MB with what is masked" in str(report)


@needs_compiler
def test_faster_than_memory_is_refused(gpu: PretendGpu) -> None:
    gpu.speed = 1.5
    kernel = kernel_for(SPECS["bias_relu"].graph.at(M=512, N=1024))
    report = bench(kernel, peers=False, alone=False, counters=False, repeats=2)
    assert report.own.us is None
    assert report.own.share is None
    assert "data in cache" in report.own.refused
    facts = report.to_json()["entries"][0]
    assert facts["share"] is None
    assert facts["gbs"] is None
    assert "data in cache" in facts["refused"]
    assert "refused: " in str(report)
    gpu.speed = 1.02  # within the leeway over the driver's own copy, even without what a launch costs
    assert bench(kernel, peers=False, alone=False, counters=False, repeats=2).own.share is not None


@needs_compiler
def test_reads_alone_may_outrun_a_copy(gpu: PretendGpu) -> None:
    kernel = kernel_for(largest.graph.at(M=512, N=1024))
    gpu.speed = 1.15  # 4.6 TB/s, of 4.8 on the data sheet
    report = bench(kernel, peers=False, alone=False, counters=False, repeats=2)
    assert report.own.share is not None
    gpu.speed = 1.3
    assert bench(kernel, peers=False, alone=False, counters=False, repeats=2).own.share is None


@needs_compiler
def test_a_stopwatch_is_used_again_and_must_be_the_kernels(gpu: PretendGpu) -> None:
    kernel = kernel_for(SPECS["bias_relu"].graph.at(M=64, N=512))
    watch = fusegen.measuring.timing.Stopwatch(gpu)
    bench(kernel, peers=False, alone=False, counters=False, repeats=1, watch=watch)
    gpu.asked.clear()
    bench(kernel, peers=False, alone=False, counters=False, repeats=1, watch=watch)
    assert "copy" not in gpu.asked[-8:]
    with pytest.raises(RequestError, match="stopwatch is on"):
        bench(kernel, watch=fusegen.measuring.timing.Stopwatch(PretendGpu()))


@needs_compiler
def test_the_emulator_has_no_times() -> None:
    kernel = fusegen.compile(largest, "cuda:h200", on="emulator", validate=False)
    with pytest.raises(RequestError, match="gives no times"):
        bench(kernel)


# ---------------------------------------------------------------- programs


@needs_compiler
def test_a_program_is_timed_whole_and_kernel_by_kernel(gpu: PretendGpu) -> None:
    program = kernel_for(residual_norm.graph)
    assert isinstance(program, Program)
    gpu.gap_us = 0.25
    report = bench(program, peers=False, repeats=4)
    x, w, wide, gamma = 24 * 64 * 2, 96 * 64 * 2, 24 * 96 * 2, 96 * 2
    ideal = x + w + wide + gamma + 2 * wide  # the residual is read twice, and counts once
    assert (report.ideal_bytes, report.whole_bytes, report.written_bytes) == (ideal, ideal, 2 * wide)
    assert report.product_flops == 2 * 24 * 96 * 64
    parts = [e for e in report.entries if e.kind in ("kernel", "between")]
    first, second = (kernel.name for kernel in program.kernels)
    assert [(e.name, e.kind, e.launches) for e in parts] == [
        (first, "kernel", 1), (f"between {first} and {second}", "between", None), (second, "kernel", 1),
    ]  # fmt: skip
    moved = [kernel.plan.cost.traffic.moved for kernel in program.kernels]
    times = [LAUNCH_US + each / (RATE * gpu.speed) for each in moved]
    assert [e.us for e in parts] == pytest.approx([times[0], 0.25, times[1]])
    assert report.own.us == pytest.approx(sum(times) + 0.25)
    assert report.own.launches == 2
    assert report.own.share == pytest.approx(report.floor_us / (report.own.us or 0.0))
    assert [report.tflops(e) for e in parts] == [pytest.approx(report.product_flops / times[0] / 1e6), None, None]
    assert parts[2].share == pytest.approx((4 * wide + gamma) / RATE / times[1]), "the product as f32"
    assert [e.name for e in report.entries if e.kind == "piece"] == ["matmul", "add", "round_bf16", "rmsnorm"]
    assert "is a program of 2: bench its `kernels`" in str(report)
    assert "between two kernels: what the second takes" in str(report)


def test_what_several_kernels_read_counts_once() -> None:
    """Both read all of x and half of the array of weights."""

    @chain(M=24, N=96, K=64)
    def halves(x: bf16[M, K], w: bf16[2 * N, K]) -> tuple[i32[M, 1], bf16[M, N]]:
        return F.argmax(x @ w[:N].T), F.softmax(x @ w[N:].T)

    planned: Any = plan(halves.graph, H200)
    assert sum(binding.base == "w" for step in planned.steps for binding in step.reads) == 2
    assert work_of(planned).ideal == 24 * 64 * 2 + 192 * 64 * 2 + 24 * 4 + 24 * 96 * 2


# ---------------------------------------------------------------- peers


@needs_compiler
@pytest.mark.skipif(not have_torch(), reason="torch is missing")
def test_peers_are_timed_or_say_why_not(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def by_hand(x: Any, bias: Any) -> Any:
        seen.append((tuple(x.shape), str(x.dtype), tuple(bias.shape)))
        return lambda: gpu.work("by hand", 100.0)

    def missing(*operands: Any) -> Any:
        raise ImportError("No module named 'quack'\nand more")

    graph = SPECS["bias_relu"].graph.at(M=512, N=1024).with_dtype(fusegen.bf16)
    calls: list[Any] = []

    def slowly(found: Any) -> Any:
        def run(*values: Any) -> Any:
            gpu.work("torch", 50.0)
            calls.append(found(*values))

        return run

    original = fusegen.measuring.peers.ways
    monkeypatch.setattr(
        "fusegen.measuring.peers.ways",
        lambda *a: {name: lambda make=make: slowly(make()) for name, make in original(*a).items()},
    )
    report = bench(kernel_for(graph), peers={"hand": by_hand, "QuACK": missing}, alone=False, counters=False, repeats=2)
    assert [e.name for e in report.entries] == [
        "fusegen", "torch eager", "torch.compile", "torch.compile max-autotune", "hand", "QuACK",
    ]  # fmt: skip
    assert entry(report, "torch eager").us == pytest.approx(50.0)
    assert entry(report, "hand").us == pytest.approx(100.0)
    assert entry(report, "QuACK").refused == "ImportError: No module named 'quack'"
    assert set(seen) == {((512, 1024), "torch.bfloat16", (1024,))}
    assert (calls[0].shape, str(calls[0].dtype)) == ((512, 1024), "torch.bfloat16")
    assert float(calls[0].float().std()) > 0.1  # the operands' own memory, not zeros


@pytest.mark.skipif(not have_torch(), reason="torch is missing")
@needs_compiler
def test_a_peer_that_does_nothing_is_refused(gpu: PretendGpu) -> None:
    kernel = kernel_for(SPECS["bias_relu"].graph.at(M=64, N=512))
    report = bench(kernel, peers={"lazy": lambda *operands: lambda: None}, alone=False, counters=False, repeats=2)
    assert "not all of the work done" in entry(report, "lazy").refused


def test_what_an_error_says_in_a_line() -> None:
    assert gist("") == ""
    assert gist("no memory\nmore") == "no memory"
    assert gist("backend='x' raised:\n\nImportError: no y\n\nSet Z") == "backend='x' raised: ImportError: no y"


def test_a_file_of_peers(tmp_path: Path) -> None:
    file = tmp_path / "peers.py"
    with pytest.raises(RequestError, match="no file of peers"):
        load_peers(file)
    file.write_text("import nonsense_that_is_not_there\n")
    with pytest.raises(RequestError, match="does not run: ModuleNotFoundError"):
        load_peers(file)
    file.write_text("PEERS = 3\n")
    with pytest.raises(RequestError, match="has no PEERS"):
        load_peers(file)
    file.write_text("PEERS = {'rmsnorm': {'mine': lambda x, gain: lambda: None}}\n")
    assert list(load_peers(file)["rmsnorm"]) == ["mine"]


# ---------------------------------------------------------------- counters


@pytest.fixture
def ncu(tmp_path: Path) -> Path:
    file = tmp_path / "bin" / "ncu"
    file.parent.mkdir()
    file.write_text(NCU.format(python=sys.executable))
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


@needs_compiler
def test_counters_are_read_by_ncu(gpu: PretendGpu, ncu: Path) -> None:
    kernel = kernel_for(SPECS["bias_relu"].graph.at(M=64, N=512).with_dtype(fusegen.bf16))
    found = count_bytes(kernel)
    assert found.reason == ""
    assert (found.read, found.written) == (66560, 60000)
    assert (found.predicted_read, found.predicted_written) == (64 * 512 * 2 + 1024, 64 * 512 * 2)
    assert "(100.0%)" in str(found)
    assert "(91.6%)" in str(found)


@needs_compiler
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no'\nexit 1\n", "may not read the GPU's counters"),
        ("#!/bin/sh\necho '==ERROR== LibraryNotLoaded'\nexit 1\n", "ncu gave no figures: ERROR== LibraryNotLoaded"),
        ("#!/bin/sh\n", "it named no reason"),
        ("#!/nowhere/at/all\n", "did not run to its end"),
    ],
)
def test_counters_that_can_not_be_read_say_why(gpu: PretendGpu, ncu: Path, script: str, said: str) -> None:
    ncu.write_text(script)
    found = count_bytes(kernel_for(SPECS["bias_relu"].graph.at(M=64, N=512)))
    assert (found.read, found.written) == (None, None)
    assert said in found.reason
    assert said in str(found)


@needs_compiler
def test_counters_of_a_chain_that_no_file_has(gpu: PretendGpu, ncu: Path) -> None:
    inner = replace(largest.graph, where=fusegen.errors.Where("<stdin>", 1))
    assert "no spec has this chain" in count_bytes(kernel_for(inner)).reason
    ncu.unlink()
    assert "there is no ncu" in count_bytes(kernel_for(inner)).reason


def test_a_metric_without_a_value_is_none() -> None:
    head = '"ID","Metric Name","Metric Unit","Metric Value"\n'
    assert read_csv(head + f'"0","{READ}","byte","n/a"\n"0","{WRITTEN}","byte","7"\n') == {WRITTEN: 7}
    assert read_csv("nothing\n") == {}


# ---------------------------------------------------------------- the picture


@needs_compiler
@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_roofline_is_drawn(gpu: PretendGpu, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'fusegen[plot]'")
    kernel = kernel_for(SPECS["bias_gelu_residual_ln"].graph.at(M=64, N=1024))
    report = bench(kernel, peers=False, counters=False, repeats=2)
    file = tmp_path / f"roof{suffix}"
    plotting.roofline([report], file)
    if suffix == ".png":
        assert file.read_bytes().startswith(b"\x89PNG")
        return
    text = file.read_text()
    for said in ("bias_gelu_residual_ln on Pretend", "copy, measured: 4.00 TB/s", f"fusegen: {report.own.us:.0f} us"):
        assert said in text
    assert text.count("unfused, one after another") == 1


@needs_compiler
def test_a_picture_of_nothing(gpu: PretendGpu, tmp_path: Path) -> None:
    report = bench(kernel_for(SPECS["copy"].graph.at(n=2**16)), peers=False, counters=False, repeats=1)
    with pytest.raises(RequestError, match="no point to draw"):
        plotting.roofline([report], tmp_path / "copy.svg")
    with pytest.raises(RequestError, match="is no picture"):
        plotting.roofline([report], tmp_path / "copy.txt")
    with pytest.raises(RequestError, match="there is no folder"):
        plotting.roofline([report], tmp_path / "nowhere" / "copy.svg")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingError, match=r"pip install 'fusegen\[plot\]'"):
        plotting.pyplot()


# ---------------------------------------------------------------- the verb


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


SMALL = ("--set", "M=128", "--set", "N=512", "-t", "cuda:h200", "--no-peers")


@needs_compiler
def test_the_verb_shows_a_table(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    result = run("specs/bias_relu.py", *SMALL)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "bias_relu  f16[M, N], f16[N] -> f16[M, N]  M=128 N=512"
    assert lines[2].startswith("floor 0.1 us: 0.3 MB at 4000 GB/s")
    assert [line.split("  ")[0] for line in lines[5:8]] == [
        "fusegen", "unfused, one after another", "unfused, each with a cold L2",
    ]  # fmt: skip
    assert lines[8].startswith("  add ")
    assert "there is no ncu" in result.stdout


@needs_compiler
def test_the_verb_on_a_program(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sizes = ("--set", "M=24", "--set", "N=96", "--set", "K=64")
    request = ("tests/chains_cut.py:residual_norm", *sizes, "-t", "cuda:h200", "--no-peers", "--no-unfused")
    result = run(*request)
    assert result.exit_code == 0, result.output
    names = ["residual_norm_matmul", "between residual_norm_matmul and residual_norm_rmsnorm", "residual_norm_rmsnorm"]
    rows = [line.strip().split("  ")[0] for line in result.stdout.splitlines()]
    assert rows[1].endswith("a program of 2 kernels with 0.0 MB between them")
    assert rows[rows.index("fusegen") + 1 :][:3] == names
    (facts,) = json.loads(run(*request, "--json").stdout)["benches"]
    assert [(e["name"], e["kind"]) for e in facts["entries"]] == list(
        zip(["fusegen", *names], ["fusegen", "kernel", "between", "kernel"], strict=True)
    )
    assert facts["entries"][0]["share"] == facts["floor_us"] / facts["entries"][0]["us"]


@needs_compiler
def test_the_verb_as_json(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(ROOT)
    picture = tmp_path / "roof.svg"
    result = run("specs/bias_relu.py", "specs/rmsnorm.py", *SMALL, "--json", "--plot", str(picture), "--repeats", "3")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [b["chain"] for b in document["benches"]] == ["bias_relu", "rmsnorm"]
    first = document["benches"][0]["entries"][0]
    assert first["repeats"] == 3
    assert first["low_us"] <= first["us"] <= first["high_us"]
    assert "rmsnorm" in picture.read_text()


def test_the_verb_without_a_gpu() -> None:
    if any(target_of(g) for g in present().gpus):
        pytest.skip("there is a GPU here")
    result = run(str(ROOT / "specs/copy.py"), "-t", "cuda:h200", "--json")
    assert result.exit_code == MissingError.exit_code
    assert "bench needs a GPU" in json.loads(result.stdout)["error"]["message"]
    result = run(str(ROOT / "specs/copy.py"), "--on", "emulator", "-t", "cuda:h200")
    assert result.exit_code == RequestError.exit_code
    assert "gives no times" in result.stderr


# ---------------------------------------------------------------- a real one


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    here = [found for g in present().gpus if (found := target_of(g))]
    if not here:
        pytest.skip("no GPU that a target fits: `fusegen doctor` says why")
    report = bench(fusegen.compile(SPECS["bias_gelu_residual_ln"], here[0], on="gpu"), repeats=10)
    assert report.own.share is not None
    assert 0.3 < report.own.share <= 1.03
    unfused = entry(report, "unfused, one after another").us
    assert unfused is not None
    assert report.own.us is not None
    assert unfused > 1.5 * report.own.us
