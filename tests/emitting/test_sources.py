"""Rendered sources on disk: what is remembered, what makes a plan another one, and what a damaged file does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fusegen import bf16, chain, dims
from fusegen import ops as F
from fusegen.compiling import Binary, Resources, compiler_version, versions
from fusegen.emitting import sources
from fusegen.emitting.rendering import render
from fusegen.emitting.sources import key_of, remembered, spelled
from fusegen.errors import MissingError
from fusegen.language.graph import Graph
from fusegen.planner import candidates
from fusegen.planner.model import Layout, Plan, RowPlan, Source
from fusegen.planner.spelled import SpelledKey as Key
from fusegen.planner.spelled import alone, stamps
from fusegen.runtime import cache
from fusegen.storage import Store, clear, survey
from fusegen.storage.entries import pack
from fusegen.targets import A100, H200, MI300X
from tests.specs import ALL, planned

ROOT = Path(__file__).resolve().parents[2]
CHAINS = list(ALL.values())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    return tmp_path / "sources"


def first(name: str = "bias_gelu_residual_ln") -> Plan:
    return next(candidates(c.graph, H200).need()[0] for c in CHAINS if c.graph.name == name)


def path_of(plan: Plan) -> Path:
    return Store("sources").path(key_of(plan))


def refused(plan: Plan) -> Source:
    raise AssertionError(f"{plan.name} is rendered again")


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.graph.name)
def test_what_is_remembered_is_what_was_rendered(chain: Any) -> None:
    for target in (H200, MI300X):
        if not planned(chain, target):
            continue
        plan = candidates(chain.graph, target).need()[0]
        made = remembered(plan, render)
        assert made == render(plan)
        again = candidates(chain.graph, target).need()[0]
        found = remembered(again, refused)
        assert (found.text, found.reference, found.filename) == (made.text, made.reference, made.filename)
        assert found.plan is again


@pytest.mark.by_values("chain", "lies")  # how tensors lie is spelled alike in every plan
@pytest.mark.parametrize("lies", ["whole", "split", "unaligned"])
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.graph.name)
def test_every_candidate_has_a_spelling_of_its_own(chain: Any, lies: str) -> None:
    unaligned = frozenset({chain.graph.inputs[0].name} if lies == "unaligned" else ())
    layout = Layout(lies == "split", unaligned)
    plans = [*candidates(chain.graph, H200, layout).plans, *candidates(chain.graph, A100, layout).plans]
    first: dict[str, Plan] = {}
    for plan in plans:
        like = first.setdefault(spelled(plan), plan)
        assert like is plan or render(like).text == render(plan).text, plan.configuration


def renamed(graph: Graph) -> Graph:
    node = next(iter(graph.names))
    return replace(graph, names={**graph.names, node: "something_else"})


def reworded(graph: Graph) -> Graph:
    """The same graph after an op's numpy text was corrected."""
    output = graph.outputs[0]
    node = replace(output.node, op=replace(output.node.op, ref="{0} + 0 * {1}"))
    return replace(graph, outputs=(replace(output, node=node),))


