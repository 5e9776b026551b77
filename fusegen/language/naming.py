"""Names that are right in C++, in HIP's clang and in Python: one table for a graph's kernel and its numpy reference.

A value keeps the name its author gave it. A name that a compiler or the kernel's own frame has taken gets a trailing
underscore. A value without a name, or whose name another has too, is called after what it is of: `sum_of_squares`,
`z_minus_pivot`, `relu_plus_residual`. Where its op is the only one of its kind, the op's name will do. A number stands
behind a name only where nothing short would tell two values apart, as in a long sum of unnamed terms.
"""

from __future__ import annotations

import keyword
import math
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache

from fusegen.language.graph import Graph, Kind, Node, behind, once_per_graph
from fusegen.language.trace import OPS
from fusegen.language.types import F8

CPP = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
    concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete
    do double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast
    requires return short signed sizeof static static_assert static_cast struct switch template this thread_local throw
    true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq half main
    printf assert NULL""".split()  # noqa: SIM905  (a list of quoted words is harder to read)
)
# what the templates, the runtime compilers and the reference call things; a spec's value of that name steps aside
FRAME = (
    frozenset(
        """row rows lane team tile tiles tile_cols block_rows row_blocks row_threads threads vector_step vector_cols
    staged_stride kept_step col v j base live start shift part partial shared warp threadIdx
    blockIdx blockDim gridDim warpSize Vec MaxSum Welford INFINITY NAN round_f16 round_bf16 larger smaller load store
    load_apart store_apart load_each load_each_within store_each store_within store_each_within row_sum row_max row_min
    load_for_all load_by_groups
    row_max_sum row_welford partner exponential power_of_2 reciprocal log_2 element values at np math ml_dtypes bfloat16
    erf n i abs min max exp log sqrt tanh pow rsqrt inside cols load_evict_first load_where load_evict_first_where words
    copy_async commit_copies wait_copies joined
    Pieces phase load_row_pieces load_misaligned load_first load_last store_misaligned load_pieces load_kept copy_part
    copy_misaligned head_of load_block load_kept_block load_shifted store_block store_row head edge in_remainder
    remainder_col own_row first_row rows_here tile_pitch load_turned store_turned read_tile write_tile arrivals
    shared_address start_arrivals wait_arrivals expect_arrival away place copy_bulk bulk_bytes bring bring_end
    show_copies leave wait_copies_left leave_packed memcpy unknown
    group_bounds matmul_by_group products_by_group add_by_group ends_of_groups order_of_slots places_of_slots
    top_columns take bare rows_at pages_at rows_put take_at kept_by_sum kept_by_count order_of flat_index
    low_word high_word
    philox4x32 group_sum group_max group_min group_sum_i32 group_max_i32 group_min_i32 block""".split()  # noqa: SIM905
    )
    | {name for dtype in F8 for name in (f"to_{dtype}", f"{dtype}_value")}
    | {"to_f8e5m2_or_infinity", "f4e2m1_value", "f8e4m3_of", "f8e5m2_of", "pair_of_f8e4m3", "pair_of_f8e5m2"}
)
# what kernels call things that choose columns
SELECTION_FRAME = frozenset(
    """Lanes vote count Entry column_bits last_column masked infinite order_of key_at entry_of key_of column_of
    lanes_most meet Picker picker warp_least warp_most sum_below warps bins room below beyond largest own_bins
    PivotSum widened lost notes next slot from vectors own_col fresh listed exact tied untied late list
    add_up measure shift_for by cut tighten bar held side noted lane_of_warp lanes_below turn over peaks keys p
    passes crowd limit cutoff order reached who seen found own bits fits done left mine least again own_list higher
    kept upto place all higher_bar first start most lowest above binned entry rank bin other end peak best bit raw
    r picks best_entry last a sort sorts many size run step high low part
    far block bottom marks exponentials highest enough few between wanted reach warp_sum row_warps picker_of meet_all
    reached_by most_of sum_of ahead cutoffs incoming merged passing picked_max picked_sum read see lanes_sum_below
    before atomicAdd atomicMax atomicMin Ranges compared elements groups more orders ranges reaches slot_of to
    warp_total
    bin_bits top_bit least_key exact_sum marked readers aim own_key own_order delegates exchange sort_delegates
    merge_delegates beyond_lane most_here next_here own_group lanes_least fminf last_place orders_of pair_of
    first_entry second_entry sort_entries order_entries merge_best best_of merge_lanes part_best take_own
    larger_pair pairs spots turned second best_groups half_of_groups own_groups group_spots row_pairs first_place
    row_step entries others word upper apart spot either place_bits word_of alike last_key missed next_key owner head
    behind""".split()  # noqa: SIM905
)
# the same of the template that reduces columns
COLUMN_FRAME = frozenset(("turn", "u", "rank", "first_col", "own_col", "own", "from", "sums", "b", "c", "r",
                          "tile_rows", "own_cols", "row_step", "rows_in_turn"))  # fmt: skip
# the same of its passes that have running sums
RUNNING_FRAME = frozenset("half place step to_here other ahead group g".split())  # noqa: SIM905
# the same of the template that reduces columns of every so-many-th row
PART_FRAME = frozenset("first part_row step slot slots turn s behind ahead own_row".split())  # noqa: SIM905
# the same of templates for products, where a chain has some
PRODUCT_FRAME = frozenset(
    """thread warp warp_row warp_col rank share tiles tiles_down first height across row0 col0 rows_here group ring
    slice step k_at k_part k_group left right place k m s last to from band count within gathered load_chunk load_beside
    load_strided copy_chunk load_left_across load_right_across load_left_half_across load_fragment multiply_add
    copy_slice fetch_slice prepare_slice load_parts multiply take_slice Sums Half Fragment right_2 right_ptr right_2_ptr
    copy_left copy_right copy_evict_first own_address left_slices right_slices full empty pingpong pingpong_parity role
    to_tf32 halves own parity stage
    arrived number at batch before sums staging buffer chunk sum_at r8 n8 tiles_here CUtensorMap Place place_of
    start_barrier wait_at arrive_at arrive_in expect_bytes copy_box copy_box_to_all store_box wait_stores store_matrices
    describe fragments prepared half quarter both made pair word prepare prepare_next kept kept_at store_kept ring_at
    nth xor_mask multiply_add_across right_slices_across place_across advance ahead copy_one load_one slices slot
    take_step next aim more copies fence_sums swizzle_128 eight_lines segments right_at staging_at barriers_at
    cluster_rows own_cols warpgroup line_bytes segment_bytes left_bytes right_bytes box_bytes statistics_at address_bits
    full_k tile_rows tile_cols tile_k stages split_k steps warp_rows warp_cols threads tiles_across group group_tiles
    slice_elements slice_bytes at_once band_rows sums_stride group_floats period load_matrices sum_row sum_col
    load_matrices_across load_two_matrices load_two_matrices_across neighbours n32 fetch_scales of_rows
    of_columns scaled_k scaled_cols part_cols take_scales
    dies by_die segment segment_end segment_of piece r Segment tiles_of begun here of_group end inside k_begin total_k
    summed InnerSegment inner_segment_of accumulators taken turn turn_parity own_sums tensor_columns instruction
    accumulator_cols tensor_address_at
    instruction_across version commit after_thread_sync before_thread_sync load_sums_128 load_sums_64 load_sums_32
    load_sums_16 own_warp is_elected elected address widened fused worker mask col piece zeros line scales
    partial sixteen turned_at turned_cols turning selector scales_of zeros_of next_scales next_zeros its_zeros
    fetch take prepare now number widen_pair bytes nibbles share pair added there first words half within
    copy_row arrive_with_copies look_ahead from_before own_segments Own end_of
    likely likely_col ask_cache_for Known known lanes_of one one_of owner tile_places
    tile_places_at whole depth begun_tiles done_blocks all_begun leave_step wanted look together blocks
    all_scales slice_scales scales_at read of_row copy_scale""".split()  # noqa: SIM905
)
# the same of the templates for two products in one kernel
ATTENTION_FRAME = frozenset(
    """tile_keys keys key0 first_key end_key free_first free_end Ends ends_of ends top_ends last_ends own least most
    within_keys meet_least meet_most met ring_at stage_elements stage_bytes copy_tile fetch_tile put_tile largest
    pivots factor factors huge was_huge summed peaks shrinks power rounded_pair rounded_half load_half row_sums
    row_largest row_summed brought
    warp_row row0 first_element philox_four draw_for_two philox_words
    rows_here ring tiles_down load_matrices load_matrices_across multiply_add copy_chunk load_chunk load_fragment Half
    Fragment Sums stage tile_rows threads sums_stride m d r w end fmaf rounded
    consumers fence_floats fence_words first_head head heads heads_here together inside key_bytes key_segment keys_at
    keys_empty keys_full keys_lie keys_ring met_end met_first met_free_end met_free_first own_end own_first own_free_end
    own_free_first multiply_keys multiply_scores multiply_values multiply_weights own_queries pairs pass_turn queries
    queries_full query_bytes query_segment round_weights rounded_pair_bf16 rounded_pair_f16 value_bytes value_segment
    values_at values_empty values_full values_lie values_ring weigh weights read_ahead stages warpgroup role tiles
    parity staging staging_at barriers_at line_bytes first_keys end_keys free_first_keys free_end_keys
    page key_page key_pages value_page value_pages page_of_keys pages_of_keys page_of_values
    pages_of_values beside warp_keys warp_key warp_columns weights_pitch weights_at weights_to weights_lane weights_part
    told told_at columns_at_once first_col side tile_key put_four load_down Pitch sum
    late raised near_pivots reach added peak fmaxf tangent_near_0 last_exact exact
    key_segments value_segments own_segments own_columns own_tile other_tile half queries_lie other_weights other_values
    told_largest told_shrinks told_summed multiply_told multiply_other tell_weights take_weights shrink_sums let_go line
    other wide next_weights own_empty other_empty segment segments arrived step sums next_tile load_one
    scaled""".split()  # noqa: SIM905
)
# the same of templates for the softmax of a product's rows
WEIGHTS_FRAME = frozenset(
    """key_of take_tile last_key zeros zeros_at zeros_stored own_zeros zero_bytes zero_rows store_zeros box_rows
    rows_end line_elements others peak pair store_box_evict_first policy""".split()  # noqa: SIM905
)
# functions of C's library: a value of such a name would read like a call of it
C_LIBRARY = frozenset(
    """abort abs acos acosh asctime asin asinh atan atan2 atanh atexit atof atoi atol bsearch calloc cbrt ceil clock
    copysign cos cosh ctime difftime div erf erfc exit exp exp2 expm1 fabs fdim floor fma fmax fmin fmod free frexp
    getenv gmtime hypot ilogb labs ldexp ldiv lgamma localtime log log10 log1p log2 logb lrint lround malloc memchr
    memcmp memcpy memmove memset mktime modf nan nearbyint nextafter pow qsort raise rand realloc remainder remquo
    rint round scalbn signal sin sinh sqrt srand strcat strchr strcmp strcpy strlen strtod strtol system tan tanh
    tgamma time trunc""".split()  # noqa: SIM905
)
# what it and the runtime compilers declare at file scope, where a kernel's own name lives
FILE_SCOPE = C_LIBRARY | frozenset(
    """cospi cuda dim3 exp10 float2 float4 half2 hip int2 int4 j0 j1 jn llabs max min norm norm3d norm4d normcdf
    powi rcbrt rhypot rnorm rsqrt scalbln signbit sincos sinpi std uint3 y0 y1 yn""".split()  # noqa: SIM905
)
# names that read better than one of C's library or of the kernel's own with an underscore behind it, and have no two
# in a row where the kernel puts a word behind it: those are the compiler's own (C++17, [lex.name])
INSTEAD = {
    "div": "quotient", "cos": "cosine", "sin": "sine", "tan": "tangent", "max": "maximum", "min": "minimum",
    "row": "row_number", "col": "col_number", "last": "last_value",
}  # fmt: skip
# what a kernel makes of a name, alone or with more words behind it: `x_vec`, `x_vec_next`, `x_stride_M`
POINTER = "_ptr"
TENSOR_SUFFIXES = (
    POINTER, "_row", "_vec", "_stride", "_kept", "_pieces", "_ends", "_staged", "_last", "_edge", "_at", "_place",
    "_first", "_part", "_start", "_read", "_prefetched", "_found", "_count", "_wide", "_cols", "_tile",
)  # fmt: skip
# values whose names others are called after
NAMED = (Kind.INPUT, Kind.PRODUCT, Kind.REDUCE, Kind.GROUP, Kind.SCAN, Kind.SELECT)
FACTOR_SUFFIXES = (
    "_ld", "_left", "_right", "_from", "_to", "_m", "_n", "_k", "_held", "_part", "_map", "_pair", "_both", "_words",
    "_lane", "_col", "_slice", "_slices", "_box", "_stage", "_ahead", "_step", "_batch", "_eight", "_group",
)  # fmt: skip
SIDE_BY_SIDE = "right"  # what products of several widths call the right factor of a block
RESERVED = re.compile(r"__|_[A-Z]")  # at the start of a name: the compiler's own (C++17, [lex.name])
MACROS = "SIMT_"  # the start of the names of the emulator's macros
VALUE_SUFFIXES = ("_masked", "_last", "_kept", "_part", "_part_values", "_all", "_here")
COLUMN_SUFFIXES = ("_turn",)
RUNNING_TENSOR_SUFFIXES = ("_next",)
RUNNING_SUFFIXES = ("_before", "_so_far", "_parts", "_made", "_totals")
ATTENTION_SUFFIXES = ("_pitch", "_keys", "_chunks", "_first")
WEIGHTS_SUFFIXES = ("_rows", "_masked", "_staging")
SUM_SUFFIXES = ("_sums", "_shared", "_total", "_of")


@cache
def called() -> frozenset[str]:
    """Functions that op expressions call: a value of such a name would hide them."""
    return frozenset(name for op in OPS.values() for name in re.findall(r"[A-Za-z_]\w*(?=\()", op.expr))


@once_per_graph
def entry_name(graph: Graph) -> str:
    """The kernel's own name: the chain's, with `_kernel` behind it where a compiler has taken that."""
    taken = CPP | FRAME | FILE_SCOPE | called() | {f"{name}f" for name in FILE_SCOPE}
    if graph.selections:
        taken |= SELECTION_FRAME
    if graph.products:
        taken |= PRODUCT_FRAME | ATTENTION_FRAME | WEIGHTS_FRAME
    if any(n.over for n in (*graph.reductions, *graph.scans)):
        taken |= COLUMN_FRAME | RUNNING_FRAME
    steps_aside = graph.name in taken or RESERVED.match(graph.name) or graph.name.startswith(MACROS)
    return f"{graph.name}_kernel" if steps_aside else graph.name


@once_per_graph
def value_names(graph: Graph) -> Mapping[Node, str]:
    """A unique name for every node that gets one (literals and sizes are written out), the same each time.

    Operands come first, then names that the author gave, then those of values inside composites."""
    frame = set(CPP | FRAME | C_LIBRARY | called() | frozenset(keyword.kwlist))
    of_columns = any(n.over for n in (*graph.reductions, *graph.scans))
    if graph.viewed or of_columns:  # the reference calls dims by their names
        frame |= set(graph.sizes)
    if graph.selections:
        frame |= SELECTION_FRAME
    if graph.parts:
        frame |= PART_FRAME
    if of_columns:
        frame |= COLUMN_FRAME | {f"{name}_counted{kind}" for name in graph.sizes for kind in ("", "_whole")}
    of_tensors: tuple[str, ...] = TENSOR_SUFFIXES
    of_values: tuple[str, ...] = VALUE_SUFFIXES
    chained = len(graph.products) == 2 and graph.products[0] in behind(graph.products[1].inputs)
    weighed = may_be_weighed(graph)
    if weighed:
        frame |= ATTENTION_FRAME | WEIGHTS_FRAME
    if graph.products:
        frame |= ATTENTION_FRAME if chained else PRODUCT_FRAME
        of_tensors, of_values = TENSOR_SUFFIXES + FACTOR_SUFFIXES, VALUE_SUFFIXES + SUM_SUFFIXES
        of_tensors += ATTENTION_SUFFIXES if chained or weighed else ()
        of_values += ATTENTION_SUFFIXES if chained or weighed else ()
        of_tensors += WEIGHTS_SUFFIXES if weighed else ()
    if of_columns:
        of_values += COLUMN_SUFFIXES
    if any(n.over for n in graph.scans):
        frame |= RUNNING_FRAME
        of_tensors, of_values = of_tensors + RUNNING_TENSOR_SUFFIXES, of_values + RUNNING_SUFFIXES
    claims = Claims(frame)
    for tensor in graph.outputs:
        claims.note(tensor.name, of_tensors)
    if graph.products:
        claims.note(SIDE_BY_SIDE, of_tensors + of_values)
    outputs = frozenset(t.name for t in graph.outputs)  # a value may be called so, but an operand is a pointer too
    factors = {n for n in factors_alone(graph) if graph.tensor_of[n].name != "np"} if chained else frozenset[Node]()
    names = {t.node: claims.claim([t.name], of_tensors, outputs, t.node in factors) for t in graph.inputs}
    first = {name: node for node, name in reversed([*graph.names.items()])}
    named = [n for n in graph.nodes if not (n.op.kind is Kind.LEAF and n.op.name in ("literal", "size"))]
    for node in named:
        name = graph.names.get(node, "")
        if node not in names and first.get(name) is node and claims.is_free(claims.aside(name, of_values), of_values):
            names[node] = claims.claim([name], of_values)
    describing = Describing(graph, names)
    for node in named:
        if node not in names:
            names[node] = claims.claim(describing.wanted(node), of_values)
    return names


def may_be_weighed(graph: Graph) -> bool:
    """Has a product a maximum along its rows, and elements that are written? The softmax of its rows may be."""
    if len(graph.products) != 1 or not any(n.op.name == "max" for n in graph.reductions):
        return False
    (product,) = graph.products
    return any(t.shape[-1:] == product.shape[-1:] for t in graph.outputs)


def factors_alone(graph: Graph) -> frozenset[Node]:
    """The operands that are multiplied as they lie, and asked for in no other way: k and v may be called so, since a
    kernel has no single element of theirs."""
    found = [t.node for t in graph.inputs if len(t.shape) > 1]
    return frozenset(
        n for n in found if all(
            u.op.kind is Kind.PRODUCT or (u.op.kind is Kind.TRANSPOSE and all(
                w.op.kind is Kind.PRODUCT for w in graph.users[u]
            )) for u in graph.users.get(n, ())
        )
    )  # fmt: skip


class Claims:
    """Names that are taken, and the suffixes behind which a kernel uses them. `frame`: words of the kernel's own."""

    def __init__(self, frame: Container[str]) -> None:
        self.frame = frame
        self.claimed: dict[str, tuple[str, ...]] = {}
        self.taken: set[str] = set()
        self.beginnings: set[str] = set()  # of claimed names, each up to one of its underscores, and whole
        self.numbers: dict[str, int] = {}

    def note(self, name: str, suffixes: tuple[str, ...]) -> None:
        self.claimed[name] = suffixes + self.claimed.get(name, ())
        self.beginnings.update((*beginnings_of(name), name))

    def claim(
        self, wanted: Sequence[str], suffixes: tuple[str, ...], outputs: Container[str] = (), never_alone: bool = False
    ) -> str:
        """The first of the names that is free, else the first one with a number; marks it as taken. One that is used
        `never_alone`, but before a suffix, may be that of something else in the kernel."""
        names = [self.aside(name, suffixes) for name in wanted]
        found = next((name for name in names if self.is_free(name, suffixes, outputs)), "")
        if (
            never_alone
            and wanted[0] in self.frame
            and wanted[0] not in CPP
            and self.suffixed(wanted[0], suffixes, outputs)
        ):
            found = wanted[0]
        if not found:
            found = self.numbered(names[0].rstrip("_"), suffixes, outputs)
        self.taken.add(found)
        self.note(found, suffixes)
        return found

    def aside(self, name: str, suffixes: tuple[str, ...]) -> str:
        """The name itself, or the nearest that no compiler and no part of the kernel has."""
        name = name if name.isascii() else "value"
        array = POINTER in suffixes
        if RESERVED.match(name) or (array and name.endswith("_")):
            name = name.strip("_") or "value"
        if name in self.frame or name.startswith(MACROS):
            name = INSTEAD.get(name) or (f"{name}_value" if array else f"{name}_")
        while other := self.maker(name):
            name = other + name[len(other) + 1 :]  # x_row becomes xrow: a number behind it would change nothing
        return name

    def maker(self, name: str) -> str:
        """The claimed name of which a kernel may make this one, or ""."""
        return next((o for o in beginnings_of(name) if o in self.claimed and made_of(name, o, self.claimed[o])), "")

    def is_free(self, name: str, suffixes: tuple[str, ...], outputs: Container[str] = ()) -> bool:
        if name in self.frame or name in self.taken or name in outputs or self.maker(name):
            return False
        made = [name + suffix for suffix in suffixes]
        return not any(word in self.frame or word in self.beginnings for word in made)

    def suffixed(self, name: str, suffixes: tuple[str, ...], outputs: Container[str]) -> bool:
        """Is it free but for the kernel's own use of the bare name?"""
        if name in self.taken or name in outputs or self.maker(name) or not name.isascii():
            return False
        return not any(name + suffix in self.frame or name + suffix in self.beginnings for suffix in suffixes)

    def numbered(self, name: str, suffixes: tuple[str, ...], outputs: Container[str]) -> str:
        number = self.numbers.get(name, 2)
        while not self.is_free(f"{name}_{number}", suffixes, outputs):
            number += 1
        self.numbers[name] = number + 1
        return f"{name}_{number}"


