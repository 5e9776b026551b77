"""`@chain`: a typed Python function becomes an immutable op graph.

    M, N = dims("M N")

    @chain(M=8192, N=4096)
    def bias_relu(x: f16[M, N], bias: f16[N]) -> f16[M, N]:
        return F.relu(x + bias)

Annotations are values, sizes are defaults: `bias_relu.at(M=5, N=37)` is the same chain at other sizes. What is wrong
with a spec raises SpecError with one sentence that begins with its file and line.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib.util
import inspect
import keyword
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn, get_args, get_origin

from fusegen.errors import FusegenError, RequestError, SpecError, Where
from fusegen.language import notebook
from fusegen.language.advice import advice
from fusegen.language.eager import rounded, unrounded
from fusegen.language.graph import LARGEST_SIZE, Graph, Kind, Node, Operator, Tensor
from fusegen.language.naming import free_name, hides_frame
from fusegen.language.packing import number_of, returned_as_stored, stored_as
from fusegen.language.products import check_products
from fusegen.language.sizes import dims_in
from fusegen.language.spec_source import body_of
from fusegen.language.trace import OPS, Value, caller, shown, tracing
from fusegen.language.types import DTYPES, Dim, DType, TensorType, b8, shape_text, u32
from fusegen.language.views import View

TYPES = f"an operand's type is one of {', '.join(DTYPES)}, with its sizes: x: f16[M, N]"
NOT_PLAIN = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True, slots=True)
class Chain:
    """A traced chain, which is its graph. `at` gives it other sizes, `with_dtype` another storage type."""

    graph: Graph

    @property
    def name(self) -> str:
        return self.graph.name

    def __call__(self, *arguments: object) -> NoReturn:
        """A chain is no kernel and no op: raises SpecError that says how to get either."""
        if any(isinstance(argument, Value) for argument in arguments):
            raise SpecError(
                f"{self.name} is a chain, and a chain can't call another\n"
                "  put the steps that both share into a plain function, without @chain, and call that",
                caller(),
            )
        raise SpecError(f"{self.name} is a chain, not a kernel; fusegen.compile({self.name}) makes one to call")

    def at(self, /, **sizes: int) -> Chain:
        """The same chain at other sizes. Raises SpecError for an unknown dim or a size below 1 (rows: below 0)."""
        return Chain(self.graph.at(**sizes))

    def with_dtype(self, dtype: DType) -> Chain:
        """The same chain with every floating-point array stored as `dtype`. Raises SpecError for another type."""
        if not isinstance(dtype, DType) or dtype.kind != "float" or dtype.narrow:
            raise SpecError(f"{self.name}: arrays can't be stored as {dtype!s}; pass fusegen.f16, bf16 or f32")
        if self.graph.rounding == "eager":  # what operators store is of the new type too
            graph = rounded(unrounded(self.graph).with_dtype(dtype))
        else:
            graph = self.graph.with_dtype(dtype)
        check_products(graph)
        return Chain(graph)

    def __repr__(self) -> str:
        return f"<Chain {self.name} {self.graph.signature} at {self.graph.sizes_text()}>"

    def __str__(self) -> str:
        return f"{self.name}  {self.graph.signature}  {self.graph.sizes_text()}"

    def _repr_html_(self) -> str | None:
        """The op graph, for notebooks."""
        return notebook.drawn(self)


def chain(
    *bare: object, rounding: object = "fused", batch_invariant: object = False, **sizes: int
) -> Callable[[Callable[..., Any]], Chain]:
    """Trace the decorated function into a Chain; `sizes` gives every dim its default. Raises SpecError.

    `rounding`: "fused", values go on in f32 and are rounded where they are stored; "eager", behind each operator too,
    to the type that torch stores its result in, as when the operators run one after another. `batch_invariant`: a row
    has the same bits at whatever number of rows the chain is compiled, as by `compile(chain, batch_invariant=True)`.
    """

    def traced(function: Callable[..., Any]) -> Chain:
        if not isinstance(function, FunctionType) or function.__code__.co_flags & NOT_PLAIN:
            what = "a chain already" if isinstance(function, Chain) else "not a plain function"
            name = getattr(function, "name", None) or getattr(function, "__name__", repr(function))
            raise SpecError(f"@chain stands before a plain function, and {name} is {what}", caller())
        # annotations that are strings may name dims of the scope around the spec, a test's or a notebook cell's
        graph = trace_function(function, sizes, sys._getframe(1).f_locals, rounding == "eager")
        return Chain(replace(graph, batch_invariant=batch_invariant is True))

    if rounding not in ("fused", "eager"):
        raise SpecError(f"rounding={rounding!r}: it is 'fused' or 'eager', and no dim may be called so", caller())
    if not isinstance(batch_invariant, bool):
        said = f"batch_invariant={batch_invariant!r}: it is True or False, and no dim may be called so"
        raise SpecError(said, caller())
    if bare or (len(sizes) == 1 and callable(next(iter(sizes.values())))):
        raise SpecError("write @chain(M=..., N=...), with a default size for each dim by its name", caller())
    return traced


def trace_function(
    function: FunctionType, sizes: Mapping[str, int], scope: Mapping[str, Any], eager: bool = False
) -> Graph:
    """The graph of one function: signature, body, outputs; each step checks what it can and says what is wrong."""
    where = place_of(function)
    name = function.__name__
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        raise SpecError(f"{name!r} can't name a kernel; use letters, digits and underscores", where)
    types, declared = signature_of(function, where, scope)
    inputs = tuple(input_tensor(n, stored_as(t), i - len(types), where) for i, (n, t) in enumerate(types.items()))
    with tracing(function) as trace:
        trace.operands = {t.node: t for t in inputs}
        trace.eager = eager
        try:
            returned = function(*(number_of(t.node, own) for t, own in zip(inputs, types.values(), strict=True)))
            settle(returned)
            returned = returned_as_stored(returned, declared)
        except Exception as error:
            placed = (
                not isinstance(error, SpecError) or error.where is not None
            )  # what a dim says of itself has no place
            if isinstance(error, FusegenError) and placed:
                raise
            line = where_in(Path(function.__code__.co_filename), error).line or where.line
            said = str(error) if isinstance(error, SpecError) else while_it_ran(error)
            raise SpecError(said, Where(where.file, line)) from error
    declared = tuple(map(stored_as, declared))
    names = {**trace.names, **{t.node: t.name for t in inputs}}
    outputs = output_tensors(returned, declared, names, [t.name for t in inputs], where)
    graph = Graph(
        name=name,
        doc=printable(inspect.getdoc(function) or ""),
        body=printable(body_of(function).expandtabs(4)),
        where=where,
        inputs=inputs,
        outputs=outputs,
        names=names,
        sizes=checked_sizes({t.name: t.type for t in inputs}, declared, sizes, where),
    )
    if eager:
        graph = rounded(graph)
    graph.need_sizes()
    check_graph(graph)
    return graph


def printable(doc: str) -> str:
    """Text without control characters, odd line ends and lone surrogates: an author's goes into kernels' comments."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in doc)