CHANGES: dict[str, Callable[[RowPlan], RowPlan]] = {
    "another size": lambda plan: replace(plan, graph=plan.graph.at(M=7)),
    "another name": lambda plan: replace(plan, graph=renamed(plan.graph)),
    "another meaning of an op": lambda plan: replace(plan, graph=reworded(plan.graph)),
    "another document": lambda plan: replace(plan, graph=replace(plan.graph, doc="other words")),
    "another body": lambda plan: replace(plan, graph=replace(plan.graph, body="def other(x):\n    return x")),
    "another rate": lambda plan: replace(plan, target=replace(plan.target, dram_gbs=1.0)),
    "another barrier": lambda plan: replace(
        plan, target=replace(plan.target, spelling=replace(plan.target.spelling, barrier="__barrier();"))
    ),
    "another grid": lambda plan: replace(plan, tile=replace(plan.tile, threads=plan.tile.threads * 2)),
    "another statement": lambda plan: replace(plan, launch_body=(*plan.launch_body, *plan.passes[0].body[:1])),
    "another layout": lambda plan: replace(plan, layout=Layout(unaligned=frozenset({"x"}))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_plan_is_another_file(name: str) -> None:
    plan = first()
    assert isinstance(plan, RowPlan)
    assert path_of(CHANGES[name](plan)) != path_of(plan)
    assert path_of(first()) == path_of(plan)


def test_what_has_a_name_and_is_needed_no_more_has_a_spelling() -> None:
    """A product makes the cast of its factor itself; before it did, the cast had been given a name."""
    S, T, D = dims("S T D")

    @chain(S=70, T=130, D=32)
    def attention(q: bf16[S, D], k: bf16[T, D], v: bf16[T, D]) -> bf16[S, D]:
        weights = F.cast(F.softmax(q @ k.T * D**-0.5), bf16)
        return weights @ v

    (plan,) = candidates(attention.graph, H200).plans[:1]
    assert key_of(plan) == key_of(candidates(attention.graph, H200).plans[0])


def test_other_code_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = first()
    before = path_of(plan)
    monkeypatch.setattr(sources, "code_stamp", lambda: "other")
    assert path_of(plan) != before


def test_a_changed_template_is_other_code(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    template = tmp_path / "below" / "a.j2"
    template.write_text("one")
    before = list(stamps(str(tmp_path)))
    assert list(stamps(str(tmp_path))) == before
    template.write_text("another")
    assert list(stamps(str(tmp_path))) != before
    template.write_text("two")
    os.utime(template, ns=(1, 1))
    assert list(stamps(str(tmp_path))) != before


def test_spellings_do_not_depend_on_the_process() -> None:
    """Orders of sets change from one process to the next."""
    code = (
        "from fusegen.emitting import sources\nfrom fusegen.planner import candidates\n"
        "from fusegen.planner.model import Layout\n"
        "from fusegen.language.spec import load_chains\nfrom fusegen.targets import H200\n"
        "chain, = load_chains('specs/bias_gelu_residual_ln.py')\n"
        "layout = Layout(True, frozenset({'x', 'bias', 'residual', 'gamma'}))\n"
        "print(sources.key_of(candidates(chain.graph, H200, layout).need()[0]).digest)"
    )
    names = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        names.add(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True).stdout)
    assert len(names) == 1


DAMAGE: dict[str, Callable[[Key, bytes], bytes]] = {
    "cut short": lambda key, data: data[:-7],
    "altered": lambda key, data: data.replace(b"__global__", b"__gl0bal__", 1),
    "no text": lambda key, data: pack(key, {"text": 1, "reference": "", "filename": ""}, b""),
    "no facts": lambda key, data: pack(key, {}, b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_replaced(damage: str) -> None:
    plan = first()
    wanted = remembered(plan, render)
    path = path_of(plan)
    path.write_bytes(DAMAGE[damage](key_of(plan), path.read_bytes()))
    assert remembered(plan, lambda _: replace(wanted, text="anew")).text == "anew"
    assert remembered(plan, refused).text == "anew"


def test_a_folder_that_can_not_be_written_is_no_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "file" / "below"))
    plan = first()
    assert remembered(plan, render) == render(plan)


def test_sources_count_as_part_of_the_cache(tmp_path: Path) -> None:
    remembered(first(), render)
    assert survey(tmp_path)["sources"].entries == 1
    assert clear(tmp_path, ["sources"]).removed["sources"].entries == 1
    assert not path_of(first()).exists()


@dataclass(frozen=True)
class Piece:
    """What a plan may come to hold one day."""

    name: str = "loads"
    stages: int = 1
    split: bool = False
    names: frozenset[str] = frozenset()
    parts: tuple[object, ...] = ()


def spelling(value: object) -> str:
    return alone(value, {})


def test_any_frozen_dataclass_of_plain_values_has_a_spelling() -> None:
    pieces = [
        Piece(),
        Piece("stores"),
        Piece(stages=2),
        Piece(split=True),
        Piece(stages=True),
        Piece(names=frozenset("ab")),
        Piece(parts=(Piece(), None, 1.5)),
        Piece(parts=(Piece(), (None, 1.5))),
        Piece("loads' int 1"),
        *(Piece(f"{first} {second}") for first in "ab" for second in "ab"),
    ]
    assert len(set(map(spelling, pieces))) == len(pieces)
    assert spelling(Piece(names=frozenset("abc"))) == spelling(Piece(names=frozenset("cba")))
    for strange in (object(), Piece, [1], Piece(parts=({1},))):
        with pytest.raises(TypeError, match="which has no spelling"):
            spelling(strange)


def test_what_has_no_spelling_is_rendered(folder: Path) -> None:
    plan = replace(first(), regime=object())  # type: ignore[arg-type]
    source = render(first())
    assert remembered(plan, lambda _: source) is source
    assert not folder.exists()


# ---------------------------------------------------------------- the compiler's version


@pytest.fixture
def nvrtc_unknown() -> Iterator[None]:
    """This process has not asked NVRTC for its version."""
    from fusegen.compiling import nvrtc

    nvrtc.version.cache_clear()
    yield
    nvrtc.version.cache_clear()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that is taken for NVRTC's library, which is version 13.5."""
    from fusegen.compiling import nvrtc

    pathfinder = pytest.importorskip("cuda.pathfinder")
    file = tmp_path / "libnvrtc.so"
    file.write_text("one")
    loaded = type("Loaded", (), {"abs_path": str(file)})
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda name: loaded)
    fake = type("Bindings", (), {"nvrtcVersion": staticmethod(lambda: (0, 13, 5))})
    monkeypatch.setattr(nvrtc, "bindings", lambda: fake)
    return file


def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusegen.compiling import nvrtc

    nvrtc.version.cache_clear()
    monkeypatch.setattr(nvrtc, "bindings", lambda: pytest.fail("NVRTC is loaded"))


@pytest.mark.usefixtures("nvrtc_unknown", "library")
def test_the_compilers_version_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert versions.known_version("cuda") == "nvrtc 13.5"
    unasked(monkeypatch)
    assert versions.known_version("cuda") == "nvrtc 13.5"
    assert survey(tmp_path)["compilers"].entries == 1


def test_the_version_is_that_of_the_compiler() -> None:
    try:
        version = compiler_version("cuda")
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])
    assert versions.known_version("cuda") == version


