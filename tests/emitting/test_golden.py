"""Golden sources: generated/ holds what is emitted now, its references run alone, and it is what compile hands out.

`pytest --update-golden` rewrites generated/ instead of comparing.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fusegen.cli.programs import units
from fusegen.emitting import golden
from fusegen.errors import Drift, MissingError, RequestError
from fusegen.language.spec import Chain, load_chains
from fusegen.language.types import size_of
from fusegen.pipeline import Built, BuiltJoined, build, build_joined
from fusegen.planner.products.factors import lacking
from fusegen.planner.programs.side_by_side import JoinedPlan
from fusegen.targets import B200, GOLDEN_SPECS, H200, KEPT_TARGETS, L40S, MI300X, Target
from tests.specs import SHIPPED

ROOT = Path(__file__).resolve().parents[2]
CHAINS = tuple(SHIPPED.values())  # whose graphs remember their programs for all tests
PAIRS = [
    (chain, gpu)
    for gpu in KEPT_TARGETS
    for chain in CHAINS
    if golden.is_kept(chain, gpu) and not lacking(chain.graph, gpu)
]
each_pair = pytest.mark.parametrize(("chain", "gpu"), PAIRS, ids=lambda each: getattr(each, "name", str(each)))
SMALL = """
from fusegen import chain, dims, f32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=4, N=64)
def {name}(x: f32[M, N]) -> f32[M, N]:
    \"\"\"x + {number}.\"\"\"
    return x + {number}.0
"""


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """A folder of two specs."""
    folder = tmp_path / "specs"
    folder.mkdir()
    for number, name in enumerate(("one", "two"), 1):
        (folder / f"{name}.py").write_text(SMALL.format(name=name, number=number))
    return folder


# ---------------------------------------------------------------- the project's own


def of_chain(chain: Chain, gpu: Target) -> set[Path]:
    """The committed files that a chain's name says are its own."""
    folder = ROOT / "generated" / gpu.folder
    alone = (folder / f"{chain.name}{gpu.spelling.file_suffix}", folder / f"{chain.name}_reference.py")
    found = (*filter(Path.exists, alone), *(folder / chain.name).glob("*"))
    return {path.relative_to(ROOT / "generated") for path in found}


@pytest.mark.always
@each_pair
def test_committed_sources_are_what_is_emitted(chain: Chain, gpu: Target, request: pytest.FixtureRequest) -> None:
    files = golden.emitted(chain, gpu)
    if request.config.getoption("--update-golden"):
        golden.write(files, ROOT / "generated")
    if differences := golden.compare(files, ROOT / "generated"):
        diff = "\n".join(d.diff for d in differences)
        pytest.fail(
            f"{diff}\n`make golden` or `pytest --update-golden` writes them anew; review the diff", pytrace=False
        )
    assert request.config.getoption("--update-golden") or of_chain(chain, gpu) == {file.path for file in files}


@each_pair
def test_committed_sources_pass_the_gate(chain: Chain, gpu: Target) -> None:
    """The kernels that an untuned `compile` hands out are the golden ones: a planner's first choice neither spills nor
    has a stack frame."""
    for found, file in zip(units(chain, gpu), golden.emitted(chain, gpu), strict=False):
        try:
            built: Built | BuiltJoined = (
                build_joined(found) if isinstance(found, JoinedPlan)
                else build(found.graph.written, gpu, found.plans[0].layout, tuned=False, known=found)
            )  # fmt: skip
        except MissingError as missing:
            pytest.skip(str(missing).splitlines()[0])
        assert built.source.text == file.text, "\n".join(v.reason for v in built.verdicts)
        assert isinstance(built, Built) or built.verdicts[0].passed


def test_no_committed_source_is_of_no_chain(request: pytest.FixtureRequest) -> None:
    """Of those of a chain, `test_committed_sources_are_what_is_emitted` says which there are."""
    if request.config.getoption("--update-golden"):
        golden.update(ROOT / "specs", ROOT / "generated")
    for gpu in KEPT_TARGETS:
        folder = ROOT / "generated" / gpu.folder
        known = {path for chain, other in PAIRS if other is gpu for path in of_chain(chain, gpu)}
        there = {path.relative_to(ROOT / "generated") for path in folder.rglob("*") if path.is_file()}
        assert there == known, "no spec makes these"


