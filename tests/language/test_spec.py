"""A wrong spec gives one sentence with file:line; a right one gives the graph its author meant."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusegen import b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.errors import RequestError, SpecError
from fusegen.language.advice import advice
from fusegen.language.graph import Extent, Graph, Kind
from fusegen.language.reference import reference
from fusegen.language.spec import load_chains
from fusegen.language.trace import Value
from fusegen.language.types import DTYPES, DType
from tests.tools import untyped

M, N, K = dims("M N K")
ANY: Any = None


def build(function: Callable[..., Any], **sizes: int) -> Graph:
    return chain(**(sizes or {"M": 8, "N": 16}))(function).graph


def wrong(function: Callable[..., Any], **sizes: int) -> str:
    with pytest.raises(SpecError) as caught:
        build(function, **sizes)
    message = str(caught.value)
    assert Path(__file__).name in message.split(":")[0], message
    assert message.split(":")[1].isdigit(), message
    return message


def test_names_come_from_the_spec() -> None:
    def spec(x: f16[M, N], y: f16[M, N]) -> f16[M, N]:
        mixed = x + y
        return F.softmax(mixed)

    names = set(build(spec).names.values())
    assert {"x", "y", "mixed", "top", "e", "sum_of_exps", "softmax"} <= names


def test_an_unnamed_result_has_the_name_of_what_the_spec_calls() -> None:
    """Not of what that calls in turn: a variance is no mean."""

    def spec(x: f16[M, N]) -> tuple[f16[M, N], f16[M, 1], f16[M, N]]:
        return F.clip(x, 0.0, 1.0), F.var(x), F.softmax(x)

    assert [t.name for t in build(spec).outputs] == ["clip", "var", "softmax"]


def test_names_survive_a_profiler() -> None:
    import sys

    calls: list[str] = []

    def profiler(frame: Any, event: str, argument: object) -> None:
        calls.append(event)

    def spec(x: f16[M, N]) -> f16[M, N]:
        h = x * 2
        return h + 1

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        graph = build(spec)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before)
    assert "h" in graph.names.values()


def test_specs_trace_under_cprofile() -> None:
    import cProfile

    def spec(x: f16[M, N]) -> f16[M, N]:
        h = x * 2
        return h + 1

    profile = cProfile.Profile()
    profile.enable()
    try:
        graph = build(spec)
    finally:
        profile.disable()
    assert "h" in graph.names.values()


def test_unknown_op_suggests_the_near_one() -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return untyped(F).softmaxx(x)

    assert "did you mean F.softmax?" in wrong(spec)


def test_the_module_of_ops_can_be_searched() -> None:
    """pickle, and so torch.compile, asks every module for names of its own; none of them may get another error."""
    assert not hasattr(F, "torch")
    assert getattr(F, "float16", None) is None


def test_shape_mismatch_names_both_sizes() -> None:
    def spec(x: f16[M, N], y: f16[M, K]) -> f16[M, N]:
        return x + y

    message = wrong(spec, M=2, N=3, K=4)
    assert "[M, N] and [M, K]" in message
    assert "N and K differ" in message


def test_unused_input() -> None:
    def spec(x: f16[M, N], y: f16[M, N]) -> f16[M, N]:
        return x * 2

    assert "operand 'y' is not used" in wrong(spec)


def test_output_without_a_path_from_an_input() -> None:
    def spec(x: f16[M, N]) -> tuple[f16[M, N], f32[N]]:
        return x, F.cast(F.col_index(x), f32)

    assert "does not depend on any operand" in wrong(spec)


def test_output_that_is_no_value() -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return 3.0

    assert "not a value computed from the operands" in wrong(spec)


def test_several_outputs_as_a_tuple_of_types() -> None:
    def spec(x: f16[M, 2 * N]) -> f16[M, 2 * N]:
        return x, F.sum(x)

    for outputs in ((f16[M, 2 * N], f32[M, 1]), [f16[M, 2 * N], f32[M, 1]]):
        spec.__annotations__["return"] = outputs
        assert "write -> tuple[f16[M, 2 * N], f32[M, 1]]" in wrong(spec)


def test_unsupported_dtype() -> None:
    def spec(x: float) -> f16[M, N]:
        return x

    assert "unsupported type float" in wrong(spec)


@pytest.mark.parametrize("reduce", [F.sum, F.max, F.min, F.mean, F.var, F.softmax, F.log_softmax])
def test_reduction_over_a_wrong_axis(reduce: Callable[..., Value]) -> None:
    def spec(x: f16[M, N]) -> f16[M, 1]:
        return reduce(x, axis=2)

    assert "axis=2 is no axis of [M, N], which has 2" in wrong(spec)


def test_max_of_two_points_to_maximum() -> None:
    def spec(x: f16[M, N], y: f16[M, N]) -> f16[M, N]:
        return F.max(x, y)

    assert "F.maximum(x, y)" in wrong(spec)


@pytest.mark.parametrize("exponent", ["2", None, True, float("nan"), [1]])
def test_non_float_exponent(exponent: Any) -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return x**exponent

    assert "the exponent of ** must be a finite number or a traced value" in wrong(spec)


def test_python_branch_does_not_pick_a_side() -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return x if x > 0 else -x

    assert "a Python branch on a traced value" in wrong(spec)


def test_equality_is_a_mask_and_not_an_answer() -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return x if x == 0 else -x

    assert "a Python branch on a traced value" in wrong(spec)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: float(x),
        lambda x: int(x),
        lambda x: len(x),
        lambda x: list(x),
        lambda x: x[0],
        lambda x: x @ x,
        lambda x: x % 2,
        lambda x: x // 2,
        lambda x: x << 1,
        lambda x: True**x,
        lambda x: x.sum(),
        lambda x: round(x),
        lambda x: x and 1,
        lambda x: not x,
        lambda x: 3 in x,
        lambda x: x + "1",
        lambda x: x + "y" + 1,
        lambda x: x & True & 3,
        lambda x: F.where(x, 1, 2),
        lambda x: F.exp(x > 0),
        lambda x: F.cast(x, untyped(int)),
        lambda x: F.gelu(x, approximate="fast"),
        lambda x: F.layernorm(x, eps=-1),
        lambda x: F.sum(F.sum(x)),
        lambda x: x + 2**40 * F.col_index(x),
    ],
)
def test_whatever_python_does_to_a_value_is_a_node_or_a_sentence(use: Callable[[Any], Any]) -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return use(x)

    from fusegen.planner import plan
    from fusegen.targets import H200

    with pytest.raises(SpecError, match=r"\.py:\d+: "):
        plan(build(spec), H200)


def test_output_shape_differs_from_declared() -> None:
    def spec(x: f16[M, N]) -> f16[N]:
        return F.sum(x)

    assert "[M, 1], declared is [N]" in wrong(spec)


def test_output_kind_differs_from_declared() -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return x > 0

    assert "convert it with F.cast" in wrong(spec)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [({"M": 8}, "dim N has no size"), ({"M": 8, "N": 4, "K": 1}, "'K'"), ({"M": 8, "N": 0}, "at least 1")],
)
def test_sizes_are_checked(sizes: dict[str, int], words: str) -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return x * 2

    assert words in wrong(spec, **sizes)


def test_sizes_of_at_are_checked() -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return x * 2

    made = chain(M=8, N=16)(spec)
    assert made.at(M=0, N=3).graph.sizes == {"M": 0, "N": 3}
    with pytest.raises(SpecError, match="no dim 'K'"):
        made.at(K=3)
    with pytest.raises(SpecError, match="N=0"):
        made.at(N=0)


def test_scalar_of_f16_is_refused() -> None:
    def spec(x: f16[M, N], a: f16) -> f16[M, N]:
        return x * a

    assert "scalars are f32, i32 or u32" in wrong(spec)


def test_parameter_with_a_default_is_refused() -> None:
    def spec(x: f16[M, N] = ANY) -> f16[M, N]:
        return x * 2

    assert "without defaults" in wrong(spec)


def test_ops_outside_a_chain_say_so() -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return x * 2

    graph = build(spec)
    with pytest.raises(SpecError, match="under @chain"):
        F.exp(Value(graph.inputs[0].node))


def test_integers_meet_floats_as_floats() -> None:
    def spec(x: f16[M, N], k: i32) -> f16[M, N]:
        return x + F.col_index(x) * k

    kinds = [n.op.name for n in build(spec).nodes]
    assert "to_f32" in kinds
    assert kinds.count("mul") == 1


def test_extents() -> None:
    def spec(x: f16[M, N], y: f16[M, 1], g: f16[N], m: b8[M, N], a: f32) -> f16[M, N]:
        s = F.sum(F.where(m, x * g, 0.0))
        return x * (s + y) * (a * 2)

    graph = build(spec)
    by_name = {graph.names.get(n, n.op.name): e for n, e in graph.extents.items()}
    assert by_name["x"] is by_name["g"] is Extent.ELEMENT
    assert by_name["y"] is by_name["s"] is Extent.ROW
    assert by_name["a"] is Extent.LAUNCH


def test_two_outputs_keep_their_names() -> None:
    def spec(x: f16[M, N], r: f16[M, N]) -> tuple[f16[M, N], f32[M, 1]]:
        h = x + r
        norm = F.sum(h * h)
        return h, norm

    assert [t.name for t in build(spec).outputs] == ["h", "norm"]


def test_composites_are_one_operator() -> None:
    def spec(x: f16[M, N], g: f16[N], b: f16[N]) -> f16[M, N]:
        return F.layernorm(x + 1, g, b)

    operators = {n.operator for n in build(spec).nodes if n.op.kind is not Kind.INPUT}
    assert sorted(o.name for o in operators) == ["add", "layernorm"]
    assert all(Path(__file__).name in o.where.file for o in operators)


# ---------------------------------------------------------------- files


def test_files_folders_and_names(tmp_path: Path) -> None:
    text = (
        "from fusegen import chain, dims, f16\nM, N = dims('M N')\n"
        "@chain(M=2, N=3)\ndef one(x: f16[M, N]) -> f16[M, N]:\n    return x * 2\n"
        "@chain(M=2, N=3)\ndef two(x: f16[M, N]) -> f16[M, N]:\n    return x * 3\n"
    )
    file = tmp_path / "pair.py"
    file.write_text(text)
    assert [c.name for c in load_chains(file)] == ["one", "two"]
    assert [c.name for c in load_chains(f"{file}:two")] == ["two"]
    assert [c.name for c in load_chains(tmp_path)] == ["one", "two"]
    with pytest.raises(RequestError, match="it has one, two"):
        load_chains(f"{file}:three")
    with pytest.raises(RequestError, match="there is no spec"):
        load_chains(tmp_path / "absent.py")
    with pytest.raises(RequestError, match="the spec's name is empty"):
        load_chains("")
    (tmp_path / "\udcff.py").write_text(text)
    with pytest.raises(RequestError, match=r"udcff.py' is not UTF-8"):
        load_chains(tmp_path / "\udcff.py")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match="has no chain in it"):
        load_chains(tmp_path / "empty")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n", r"bad.py:1: not Python"),
        ("x = 1\nimport nowhere_at_all\n", r"bad.py:2: ModuleNotFoundError"),
        ("x = 1 / 0\n", r"bad.py:1: ZeroDivisionError"),
        ("from fusegen import dims\ndims('1a')\n", "bad.py:2: dims: '1a' is not a name"),
        ("from fusegen import dims, f16\nM, N = dims('M N')\nf16[M, 0]\n", r"bad.py:3: f16\[...\]: 0 is not a size"),
        ("x = 1\nimport sys\nsys.exit('bye')\n", "bad.py:3: SystemExit while the spec ran: bye"),
        ("from .other import f\n", "bad.py:1: ImportError(.|\n)*PYTHONPATH"),
        ("from fusegen.ops import softmx\n", "bad.py:1: ImportError(.|\n)*did you mean F.softmax"),
        ("x = 1\0", r"bad.py: not Python"),
        ("from fusegen import chain\n\n@chain\ndef f(x): ...\n", r"bad.py:3: write @chain\(M=..., N=...\)"),
        ("from fusegen import chain\n@chain(M=1)\nclass A: ...\n", "bad.py:2: @chain stands before a plain function"),
        ("from fusegen import chain\n@chain(M=1)\nasync def f(x): ...\n", "bad.py:2: .* f is not a plain function"),
    ],
)
def test_broken_files_give_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(RequestError, match=words):
        load_chains(tmp_path / "bad.py")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("F.row_index()", r"it is called as F.row_index\(x\)"),
        ("F.softmax(x, dim=-1)", r"it is called as F.softmax\(x, axis=-1, over=None\)"),
        ("np.exp(x)", "numpy's functions don't take traced values"),
        ("bytes.fromhex(x)", "another library's functions don't take traced values"),
        ("float[x]", "an operand's type is one of f16, bf16, f32, f8e4m3"),
    ],
)
def test_python_type_errors_say_how_it_is_written(tmp_path: Path, body: str, words: str) -> None:
    (tmp_path / "bad.py").write_text(
        "import numpy as np\nfrom fusegen import chain, dims, f16\nfrom fusegen import ops as F\nM, N = dims('M N')\n"
        f"@chain(M=8, N=16)\ndef spec(x: f16[M, N]) -> f16[M, N]:\n    return {body}\n"
    )
    with pytest.raises(SpecError, match=f"bad.py:7: TypeError while the spec ran(.|\n)*{words}"):
        load_chains(tmp_path / "bad.py")


def test_a_place_is_found_whatever_the_path_looks_like(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "bad.py").write_text("x = 1 / 0\n")
    with pytest.raises(SpecError, match=r"bad.py:1: ZeroDivisionError"):
        load_chains(tmp_path / "deeper" / ".." / "bad.py")


@pytest.mark.parametrize("head", ["from fusegen import f8", "f8 = None", "from __future__ import annotations"])
def test_an_unknown_type_is_answered_with_those_there_are(tmp_path: Path, head: str) -> None:
    text = "from fusegen import chain, dims, f16\nM, N = dims('M N')\n"
    text += "@chain(M=8, N=16)\ndef spec(x: f8[M, N]) -> f16[M, N]:\n    return x * 2\n"
    (tmp_path / "bad.py").write_text(f"{head}\n{text}")
    with pytest.raises(RequestError, match="an operand's type is one of f16, bf16, f32, f8e4m3"):
        load_chains(tmp_path / "bad.py")


@pytest.mark.parametrize("number", [1e39, -3.5e38, 10**400, np.float64(1e300)], ids=lambda n: str(n)[:9])
def test_a_literal_that_f32_would_make_infinite_is_refused(number: float) -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return x * number

    assert "is beyond f32, which holds magnitudes up to 3.4028235e+38" in wrong(spec)


def test_literals_may_be_infinite_the_largest_or_numpys() -> None:
    def spec(x: f16[M, N], y: f16[M, N]) -> f16[M, N]:
        return F.maximum(x, -float("inf")) + F.minimum(x, 3.4028235e38) * y ** untyped(np.float32(2))

    build(spec)


def test_numbers_of_numpys_are_numbers() -> None:
    def spec(x: f32[M, N]) -> f32[M, 3]:
        _, columns = F.topk(x, untyped(np.int64(3)))
        return F.take(F.rmsnorm(x, eps=untyped(np.float32(1e-6))), columns, missing=untyped(np.float32(0)))

    build(spec)


def test_an_array_is_no_literal() -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return x * untyped(np.ones(16))

    assert "pass an array as an operand: a parameter with a type" in wrong(spec)


def test_a_chain_is_no_function_to_call() -> None:
    @chain(M=8, N=16)
    def inner(x: f16[M, N]) -> f16[M, N]:
        return F.relu(x)

    def outer(x: f16[M, N]) -> f16[M, N]:
        return inner(x)

    assert "a chain can't call another" in wrong(outer)
    with pytest.raises(SpecError, match=r"inner is a chain, not a kernel; fusegen.compile\(inner\)"):
        inner(1.0)
    with pytest.raises(SpecError, match="and inner is a chain already"):
        chain(M=8, N=16)(untyped(inner))
    with pytest.raises(SpecError, match="can't be stored as f16x"):
        inner.with_dtype(untyped("f16x"))
    assert inner.at(N=untyped(np.int64(40))).graph.sizes["N"] == 40
    with pytest.raises(SpecError, match="a size is at most"):
        inner.at(N=10**30)


def test_outputs_in_a_list_and_a_missing_return() -> None:
    def listed(x: f16[M, N]) -> tuple[f16[M, N], f16[M, N]]:
        return [x, x + 1]  # type: ignore[return-value] # as an author might

    def forgotten(x: f16[M, N]) -> f16[M, N]:
        untyped(x + 1)
        return ANY

    assert "the outputs are a list; return a tuple" in wrong(listed)
    assert "does the function end with return?" in wrong(forgotten)


def test_annotations_may_be_strings(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom fusegen import chain, dims, f16\nM, N = dims('M N')\n"
        "@chain(M=2, N=3)\ndef one(x: f16[M, N]) -> tuple[f16[M, N], f16[M, N]]:\n    return x * 2, x + 1\n"
    )
    (tmp_path / "future.py").write_text(text)
    assert len(load_chains(tmp_path / "future.py")[0].graph.outputs) == 2


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_type_is_itself_in_copies_and_pickles(dtype: DType) -> None:
    assert copy.deepcopy(dtype) is pickle.loads(pickle.dumps(dtype)) is dtype


def test_chains_and_graphs_travel() -> None:
    """By pickles and copies: their ops stay the same ones, however long they are."""

    def long(x: f16[M, N]) -> f16[M, N]:
        for _ in range(3000):
            x = x + 1.0
        return x

    made = chain(M=8, N=16)(long)
    for there in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
        assert str(there) == str(made)
        assert [n.op for n in there.graph.nodes] == [n.op for n in made.graph.nodes]
        assert there.at(M=3).graph.sizes["M"] == 3
    assert repr(made) == "<Chain long f16[M, N] -> f16[M, N] at M=8 N=16>"


@pytest.mark.parametrize("names", [5, None, b"M N", ["M", "N"], "", " "], ids=repr)
def test_names_of_dims_are_one_text(names: Any) -> None:
    with pytest.raises(SpecError, match=r"as in dims\('M N'\)"):
        dims(names)


def test_one_dim_without_a_comma() -> None:
    rows = dims("R")
    assert f16[rows].shape == rows
    with pytest.raises(SpecError, match=r"\(R,\) is a tuple of dims(.|\n)*write R, = dims\('R'\) with a comma"):
        f16[rows, N]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda x: x * math.sqrt(N), "the size N is no Python number(.|\n)*as in F.sqrt\\(N\\)"),
        (lambda x: x[: int(N)], "the size N is no Python number"),
        (lambda x: x + F.col_index(untyped(N)), "col_index: found N, a dim, where a traced value is wanted"),
        (lambda x: x + F.row_index(untyped(3)), "row_index: found 3 where a traced value is wanted"),
        (lambda x: F.softmax(x > 0), "softmax: found a mask"),
    ],
)
def test_what_a_dim_or_a_value_is_not(body: Callable[[Any], Any], says: str) -> None:
    def spec(x: f16[M, N]) -> f16[M, N]:
        return body(x)

    assert re.search(says, wrong(spec))


def test_a_mask_becomes_any_type() -> None:
    def spec(x: f16[M, N]) -> bf16[M, N]:
        return F.cast(x > 0, bf16)

    (tensor,) = build(spec).outputs
    assert tensor.node.op.name == "round_bf16"
    assert tensor.node.inputs[0].op.name == "to_f32"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Relu", "did you mean F.relu?"), ("rleu", "did you mean F.relu?"), ("layer_norm", "did you mean F.layernorm?"),
        ("softmx", "did you mean F.softmax?"), ("top_kk", "did you mean F.top_k?"), ("clamp", "it is F.clip here"),
        *((name, "there are exp, exp2, ") for name in
          ("tan", "asin", "bincount", "logaddexp", "log10", "softmin", "argsort", "celu")),
    ],
)  # fmt: skip
def test_only_what_is_near_is_suggested(name: str, said: str) -> None:
    assert advice(name, F.FUNCTIONS).startswith(said)
    assert "list --ops" in advice("tan", F.FUNCTIONS)


# ---------------------------------------------------------------- the body above the kernel


BODY_SPEC = """from fusegen import chain, dims, f32, ops as F
M, N = dims("M N")