@pytest.mark.usefixtures("nvrtc_unknown")
@pytest.mark.parametrize("change", ["another file", "no file", "no version", "a version of something else", "no name"])
def test_a_note_that_no_longer_holds(change: str, library: Path) -> None:
    store, key = Store("compilers"), versions.key_here()
    facts = {"version": "nvrtc 12.9", "library": str(library), "stamp": versions.stamp_of(str(library))}
    store.store(key, facts, b"")
    assert store.load(key, versions.read) == "nvrtc 12.9"
    if change == "another file":
        library.write_text("another one")
    elif change == "no file":
        store.store(key, {**facts, "library": f"{library}.1"}, b"")
    elif change == "no name":
        store.store(key, {**facts, "library": "\0"}, b"")
    else:
        store.store(key, {**facts, "version": None if change == "no version" else "gcc 13.5"}, b"")
    assert store.load(key, versions.read) is None
    assert versions.known_version("cuda") == "nvrtc 13.5"
    assert store.load(key, versions.read) == "nvrtc 13.5"


@pytest.mark.usefixtures("nvrtc_unknown")
def test_without_a_library_nothing_is_noted(library: Path, tmp_path: Path) -> None:
    library.unlink()
    assert versions.known_version("cuda") == "nvrtc 13.5"
    assert survey(tmp_path)["compilers"].entries == 0


def test_notes_are_of_one_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = versions.key_here()
    assert versions.key_here() == before
    with monkeypatch.context() as changed:
        changed.setenv("CUDA_HOME", "/elsewhere")
        assert versions.key_here() != before
    (tmp_path / "nvidia").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert versions.key_here() != before


@pytest.mark.usefixtures("nvrtc_unknown")
def test_a_note_that_compiling_finds_wrong(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    """The next process finds the binary that this one made, and under the compiler that made it."""
    facts = {"version": "nvrtc 12.9", "library": str(library), "stamp": versions.stamp_of(str(library))}
    Store("compilers").store(versions.key_here(), facts, b"")
    source = render(first())
    resources = Resources(0, 0, 0, 0, 0, 0, 0, 0)

    def compiling(*_: object, **__: object) -> Binary:
        return Binary(H200, source.plan.name, 32, b"code", "", compiler_version("cuda"), 0.0, resources)

    monkeypatch.setattr(cache, "compile_source", compiling)
    assert cache.key_of(source).compiler == "nvrtc 12.9"
    assert cache.compiled(source).code == b"code"
    unasked(monkeypatch)
    monkeypatch.setattr(cache, "compile_source", lambda *_, **__: pytest.fail("compiled again"))
    assert cache.key_of(source).compiler == "nvrtc 13.5"
    assert cache.compiled(source).code == b"code"
