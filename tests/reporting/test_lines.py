"""Which lines of a kernel are said to be of which step, and that it is so."""

from __future__ import annotations

import re

import pytest

from fusegen.reporting.lines import linked, words_of
from fusegen.reporting.state import Chain, Kernel, lines_of
from tests.reporting.states import JOINED, PROGRAM, ROWS, state
from tests.specs import SHIPPED

LINKED = (
    ROWS, PROGRAM, JOINED, "dropout_residual_layernorm", "scale_mask_softmax_topk", "rmsnorm_backward", "lora",
    "qk_norm_rope", "groupnorm_silu", "decoder_layer",
)  # fmt: skip
NAMES = {"h": 1, "x": 0, "sum_of_h": 2, "gelu": 3, "vector": 4}


@pytest.mark.parametrize(
    ("code", "made", "named"),
    [
        ("      const float h = residual + gelu;", [1], [1, 3]),
        ("      h_kept[v][j] = h;", [1], [1]),
        ("      h_kept[v + x][j] = gelu;", [1], [1, 0, 3]),
        ("      sum_of_h_part += h;", [2], [2, 1]),
        ("      const float x = __half2float(x_vec[v].at[j]);", [0], [0]),
        ("    x_vec[v] = load<8>(x_row + col);", [0], [0]),
        ("  Vec<__half, 8> x_vec[4];", [], [0]),
        ("  for (int h = 0; h < 4; ++h) {", [], [1]),
        ("  if (h == x) {", [], [1, 0]),
        ("  if (h <= x) y = gelu;", [], [1, 0, 3]),
        ("  const int col = vector_cols * lane;", [], []),  # a word of the kernel's own
        ("  other.h = p->x;", [], []),  # members of something
        ("  const bool b = x == h;", [], [0, 1]),
        ("  store<8>(x_row + col, h_vec);", [], [0, 1]),
        ("  hx = xh;", [], []),
    ],
)
def test_words_of_a_line(code: str, made: list[int], named: list[int]) -> None:
    assert words_of(code, NAMES) == (made, named)


def test_comments_and_functions_in_front_are_nobodys() -> None:
    front = "float gelu(float x) {\n  return x;\n}\n__global__ void\n"
    text = f"{front}own(\n  float x)\n{{\n  // h = x\n  h = x;  // gelu\n}}\nx\n"
    assert [(link.line, link.makes, link.names) for link in linked(text, {"own": NAMES})] == [
        (6, (), (0,)), (9, (1,), (0,)),
    ]  # fmt: skip


def item(chain: Chain, value: str) -> int:
    return next(place for place, item in enumerate(chain.items) if item.value == value)


def test_the_lines_of_a_layer_norm() -> None:
    (chain,) = state(ROWS).chains
    (kernel,) = chain.kernels
    made = {lines_of(kernel.source)[link.line - 1].strip(): link.makes for link in kernel.links}
    assert made["const float x_plus_bias = x + bias;"] == (item(chain, "x_plus_bias"),)
    assert made["const float gelu = gelu_by_tanh(x_plus_bias);"] == (item(chain, "gelu"),)
    assert made["h_kept[v][j] = h;"] == (item(chain, "h"),)
    assert made["sum_of_h_part += h;"] == (item(chain, "layernorm"),)
    assert [chain.items[item(chain, name)].line for name in ("x_plus_bias", "gelu", "h", "layernorm")] == [1, 1, 1, 2]
    assert chain.spec[0].strip() == "h = residual + F.gelu(x + bias)"
    assert chain.first_line == 14
    reference = {lines_of(kernel.reference)[link.line - 1].strip(): link.makes for link in kernel.reference_links}
    assert reference["h = residual + gelu"] == (item(chain, "h"),)


@pytest.mark.parametrize("name", LINKED)
def test_a_kernel_has_lines_of_what_it_computes_and_reads_alone(name: str) -> None:
    (chain,) = state(name).chains
    stored = {b.name: (b.written_by, b.read_by) for b in chain.between}
    for place, kernel in enumerate(chain.kernels):
        assert any(link.makes for link in kernel.links)
        for link in kernel.links:
            for found in (*link.makes, *link.names):
                one = chain.items[found]
                read = any(place in read_by for written, read_by in stored.values() if written in one.kernels)
                assert one.kind == "operand" or place in one.kernels or read, (kernel.name, link, one)


@pytest.mark.parametrize("name", [ROWS, "dropout_residual_layernorm", "rmsnorm"])
def test_most_lines_of_a_row_kernel_are_of_a_step(name: str) -> None:
    (chain,) = state(name).chains
    (kernel,) = chain.kernels
    own = code_lines(kernel)
    assert len([link for link in kernel.links if link.makes or link.names]) > 0.5 * len(own)


def code_lines(kernel: Kernel) -> list[str]:
    """Those of the kernel's body that are more than a brace or a comment."""
    text = kernel.source.partition("__global__")[2]
    return [line for line in lines_of(text) if re.sub(r"//.*", "", line).strip() not in ("", "{", "}")]


def test_every_operator_is_in_a_kernel() -> None:
    for name in (ROWS, PROGRAM, JOINED):
        (chain,) = state(name).chains
        assert all(one.kernels for one in chain.items if one.kind == "operator")
        assert {one.name for one in chain.items if one.kind == "operand"} == {
            t.name for t in SHIPPED[name].graph.inputs
        }