def place_of(function: Callable[..., Any]) -> Where:
    return Where(shown(function.__code__.co_filename), function.__code__.co_firstlineno)


def signature_of(
    function: Callable[..., Any], where: Where, scope: Mapping[str, Any]
) -> tuple[dict[str, TensorType], tuple[TensorType, ...]]:
    """Parameter types by name, and the declared output types."""
    try:
        annotations = inspect.get_annotations(function, locals=scope, eval_str=True)
    except FusegenError:
        raise
    except Exception as error:
        said = f"the annotations of {function.__name__} can't be evaluated: {error}\n  {TYPES}"
        raise SpecError(said, where) from error
    types: dict[str, TensorType] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.default is not parameter.empty:
            raise SpecError(
                f"parameter {name!r}: operands are plain parameters, without defaults, * or **; "
                "literals belong in the body",
                where,
            )
        if name not in annotations:
            raise SpecError(f"parameter {name!r} has no type; annotate it, as in {name}: f16[M, N]", where)
        types[name] = tensor_type(annotations[name], f"parameter {name!r}", where)
    if not types:
        raise SpecError(f"{function.__name__} takes no operands", where)
    if "return" not in annotations:
        raise SpecError(f"{function.__name__} declares no output; annotate it, as in -> f16[M, N]", where)
    result = annotations["return"]
    if isinstance(result, tuple | list):
        written = (
            ", ".join(map(str, result)) if all(isinstance(t, TensorType) for t in result) else "f16[M, N], f32[M, 1]"
        )
        raise SpecError(f"several outputs are no {type(result).__name__} of types; write -> tuple[{written}]", where)
    parts: tuple[object, ...] = get_args(result) if str(get_origin(result)) == str(tuple) else (result,)
    outputs = tuple(tensor_type(part, "the output", where) for part in parts)
    if any(not t.shape for t in outputs):
        said = "an output is an array; a scalar can't be one"
        raise SpecError(f"{said}\n  one number, as a loss of all elements, is declared as f32[1]", where)
    return types, outputs


