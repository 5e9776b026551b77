"""Names that are right in C++, in HIP's clang and in Python: one table for a graph's kernel and its numpy reference.

A value keeps the name its author gave it. A name that a compiler or the kernel's own frame has taken gets a trailing
underscore, a repeated one a number, an unnamed one the name of its op.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping

from fusegen.graph import Graph, Kind, Node

CPP = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
    concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete
    do double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast
    requires return short signed sizeof static static_assert static_cast struct switch template this thread_local throw
    true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq half main
    printf assert""".split()  # noqa: SIM905  (a list of quoted words is harder to read)
)
# what the templates, the runtime compilers and the reference call things; a spec's value of that name steps aside
FRAME = frozenset(
    """row rows row_tile row_tiles lane team tile tiles col v j base live start shift part partial shared warp threadIdx
    blockIdx blockDim gridDim warpSize Vec MaxSum Welford INFINITY NAN round_f16 round_bf16 larger smaller load store
    load_each load_within load_each_within store_each store_within store_each_within row_sum row_max row_min
    row_max_sum row_welford partner at np math ml_dtypes bfloat16 erf n i abs min max exp log sqrt tanh pow rsqrt inside
    cols""".split()  # noqa: SIM905
)
TENSOR_SUFFIXES = ("_ptr", "_row", "_vec", "_stride")


def value_names(graph: Graph) -> Mapping[Node, str]:
    """A unique name for every node that gets one (literals and sizes are written out), the same each time."""
    taken = set(CPP | FRAME | frozenset(keyword.kwlist))
    names: dict[Node, str] = {}
    for tensor in graph.inputs:
        names[tensor.node] = claim(tensor.name, taken)
        taken.update(names[tensor.node] + suffix for suffix in TENSOR_SUFFIXES)
    for tensor in graph.outputs:
        taken.update(tensor.name + suffix for suffix in TENSOR_SUFFIXES)
    for node in graph.nodes:
        if node.op.kind is Kind.LEAF and node.op.name in ("literal", "size"):
            continue
        if node not in names:
            names[node] = claim(graph.names.get(node) or f"{node.op.name}", taken)
    return names


def claim(wanted: str, taken: set[str]) -> str:
    """`wanted`, or the nearest free name; marks it as taken."""
    name = wanted if wanted.isascii() else "value"
    if name.startswith("__"):
        name = name.strip("_") or "value"
    if name in CPP or name in FRAME or keyword.iskeyword(name):
        name += "_"
    number = 2
    candidate = name
    while candidate in taken:
        candidate = f"{name.rstrip('_')}_{number}"
        number += 1
    taken.add(candidate)
    return candidate