ALONE = """
import json, sys

class Only:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fusegen":
            raise ImportError(f"a reference must stand alone, and imports {name}")

sys.meta_path.insert(0, Only())
import ml_dtypes
import numpy as np

for case in json.load(sys.stdin):
    module = {"__name__": case["name"]}
    exec(compile(open(case["file"]).read(), case["file"], "exec"), module)
    rng = np.random.default_rng(0)
    def draw(dtype, shape):
        values = rng.standard_normal(shape) if shape else 1.0
        if dtype in ("int32", "int64"):  # places, each of its own
            values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        return values > 0 if dtype == "bool" else np.asarray(values).astype(np.dtype(dtype))
    results = module[case["name"]](*(draw(*operand) for operand in case["operands"]))
    results = results if isinstance(results, tuple) else (results,)
    assert [list(r.shape) for r in results] == case["shapes"], case["name"]
    assert all(r.dtype in (np.float64, np.int32, np.int64) for r in results), case["name"]
print("done")
"""


def numbers_in(reference: Path, name: str) -> frozenset[str]:
    """The dims that no shape tells: the first line of a chain's reference gives all dims, and has these as numbers."""
    module = ast.parse(reference.read_text(encoding="utf-8"))
    (function,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name)
    first = next((node for node in function.body if isinstance(node, ast.Assign)), None)
    if first is None or not isinstance(first.targets[0], ast.Tuple) or not isinstance(first.value, ast.Tuple):
        return frozenset()
    dims = zip(first.targets[0].elts, first.value.elts, strict=True)
    return frozenset(d.id for d, size in dims if isinstance(d, ast.Name) and isinstance(size, ast.Constant))


def test_references_run_alone() -> None:
    """Each committed reference, in a process that can't import fusegen, on small arrays."""
    cases = []
    for chain in CHAINS:
        folder = ROOT / "generated" / H200.folder
        folder = folder / chain.name if (folder / chain.name).is_dir() else folder  # of a program
        # groups, blocks and halves
        whole = any(word in chain.name for word in ("block", "quant", "a16", "mxfp4", "deepseek"))
        most = 128 if whole else 4 if chain.graph.viewed else 5
        most = 576 if chain.name == "mla_decode" else most  # its values are 512 columns of the keys
        fixed = numbers_in(folder / f"{chain.name}_reference.py", chain.name)
        small = chain.at(**{n: min(size, most) for n, size in chain.graph.sizes.items() if n not in fixed}).graph

        def shape(sizes: Sequence[object], of: dict[str, int] = dict(small.sizes)) -> list[int]:  # noqa: B006
            return [size_of(size, of) for size in sizes]  # type: ignore[arg-type]

        cases.append(
            {
                "file": str(folder / f"{chain.name}_reference.py"),
                "name": chain.name,
                "operands": [(t.dtype.numpy.name, shape(t.shape)) for t in small.inputs],
                "shapes": [shape(t.shape) for t in small.outputs],
            }
        )
    done = subprocess.run(
        [sys.executable, "-I", "-c", ALONE], input=json.dumps(cases), capture_output=True, text=True, cwd="/"
    )
    assert done.stdout == "done\n", done.stderr


# ---------------------------------------------------------------- writing and comparing