class Describing:
    """Names of values that their author did not name, or called as another. `names`: those that are known."""

    def __init__(self, graph: Graph, names: Mapping[Node, str]) -> None:
        self.graph = graph
        self.names = names
        unnamed = [node for node in graph.nodes if node not in names]
        self.uses = Counter(node.op for node in unnamed)
        self.outputs = {tensor.node: tensor.name for tensor in reversed(graph.outputs)}
        self.results = {node.operator: node for node in graph.nodes if node in names}  # the last one of each

    def wanted(self, node: Node) -> list[str]:
        """From the best one on. An op's own name says enough where no other value is of that op; else the arguments
        tell, and of a result the output's name."""
        short, full = (legal(name) for name in (self.described(node), self.in_full(node)))
        plain = short if short != node.op.name or self.uses[node.op] == 1 else ""
        own = self.graph.names.get(node, "")  # is another's too
        result = self.results.get(node.operator)
        whose = f"{own}_of_{self.names[result]}" if own and result and result is not node else ""
        first = next((self.names[n].rstrip("_") for n in descent(node) if n.op.kind is Kind.INPUT and n.shape), "")
        made = f"{short.rstrip('_')}_from_{first}" if first and not short.endswith(f"_{first}") else ""
        return [name for name in (whose, plain, full, self.outputs.get(node, ""), own, short, made) if name]

    def described(self, node: Node) -> str:
        """What a value is: after its op and its arguments, as far as these have names of their own."""
        op = node.op.name
        if node.op.kind in (Kind.VIEW, Kind.JOIN):
            return node.operator.name
        if node.op.kind is Kind.TRANSPOSE:
            return f"{self.names[node.inputs[0]]}_T"
        words = [self.said(a) for a in node.inputs]
        first = words[0] if words and words[0] not in NUMBERS.values() else ""  # no name begins with a digit
        op = op.removeprefix("group_")
        if op in ("sum", "prod", "max", "min"):
            argument = node.inputs[0]
            named = self.graph.names.get(argument) not in (None, argument.op.name)
            of = words[0] if named else PLURALS.get(argument.op.name, words[0])
            return f"{op}_of_{of}" if of else op
        if op in ("eq", "lt", "gt") and first and words[1] in NUMBERS.values():
            return f"{first}_{BETWEEN[op]}_{words[1]}"
        if node.op.kind is Kind.SCAN:
            return f"{op}_of_{words[0]}" if words[0] else op
        if op == "div" and words[0] == "1" and words[1]:
            return f"one_over_{words[1]}"
        if first and ((op == "add" and words[1] == "eps") or (op == "sub" and words[1])):
            return f"{first}_{BETWEEN[op]}_{words[1]}"
        return op

    def in_full(self, node: Node) -> str:
        """The same with all arguments; "" where one of them has no short name."""
        op, kind = node.op.name, node.op.kind
        if kind is Kind.PRODUCT:
            left, right = (self.said(a.inputs[0] if a.op.kind is Kind.TRANSPOSE else a) for a in node.factors)
            return f"{left}_times_{right}" if left and right else f"{op}_{right}" if right else ""
        words = [self.short(a) for a in node.inputs]
        if not (words and all(words)) or words[0] in NUMBERS.values():
            return ""
        if op in BETWEEN:
            return f"{words[0]}_{BETWEEN[op]}_{words[1]}"
        return f"{op}_of_{words[0]}" if len(words) == 1 else ""

    def said(self, node: Node) -> str:
        """An argument in another value's name; "" for one that is unnamed itself or has a long name."""
        named = node.op.kind in NAMED or node in self.graph.names
        return self.short(node) if named or node.literal is not None else ""

    def short(self, node: Node) -> str:
        """The same, whoever named it."""
        if node.literal is not None:
            small = isinstance(node.literal, float) and 0 < node.literal <= SMALLEST
            return "eps" if small else NUMBERS.get(node.literal, "")
        name = self.names.get(node, "").rstrip("_")
        return name if len(name) <= LONGEST else ""