def tensor_type(annotation: object, what: str, where: Where) -> TensorType:
    if isinstance(annotation, TensorType):
        return annotation
    if isinstance(annotation, DType):
        if annotation.name not in ("f32", "i32", "u32"):
            raise SpecError(f"{what} is a run-time scalar of {annotation}; scalars are f32, i32 or u32", where)
        return TensorType(annotation, ())
    found = getattr(annotation, "__name__", None) or repr(annotation)
    raise SpecError(
        f"{what} has the unsupported type {found}; wanted {', '.join(DTYPES)} with a shape, as in f16[M, N], "
        "or a run-time scalar (f32, i32, u32)",
        where,
    )


def input_tensor(name: str, type: TensorType, index: int, where: Where) -> Tensor:
    node = Node(OPS["input"], (), type.shape, type.dtype.value, Operator(index, name, where))
    return Tensor(name, type, node)


def output_tensors(
    returned: object,
    declared: tuple[TensorType, ...],
    names: dict[Node, str],
    taken: list[str],
    where: Where,
) -> tuple[Tensor, ...]:
    """What the function returned, matched with what it declared; each output gets a name of its own."""
    if isinstance(returned, list):
        raise SpecError("the outputs are a list; return a tuple, as in return a, b", where)
    values = returned if isinstance(returned, tuple) else (returned,)
    if len(values) != len(declared):
        raise SpecError(f"outputs returned: {len(values)}, declared: {len(declared)}", where)
    outputs: list[Tensor] = []
    for index, (value, type) in enumerate(zip(values, declared, strict=True)):
        what = "the output" if len(declared) == 1 else f"output {index}"
        if not isinstance(value, Value):
            hint = "; does the function end with return?" if value is None else ""
            raise SpecError(f"{what} is {value!r}, not a value computed from the operands{hint}", where)
        node = value.node
        place = node.operator.where if node.op.kind is not Kind.INPUT else where
        if node.shape == (*type.shape, 1):  # one value a row, declared without the axis that was reduced
            node = dropped(node, (..., 0), "{0}[..., 0]")
            names[node] = names.get(value.node, node.operator.name)
        ones = len(node.shape) - len(type.shape)
        if ones > 0 and node.shape == (1,) * ones + type.shape:  # one value a column, declared without those of rows
            text = ", ".join(["0"] * ones)
            node = dropped(node, (0,) * ones, f"{{0}}[{text}]")
            names[node] = names.get(value.node, node.operator.name)
        if not node.shape and set(type.shape) == {1}:  # one number, of which all axes were left away
            node = dropped(node, (None,) * len(type.shape), "{0}[" + ", ".join(["None"] * len(type.shape)) + "]")
            names[node] = names.get(value.node, node.operator.name)
        if node.shape != type.shape:
            said = f"{what} has shape {shape_text(node.shape)}, declared is {shape_text(type.shape)}"
            raise SpecError(said, place)
        unlike = any((node.dtype is kind) != (type.dtype is kind) for kind in (b8, u32))
        if unlike or (node.dtype.kind, type.dtype.kind) in (
            ("int", "float"),
            ("float", "int"),
        ):
            raise SpecError(f"{what} is {node.dtype}, declared is {type.dtype}; convert it with F.cast", place)
        name = names.get(node, "out" if len(declared) == 1 else f"out{index}")
        if len(declared) == 1 or name in taken or not name.isascii():
            name = "out" if len(declared) == 1 else f"out{index}"
        name = free_name(f"{name}_value" if hides_frame(name) else name, taken)
        taken.append(name)
        outputs.append(Tensor(name, type, node))
    return tuple(outputs)


def settle(returned: object) -> None:
    """Make the nodes of what is returned: a transposed value has none before it is used."""
    for value in returned if isinstance(returned, tuple) else (returned,):
        if isinstance(value, Value):
            _ = value.node


def dropped(node: Node, key: tuple[Any, ...], text: str) -> Node:
    """[M, 1] as [M], [1, N] as [N], [] as [1]."""
    view = View.identity(node.shape).sliced(key)
    return Node(OPS["view"], (node,), view.shape, node.dtype, node.operator, view=view, text=text)