def test_update_then_check(specs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    changes = golden.update(specs, out, (H200, MI300X))
    names = {str(path.relative_to(out)) for path in changes.written}
    assert names == {
        f"{folder}/{name}" for folder, suffix in (("cuda-h200", ".cu"), ("hip-mi300x", ".hip"))
        for stem in ("one", "two") for name in (stem + suffix, f"{stem}_reference.py")
    }  # fmt: skip
    assert golden.check(specs, out, (H200, MI300X)) == ()
    again = golden.update(specs, out, (H200, MI300X))
    assert (len(again.written), len(again.unchanged)) == (0, 8)


def test_of_some_targets_few_specs_are_kept(specs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are named; others are files that no chain makes any more. One that is emitted by itself is there."""
    assert GOLDEN_SPECS[B200.name] <= {chain.name for chain in CHAINS}
    monkeypatch.setitem(GOLDEN_SPECS, B200.name, frozenset({"two"}))
    golden.update(specs, tmp_path, (H200, B200))
    assert {path.name for path in (tmp_path / B200.folder).iterdir()} == {"two.cu", "two_reference.py"}
    assert len(list((tmp_path / H200.folder).iterdir())) == 4
    one, *_ = load_chains(specs)
    golden.write(golden.emitted(one, B200), tmp_path)
    assert {d.path.name: d.kind for d in golden.check(specs, tmp_path, (H200, B200))} == {
        "one.cu": "stale", "one_reference.py": "stale",
    }  # fmt: skip
    assert len(list(golden.all_emitted(load_chains(specs), (B200,)))) == 2


def test_drift_is_found_and_named(specs: Path, tmp_path: Path) -> None:
    golden.update(specs, tmp_path, (H200,))
    folder = tmp_path / H200.folder
    (folder / "one.cu").write_text((folder / "one.cu").read_text() + "// mine\n")
    (folder / "two_reference.py").unlink()
    (specs / "one.py").rename(specs / "three.py")  # the file's name does not matter, the chain's does
    (specs / "two.py").write_text((specs / "two.py").read_text().replace("def two", "def four"))
    found = {str(d.path.relative_to(folder)): d.kind for d in golden.check(specs, tmp_path, (H200,))}
    assert found == {
        "one.cu": "changed", "four.cu": "missing", "four_reference.py": "missing", "two.cu": "stale",
    }  # fmt: skip
    changed = next(d for d in golden.check(specs, tmp_path, (H200,)) if d.kind == "changed")
    assert "-// mine" in changed.diff
    error = golden.drift([changed], tmp_path)
    assert isinstance(error, Drift)
    assert "one.cu: changed" in str(error)


def test_update_removes_only_what_fusegen_wrote(specs: Path, tmp_path: Path) -> None:
    golden.update(specs, tmp_path, (H200,))
    folder = tmp_path / H200.folder
    mine = {"notes.md": "mine", "mine.cu": "// mine\n", "one_test.py": "import one_reference\n"}
    for name, text in mine.items():
        (folder / name).write_text(text)
    joined = folder / "one_and_two.cu"  # of steps that have a launch each now
    joined.write_text("// one_and_two: 2 steps in one launch of 128 threads a block\n")
    (specs / "two.py").unlink()
    changes = golden.update(specs, tmp_path, (H200,))
    assert {path.name for path in changes.removed} == {"two.cu", "two_reference.py", joined.name}
    assert {path.name for path in folder.iterdir()} == {*mine, "one.cu", "one_reference.py"}


def test_other_targets_folders_are_left_alone(specs: Path, tmp_path: Path) -> None:
    golden.update(specs, tmp_path, (H200, L40S))
    (specs / "two.py").unlink()
    golden.update(specs, tmp_path, (H200,))
    assert (tmp_path / L40S.folder / "two.cu").exists()


def test_two_chains_of_one_name(specs: Path) -> None:
    (specs / "again.py").write_text((specs / "one.py").read_text())
    with pytest.raises(RequestError, match="two chains are called one"):
        list(golden.all_emitted(load_chains(specs), (H200,)))


def test_a_failed_write_leaves_the_old_file(specs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden.update(specs, tmp_path, (H200,))
    place = tmp_path / H200.folder / "one.cu"
    before = place.read_text()

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("fusegen.emitting.golden.os.replace", fail)
    with pytest.raises(OSError, match="full"):
        golden.write_whole(place, "half of it")
    assert place.read_text() == before
    assert not list(place.parent.glob(".*"))