def descent(node: Node) -> Iterator[Node]:
    """What a value is made of, each first argument to its end before the next one."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        found = stack.pop()
        if found not in seen:
            seen.add(found)
            yield found
            stack.extend(reversed(found.inputs))


def free_name(name: str, taken: Container[str]) -> str:
    """The name, or where it is taken with the first number behind it, from 2 on, that makes it another."""
    found, number = name, 2
    while found in taken:
        found, number = f"{name}_{number}", number + 1
    return found


def legal(name: str) -> str:
    """Not as a function of C's library."""
    return INSTEAD.get(name) or (f"{name}_" if name in FILE_SCOPE else name)


def beginnings_of(name: str) -> Iterator[str]:
    """What stands before each of its underscores."""
    return (name[:i] for i, letter in enumerate(name) if letter == "_")


PLURALS = {"square": "squares", "exp": "exps", "abs": "magnitudes", "mul": "products"}
BETWEEN = {"eq": "is", "lt": "below", "gt": "above", "add": "plus", "sub": "minus", "mul": "times", "div": "over"}
NUMBERS = {0.0: "0", 1.0: "1", math.inf: "inf", -math.inf: "minus_inf"}
LONGEST = 16  # letters of an argument in another value's name
SMALLEST = 1e-3  # what is added below this keeps a divisor from 0


def made_of(name: str, other: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a kernel may use `name` for something of `other`: `x_vec` and `x_vec_next` are of `x`."""
    return name.startswith(f"{other}_") and f"{name[len(other) :]}_".startswith(tuple(f"{s}_" for s in suffixes))


def hides_frame(output: str) -> bool:
    """Whether a kernel calls something of its own by the name of an output and a suffix, as `store_row`."""
    frames = FRAME | SELECTION_FRAME | PRODUCT_FRAME
    return any(output + suffix in frames for suffix in TENSOR_SUFFIXES + FACTOR_SUFFIXES)