def checked_sizes(
    types: Mapping[str, TensorType], outputs: tuple[TensorType, ...], sizes: Mapping[str, int], where: Where
) -> dict[str, int]:
    """The default size of every dim that the signature names, in the order it names them."""
    used: dict[str, None] = {}
    for type in (*types.values(), *outputs):
        used.update((dim.name, None) for dim in dims_in(type.shape))
    if missing := [name for name in used if name not in sizes]:
        raise SpecError(f"dim {missing[0]} has no size; write @chain({missing[0]}=...)", where)
    if unknown := [name for name in sizes if name not in used]:
        said = f"@chain gives a size to {unknown[0]!r}, which the signature does not use"
        raise SpecError(
            f"{said}\n  drop it; where the body needs it, write the number there, or a constant of the file", where
        )
    for name in used:
        size = sizes[name]
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST_SIZE:
            raise SpecError(
                f"@chain({name}={size!r}): a size is an integer of at least 1 and at most {LARGEST_SIZE}", where
            )
    return {name: sizes[name] for name in used}


def check_graph(graph: Graph) -> None:
    """What only the whole graph can show: unused operands, outputs from nothing, sizes that are no constants. What no
    one kernel holds is no mistake: `fusegen.language.one_kernel`."""
    used = set(graph.nodes)
    for tensor in graph.inputs:
        if tensor.node not in used:
            raise SpecError(f"operand {tensor.name!r} is not used; use it or drop it", graph.where)
    for tensor in graph.outputs:
        if not any(n.op.kind is Kind.INPUT for n in graph.ancestors(tensor.node)):
            raise SpecError(f"output {tensor.name!r} does not depend on any operand", tensor.node.where)
    for node in graph.selections:
        check_picks(graph, node)
    for node in graph.scatters:
        check_written(graph, node)
    graph.need_columns()
    check_products(graph)


def check_written(graph: Graph, node: Node) -> None:
    """What F.scatter writes is returned, as the type that it has; nothing else reads its operand."""
    operand = graph.tensor_of[node.inputs[0]]
    returned = [t for t in graph.outputs if t.node is node]
    if len(returned) != 1:
        found = "not returned" if not returned else f"returned {len(returned)} times"
        raise SpecError(
            f"scatter: {operand.name} with its new rows is {found}\n"
            f"  return it, as {operand.type}: a call writes to the operand and gives it back",
            node.where,
        )
    if returned[0].dtype is not operand.dtype:
        raise SpecError(
            f"scatter: the output is declared {returned[0].type}, and {operand.name}, in whose memory it is, is "
            f"{operand.type}",
            node.where,
        )
    if len(graph.users[operand.node]) > 1 or any(t.node is operand.node for t in graph.outputs):
        raise SpecError(
            f"scatter: {operand.name} is read elsewhere too, before or behind its new rows are written\n"
            "  read what F.scatter gives",
            node.where,
        )


def check_picks(graph: Graph, selection: Node) -> None:
    """A selection keeps a known number of columns."""
    k = selection.shape[-1]
    if isinstance(k, Dim) and k.name not in graph.sizes:
        raise SpecError(
            f"{selection.operator}: k is {k}, which the signature does not name; write its number", selection.where
        )
    if isinstance(k, Dim) and k in selection.inputs[0].shape[:-1]:
        raise SpecError(
            f"{selection.operator}: k is {k}, which counts rows and varies by call; k is a constant of the kernel",
            selection.where,
        )


# ---------------------------------------------------------------- finding chains


def load_chains(path: str | Path, passed_over: Callable[[RequestError], None] | None = None) -> tuple[Chain, ...]:
    """Every chain in a file, in the order of their definition, or in a folder's `*.py` files, by name.

    `file.py:name` picks one. A spec is code and is run: load only what you trust. Raises RequestError when there is
    nothing to find, SpecError when a spec is wrong; those of a folder's files go to `passed_over`, if there is one, and
    the others are loaded all the same.
    """
    text = str(path)
    if not text:  # Path("") would be this folder, and a variable of a script that is empty by mistake would run it all
        raise RequestError("the spec's name is empty; name a file, a folder, or file.py:chain")
    file, _, wanted = text.partition(".py:")
    if wanted:
        found = load_file(Path(file + ".py"))
        for one in found:
            if one.name == wanted:
                return (one,)
        raise RequestError(f"{file}.py has no chain {wanted!r}; it has {', '.join(c.name for c in found)}")
    place = Path(text)
    if place.is_dir():
        files = sorted(p for p in place.glob("*.py") if not p.name.startswith("_"))
        chains: list[Chain] = []
        wrong = False
        for each in files:
            try:
                chains += load_file(each, need=False)
            except RequestError as error:
                if passed_over is None:
                    raise
                passed_over(error)
                wrong = True
        if not chains and not wrong:
            raise RequestError(f"{place} has no chain in it; a chain is a function under @chain(...)")
        return tuple(chains)
    return load_file(place)