if True:
    @chain(M=4, N=8)
    def centered(
        x: f32[M, N],
        gain: f32[N],
    ) -> f32[M, N]:
        'Stands in the title already.'
        # numbers small enough
        low = x - \\
            F.mean(x)  # \u03bc

        return low * gain  # of a column
"""
LINE_SPEC = """from fusegen import chain, dims, f32, ops as F
M, N = dims("M N")
@chain(M=4, N=8)
def scaled(x: f32[M, N]) -> f32[M, N]: {body}
"""


def test_the_body_is_what_the_author_wrote_without_its_docstring(tmp_path: Path) -> None:
    file = tmp_path / "spec.py"
    file.write_text(BODY_SPEC, encoding="utf-8")
    (centered,) = load_chains(file)
    assert centered.graph.body.splitlines() == [
        "def centered(x, gain):",
        "    # numbers small enough",
        "    low = x - \\",
        "        F.mean(x)  # \u03bc",
        "",
        "    return low * gain  # of a column",
    ]
    assert centered.at(N=16).graph.body == centered.with_dtype(f16).graph.body == centered.graph.body
    assert pickle.loads(pickle.dumps(centered.graph)).body == centered.graph.body


def test_a_body_on_the_line_of_its_signature(tmp_path: Path) -> None:
    file = tmp_path / "spec.py"
    file.write_text(LINE_SPEC.format(body='"Twice x."; return x * 2'))
    assert load_chains(file)[0].graph.body == "def scaled(x):\n    return x * 2"


def test_text_that_is_not_the_functions_own_is_not_shown(tmp_path: Path) -> None:
    """Executed text has no file, and a file that was edited since tells of another kernel."""
    file = tmp_path / "spec.py"
    file.write_text(LINE_SPEC.format(body="return x * 3"))
    for name in ("<string>", str(file)):
        names: dict[str, Any] = {}
        exec(compile(LINE_SPEC.format(body="return x * 2"), name, "exec"), names)
        assert names["scaled"].graph.body == ""


def test_sizes_are_numbers_in_a_body() -> None:
    @chain(M=4, N=6)
    def spec(x: f32[M, 2 * N]) -> f32[M, 2 * N]:
        return x * N**-0.5 + F.sqrt(N) + 0.5 * N + N * x + x / (2 * N) + F.size(2 * N) / 3

    x = np.arange(48, dtype=np.float64).reshape(4, 12)
    wanted = x * 6**-0.5 + math.sqrt(6) + 3 + 6 * x + x / 12 + 4
    np.testing.assert_allclose(reference(spec.graph)(x), wanted)
    np.testing.assert_allclose(reference(spec.at(N=8).graph)(x[:, :8]), x[:, :8] * (0.5 + 4 + 1 / 8) + 2 + 2 + 8 / 3)


def test_at_says_which_size_does_not_come_out_even() -> None:
    def spec(x: f32[M, N // 2]) -> f32[M, N // 2]:
        return x + 1

    made = chain(M=4, N=64)(spec)
    assert made.at(N=66).graph.cols == 33
    with pytest.raises(SpecError, match=r"spec: the size N // 2 does not come out even at N=65"):
        made.at(N=65)
    with pytest.raises(SpecError, match=r"\.py:\d+: spec: the size N // 2 does not come out even at N=3"):
        chain(M=4, N=3)(spec)

    def short(x: f32[M, N - 4]) -> f32[M, N - 4]:
        return x + 1

    with pytest.raises(SpecError, match="the size N - 4 is -1 at N=3; a size is 1 to"):
        chain(M=4, N=3)(short)
