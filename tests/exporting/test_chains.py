"""Exports of chains of every kind: their recorded launch, through the launcher in C, in the emulator."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from fusegen import exporting
from fusegen.errors import RequestError
from fusegen.exporting import making
from fusegen.exporting.collecting import exported
from fusegen.exporting.recording import recorded
from fusegen.language.spec import Chain
from fusegen.pipeline import compile
from fusegen.runtime import Program
from fusegen.targets import target
from tests.exports import build, call_recorded, run, run_test
from tests.specs import FEW, SHIPPED

CUDA: dict[str, dict[str, int]] = {  # what each is here for
    "copy": {},  # no rows
    "column_sum": {},  # a program of two kernels, reduced dimensions
    "decode_attention": FEW["decode_attention"],  # tensor maps, parts between kernels, dependent launches
    "dropout_residual_layernorm": {},  # run-time scalars
    "gate_up_silu_mul": {},  # computed sizes
    "gemm_bias_gelu": {"N": 256, "K": 256},
    "grouped_fp8_block_gemm": FEW["grouped_fp8_block_gemm"],  # scales of each group
    "grouped_swiglu": {"N": 64, "K": 64, "E": 3},  # tiles that groups begin
    "kv_cache_write": {},  # new rows of operands
    "moe_routing": FEW["moe_routing"],  # steps that a cluster takes one after another
    "paged_attention": FEW["paged_attention"],  # tensor maps of pages, whose number is the size of an axis
    "rope_qk": {},  # views, several steps in one launch
    "topk": {},  # chosen columns
    "w4a16_gemm": {"N": 256, "K": 256},  # bytes that hold two codes
}
HIP: dict[str, dict[str, int]] = {"rmsnorm": {}, "gemm_bias_gelu": {"N": 256, "K": 256}, "mlp": {"K": 64, "H": 128}}


def at(name: str, sizes: dict[str, int]) -> Chain:
    chain = SHIPPED[name]
    return chain.at(**{dim: size for dim, size in sizes.items() if dim in chain.graph.sizes})


@pytest.mark.parametrize("name", CUDA)
def test_a_recorded_launch(name: str, tmp_path: Path) -> None:
    made = compile(at(name, CUDA[name]), "cuda:h200", on="emulator", validate=False)
    record = recorded(exported([made], False), [made])
    assert record.bounded > 0.9
    library = build(made, tmp_path, every_layout=False)
    assert call_recorded(library, record) == ""
    assert library.launched


@pytest.mark.parametrize("name", HIP)
def test_on_amd(name: str, tmp_path: Path) -> None:
    made = compile(at(name, HIP[name]), "hip:mi300x", on="emulator", validate=False)
    library = build(made, tmp_path, every_layout=False)
    record = recorded(exported([made], False), [made])
    assert call_recorded(library, record) == ""
    assert library.launched


def test_the_exports_own_test(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = compile(at("mlp", {"K": 64, "H": 128}), "cuda:h200", on="emulator", validate=False)
    record = recorded(exported([made], False), [made])
    library = build(made, tmp_path, every_layout=False, records={"mlp": record})
    status, said = run_test(library, tmp_path, capfd)
    assert (status, len(library.launched)) == (0, 2), said
    assert f"mlp: out is right: {7 * 64} of {7 * 64} elements have a bound" in said
    expected = tmp_path / "export" / "test" / "data" / "mlp" / "out_expected.npy"
    data = bytearray(expected.read_bytes())
    data[-1] ^= 0x40  # the exponent of the last number
    expected.write_bytes(data)
    status, said = run_test(library, tmp_path, capfd)
    assert status == 1
    assert "mlp: out is wrong in 1 of 448 elements; element 447 is" in said


def test_an_export_of_two_vendors(tmp_path: Path) -> None:
    targets = [target("cuda:sm_80"), target("cuda:h200"), target("hip:mi300x")]
    chains = [at("rmsnorm", {"N": 64}), at("mlp", {"K": 64, "H": 128})]
    folder = tmp_path / "norms"
    said: list[str] = []
    made = exporting.export(chains, targets, folder, step=said.append)
    assert "rmsnorm for cuda:h200" in said
    assert (folder / "kernels" / "rmsnorm.fatbin").read_bytes()[:4] == bytes.fromhex("50ed55ba")  # of every fatbin
    assert (folder / "kernels" / "rmsnorm.gfx942.co").read_bytes()[:4] == b"\x7fELF"
    facts = json.loads((folder / "manifest.json").read_text())
    assert {t["arch"] for t in facts["chains"][0]["targets"]} == {"sm_80", "sm_90a", "gfx942"}
    assert set(facts["sha256"]) | {"manifest.json"} == set(made.files)
    source = (folder / "src" / "mlp.c").read_text()
    assert " *     h = F.silu(x @ gate.T) * (x @ up.T)\n *     return h @ down.T\n */\n" in source
    run("make", "-s", "-C", folder, "CFLAGS=-O1 -Wall -Wextra -Werror")
    run("make", "-s", "-C", folder, "VENDOR=hip", "CFLAGS=-O1 -Wall -Wextra -Werror")
    symbols = run("nm", "-D", "--defined-only", folder / "build" / "cuda" / "libnorms.so").split()
    assert set(symbols[2::3]) == {"fusegen_message", "rmsnorm", "mlp", "mlp_workspace"}
    run("cc", "-std=c11", "-Werror", "-fsyntax-only", "-xc", folder / "include" / "norms.h")
    run("c++", "-Werror", "-fsyntax-only", "-xc++", folder / "include" / "norms.h")
    run("cc", "-std=c11", "-Wall", "-Werror", "-fsyntax-only", f"-I{folder}/include", written_in_docs(tmp_path))
    if shutil.which("cmake"):
        run("cmake", "-S", folder, "-B", tmp_path / "cmake")
        run("cmake", "--build", tmp_path / "cmake")


def written_in_docs(folder: Path) -> Path:
    """The call in docs/export.md as a function."""
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```c\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    include, body = block.split("\n", 1)
    names = "int64_t rows, void *x_on_gpu, void *gain_on_gpu, void *out_on_gpu, void *stream"
    path = folder / "call.c"
    path.write_text(f"#include <stdio.h>\n{include}\nvoid call({names}) {{\n{body}}}\n", encoding="utf-8")
    return path


def test_the_same_export_twice(tmp_path: Path) -> None:
    """To the byte, but for how the compiler was called."""
    chain = at("rmsnorm", {"N": 64})
    first, second = (
        exporting.export([chain], [target("cuda:h200")], tmp_path / "one" / "norm", validate=False) for _ in range(2)
    )
    assert first.files == second.files
    assert sorted(tmp_path.rglob(".norm*")) == []


def test_refusals(tmp_path: Path) -> None:
    chain = at("rmsnorm", {"N": 64})
    h200 = target("cuda:h200")
    with pytest.raises(RequestError, match="two chains called rmsnorm"):
        exporting.export([chain, chain], [h200], tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    with pytest.raises(RequestError, match="is there and no export"):
        exporting.export([chain], [h200], tmp_path / "mine")
    with pytest.raises(RequestError, match="'double' is no name"):
        exporting.export([chain], [h200], tmp_path / "out", library="double", validate=False, test=False)
    assert making.word_of(Path("3-fast kernels")) == "kernels_3_fast_kernels"


def test_rows_that_are_shared_out_to_clusters(tmp_path: Path) -> None:
    """The last of which goes on alone: they are counted in the workspace."""
    made = compile(at("moe_routing", {"T": 300, "D": 1024}), "cuda:h200", on="emulator", validate=False)
    assert isinstance(made, Program)
    assert made.plan.counters
    library = build(made, tmp_path, every_layout=False)
    record = recorded(exported([made], False), [made])
    for _ in range(2):
        assert call_recorded(library, record) == ""
        assert library.launched == ["sm_90a moe_routing"]


def test_what_steps_hand_on_is_no_output_over_an_operand(tmp_path: Path) -> None:
    """One launch does them: each had its own."""
    made = compile(at("moe_routing", FEW["moe_routing"]), "cuda:h200", on="emulator", validate=False)
    library = build(made, tmp_path, every_layout=False)
    assert call_recorded(library, recorded(exported([made], False), [made])) == ""
    assert library.launched == ["sm_90a moe_routing"]