def load_file(file: Path, need: bool = True) -> tuple[Chain, ...]:
    if not file.is_file():
        hint = f"; a size of a chain is an option: --set {file}" if "=" in str(file) else ""
        raise RequestError(f"there is no spec at {file}; name a file, a folder, or file.py:chain{hint}")
    if any("\udc80" <= c <= "\udcff" for c in str(file)):  # how Python writes bytes that are no UTF-8 (PEP 383)
        raise RequestError(f"the spec's name {str(file)!r} is not UTF-8, as fusegen's files are; rename it")
    label = "fusegen_spec_" + hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:12]
    loader = importlib.util.spec_from_file_location(label, file)
    if loader is None or loader.loader is None:
        raise RequestError(f"{file} can't be read as Python source")
    module = importlib.util.module_from_spec(loader)
    sys.modules[label] = module  # inspect.get_annotations finds the module's globals through it
    try:
        with staying():
            loader.loader.exec_module(module)
    except SpecError as error:
        if error.where is None:  # dims() and f16[...] know no place: they are also used outside of specs
            raise SpecError(str(error), where_in(file, error)) from error
        raise
    except (FusegenError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        raise SpecError(f"not Python: {error.msg}", Where(str(file), error.lineno or 0)) from error
    except BaseException as error:  # a spec that calls sys.exit() is wrong; fusegen goes on
        if isinstance(error, ValueError) and "null bytes" in str(error):  # a SyntaxError from Python 3.11.4 on
            raise SpecError(f"not Python: {error}", Where(str(file), 0)) from error
        where = where_in(file, error)
        if isinstance(error, OSError) and not where.line:  # of the file itself
            raise RequestError(f"{file} can't be read: {error.strerror or error}") from error
        raise SpecError(while_it_ran(error), where) from error
    finally:
        sys.modules.pop(label, None)
    found = tuple({id(v): v for v in vars(module).values() if isinstance(v, Chain)}.values())
    if need and not found:
        raise RequestError(f"{file} has no chain in it; a chain is a function under @chain(...)")
    return found


@contextmanager
def staying() -> Iterator[None]:
    """Let `os._exit()`, which no `except` could hold up, raise SystemExit inside: fusegen still has something to say.

    Processes that are forked meanwhile, and other threads, leave as they mean to.
    """
    leave, here = os._exit, (os.getpid(), threading.get_ident())

    def stay(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) != here:
            leave(status)
        raise SystemExit(status)

    os._exit = stay
    try:
        yield
    finally:
        os._exit = leave


def where_in(file: Path, error: BaseException) -> Where:
    """The innermost line of `file` that `error` came through."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file.resolve()]
    return Where(str(file), lines[-1] if lines else 0)


def while_it_ran(error: BaseException) -> str:
    return f"{type(error).__name__} while the spec ran: {error}{next_step(error)}"


def next_step(error: BaseException) -> str:
    """A further line for Python's own errors that people new to specs meet; empty for others."""
    from fusegen.language import ops

    said = str(error)
    local = re.search(r"local variable '(\w+)'", said)
    if isinstance(error, UnboundLocalError) and local and hasattr(builtins, local[1]):
        return f"\n  {local[1]} is Python's own, and a variable of the spec has its name: give that another one"
    if isinstance(error, ImportError) and error.name == ops.__name__ and (missing := re.search(r"'(\w+)'", said)):
        return f"\n  {advice(missing[1], ops.FUNCTIONS)}"
    if isinstance(error, ImportError) and error.name == "fusegen":
        return f"\n  {TYPES}"
    if isinstance(error, ImportError):
        return "\n  a spec is run as a file by itself: what it imports is installed, or in a folder on PYTHONPATH"
    if isinstance(error, TypeError):
        called = re.match(r"(\w+)\(\) ", said)
        function = vars(ops).get(called[1]) if called else None
        if called and not called[1].startswith("_") and callable(function):
            taken = inspect.signature(function).parameters.values()
            words = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in taken)
            return f"\n  it is called as F.{called[1]}({words})"
        if "does not support ufuncs" in said:
            return "\n  numpy's functions don't take traced values; use fusegen.ops, as in F.exp(x)"
        if said.endswith("not Value"):
            return "\n  another library's functions don't take traced values; use fusegen.ops, as in F.exp(x)"
        if "not subscriptable" in said:
            return f"\n  {TYPES}"
    return ""
