"""op(chain, backward): a chain as an operator of JAX, which jax.jit, jax.grad and jax.vmap know.

It is a primitive of JAX: a rule says the shapes and types of its results while a function is traced, and another one
lowers it for the CPU or for NVIDIA GPUs to a custom call of XLA (https://docs.jax.dev/en/latest/ffi.html), which
launches the kernel on XLA's own memory and stream. The kernel is compiled where it is lowered, once for its row length.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, Literal

from fusegen.errors import ArgumentError, RequestError
from fusegen.jax import batches, ffi, handlers
from fusegen.jax.calls import Call, call_of
from fusegen.language.graph import Tensor
from fusegen.language.spec import Chain
from fusegen.language.types import DType, f32, size_of
from fusegen.operators import Gradients, Kernels, chain_of_gradients, sizes_of
from fusegen.runtime import arguments
from fusegen.runtime.arrays import CPU, NUMPY_DTYPES, ArrayView, contiguous_strides, wrong_dtype
from fusegen.targets import Target

RUNS_ON = {"cpu": "emulator", "cuda": "gpu"}  # what runs kernels on JAX's platforms
MOST_EAGER = 256  # calls outside of jax.jit, by operator and numbers, whose compiled functions are kept
Array = Any


def op(
    chain: Chain,
    backward: Chain | Literal["derived"] | None = None,
    *,
    gradients: Sequence[str] = (),
    target: str | Target | None = None,
    validate: bool = True,
    tuned: bool = True,
) -> Callable[..., Any]:
    """`chain` as a function of JAX's arrays, to be called under `jax.jit` or by itself; it returns the chain's output,
    or a tuple of them.

    It takes the chain's operands in their order or by name. Run-time scalars are Python's numbers, constants of what
    JAX compiles. Kernels run where JAX lowers the function to: on NVIDIA GPUs, or on the CPU in the emulator. One is
    compiled when a row length is first lowered, validated like those of `fusegen.compile`, which the other keywords are
    handed to, and planned for as many rows as the chain declares.

    `backward`: the chain of its gradients. Its operands go by their names: the chain's own operands, its outputs (one
    output alone is `out`), and `d<output>`, the gradient of one. `gradients` names the operands whose gradients its
    outputs are, in their order; outputs that are called `d<operand>` need no such list. "derived" is the chain that
    `fusegen.derive` makes, of all arrays of floats or of those named in `gradients`. Without it, gradients are refused.

    Raises RequestError for what is no chain, and where backward's names don't fit; SpecError where an op has no
    gradient to derive; MissingError without jax.
    """
    jax = ffi.need_jax()
    backward, gradients = chain_of_gradients("fusegen.jax.op", chain, backward, gradients)
    options = {"target": target, "validate": validate, "tuned": tuned}
    forward = Operator(chain, options)
    rule = None
    if backward is not None:
        rule = JaxGradients(chain.name, forward, Operator(backward, options), gradients)

    def computed(numbers: tuple[int, ...], *arrays: Array) -> tuple[Array, ...]:
        return forward.bind(numbers, arrays)

    computed.__name__ = chain.name  # as JAX prints it
    differentiable = jax.custom_vjp(computed, nondiff_argnums=(0,))
    if rule is None:
        differentiable.defvjp(partial(no_gradients, chain.name), partial(no_gradients, chain.name))
    else:
        differentiable.defvjp(rule.saved, rule.computed, symbolic_zeros=True)

    def call(*operands: Any, **named: Any) -> Any:
        numbers, arrays = forward.split(operands, named)
        found = differentiable(numbers, *alike(arrays))
        return found[0] if len(found) == 1 else tuple(found)

    call.__name__ = call.__qualname__ = chain.name
    call.__doc__ = chain.graph.doc
    call.__signature__ = forward.signature  # type: ignore[attr-defined]
    return call


def no_gradients(name: str, *_: Any) -> Any:
    raise RequestError(
        f"{name} has no chain of gradients\n  pass one, fusegen.jax.op({name}, backward), or stop them by "
        "jax.lax.stop_gradient in front of it"
    )


class Operator:
    """A chain, and its kernels on each platform."""

    def __init__(self, chain: Chain, options: Mapping[str, Any]) -> None:
        self.chain = chain
        self.graph = chain.graph
        self.kernels = {platform: Kernels(chain, {**options, "on": on}) for platform, on in RUNS_ON.items()}
        self.arrays = tuple(t for t in self.graph.inputs if t.shape)
        self.numbers = tuple(t for t in self.graph.inputs if not t.shape)
        places = {t.name: place for place, t in enumerate(self.arrays)}
        updates = self.graph.updates
        self.aliases = {
            places[updates[t.name]]: place for place, t in enumerate(self.graph.outputs) if t.name in updates
        }  # the operands in whose memory outputs are, and these, by their places
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.signature = inspect.Signature([inspect.Parameter(t.name, either) for t in self.graph.inputs])

    def __repr__(self) -> str:
        return self.graph.name  # as JAX prints it among the parameters of a primitive

    def split(self, operands: Sequence[Any], named: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[Array, ...]]:
        """The bits of the run-time scalars, and the arrays. Raises ArgumentError."""
        graph, jax = self.graph, ffi.need_jax()
        try:
            given = self.signature.bind(*operands, **named).arguments
        except TypeError as error:
            declared = ", ".join(f"{t.name}: {t.type}" for t in graph.inputs)
            raise ArgumentError(f"{graph.name} takes {declared}; found {error}") from None
        for tensor in self.numbers:
            if isinstance(given[tensor.name], jax.core.Tracer):
                raise ArgumentError(
                    f"{tensor.name} is traced by JAX, and {graph.name} takes {tensor.name}: {tensor.dtype}, a number "
                    "that is known while it traces\n"
                    f"  declare it {tensor.name}: {tensor.dtype}[1] in the spec, so that the kernel reads it where it "
                    "is, or name it in jax.jit's static_argnames"
                )
        numbers = tuple(bits(t.dtype, arguments.scalar(graph, t, given[t.name])) for t in self.numbers)
        return numbers, tuple(given[t.name] for t in self.arrays)

    def bind(self, numbers: tuple[int, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        """The primitive, called."""
        return tuple(primitive().bind(*arrays, operator=self, numbers=numbers))

    def results(self, arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and types of the results, for arrays that have such. Raises ArgumentError where those don't fit."""
        graph = self.graph
        views = {t.name: shown(t, array) for t, array in zip(self.arrays, arrays, strict=True)}
        whole = [views.get(t.name) for t in graph.inputs]
        sizes = sizes_of(graph, whole)
        arguments.check_dtypes(graph, views)
        return [(tuple(size_of(size, sizes) for size in t.shape), t.dtype.numpy) for t in graph.outputs]

    def calls(self, platform: str, numbers: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> list[Call]:
        """The call on each device of a platform, compiled now where it is a new row length."""
        shaped = dict(zip((t.name for t in self.arrays), map(Shaped, shapes), strict=True))
        kernel = self.kernels[platform].of([shaped.get(t.name) for t in self.graph.inputs])
        values = [number_of(t.dtype, one) for t, one in zip(self.numbers, numbers, strict=True)]
        devices = [kernel.device]
        if platform != "cpu":
            here = ffi.need_jax().local_devices(backend=platform)
            devices = [kernel.device.at(one.local_hardware_id) for one in here]
        made = [call_of(kernel, shapes, values, device) for device in devices]
        return [replace(call, key=made[0].key) for call in made]  # XLA's program is one for all of them


class Shaped:
    """Stands for an array of that shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def shown(tensor: Tensor, array: Any) -> ArrayView:
    """An array that JAX traces, without an address."""
    dtype = NUMPY_DTYPES.get(array.dtype)
    if dtype is None:
        raise wrong_dtype(tensor.name, array.dtype)
    shape = tuple(array.shape)
    return ArrayView(0, dtype, shape, contiguous_strides(shape), CPU, False, "jax")


def bits(dtype: DType, number: float) -> int:
    """A run-time scalar as JAX may compare it: 0.0 is not -0.0, and a NaN is itself."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0]) if dtype is f32 else int(number)


def number_of(dtype: DType, number: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", number))[0]) if dtype is f32 else number


# ---------------------------------------------------------------- the primitive


@cache
def primitive() -> Any:
    """What all operators are to JAX, with the operator and its run-time scalars as parameters."""
    ffi.need_jax()
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    made = Primitive("fusegen")
    made.multiple_results = True
    made.def_impl(by_itself)
    made.def_abstract_eval(traced)
    for platform in RUNS_ON:
        mlir.register_lowering(made, partial(lowered, platform), platform=platform)
    batching.primitive_batchers[made] = batches.batched
    ad.primitive_jvps[made] = no_derivative
    return made


def no_derivative(*_: Any, operator: Operator, numbers: tuple[int, ...]) -> Any:
    """Of what stands in a gradient: JAX's rule for op itself says all there is."""
    raise RequestError(
        f"{operator} has no derivative here: a chain has gradients, and these have none of their own\n"
        "  leave out the second derivative, or stop it by jax.lax.stop_gradient"
    )


def by_itself(*arrays: Array, operator: Operator, numbers: tuple[int, ...]) -> Any:
    """A call outside of jax.jit."""
    with ffi.need_jax().disable_jit(False):
        return jitted(operator, numbers)(*arrays)


@lru_cache(maxsize=MOST_EAGER)
def jitted(operator: Operator, numbers: tuple[int, ...]) -> Any:
    def call(*arrays: Array) -> tuple[Array, ...]:
        return operator.bind(numbers, arrays)

    call.__name__ = operator.graph.name
    return ffi.need_jax().jit(call)


def traced(*arrays: Any, operator: Operator, numbers: tuple[int, ...]) -> list[Any]:
    jax, found = ffi.need_jax(), operator.results(arrays)
    if not any(map(varies_over, arrays)):
        return [jax.core.ShapedArray(shape, dtype) for shape, dtype in found]
    # they vary as the operands do, which each version of JAX has words of its own for
    mesh, whole = arrays[0].sharding.mesh, jax.sharding.PartitionSpec
    kinds = [jax.sharding.NamedSharding(mesh, whole(*(None for _ in shape))) for shape, _ in found]
    return [
        arrays[0].update(shape=shape, dtype=dtype, weak_type=False, sharding=kind)
        for (shape, dtype), kind in zip(found, kinds, strict=True)
    ]


def varies_over(aval: Any) -> frozenset[str]:
    """Of jax.shard_map: the axes of devices over which an array has other contents."""
    kind = getattr(aval, "manual_axis_type", None)  # from JAX 0.10 on
    return frozenset(aval.vma if kind is None else kind.varying)


def alike(arrays: Sequence[Array]) -> Sequence[Array]:
    """The arrays, each said to have other contents wherever one of them has: so their gradients are added up over
    devices."""
    jax = ffi.need_jax()
    own = [varies_over(jax.typeof(array)) for array in arrays]
    axes = frozenset().union(*own)
    if not axes:
        return arrays
    missing = [tuple(sorted(axes - had)) for had in own]
    cast = partial(jax.lax.pcast, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary  # as earlier ones say
    return [cast(array, names) if names else array for array, names in zip(arrays, missing, strict=True)]


def lowered(platform: str, context: Any, *values: Any, operator: Operator, numbers: tuple[int, ...]) -> Any:
    """The custom call of XLA. A program's workspace is a result more, which nobody takes: XLA plans its memory like
    that of any other value between operators."""
    jax = ffi.need_jax()
    from jax.interpreters import mlir

    shapes = [tuple(aval.shape) for aval in context.avals_in]
    add = handlers.registered(platform)
    calls = operator.calls(platform, numbers, shapes)
    for call in calls:
        add(call)
    results = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in context.avals_out]
    if calls[0].workspace:
        results.append(jax.ShapeDtypeStruct((calls[0].workspace,), "uint8"))

    def custom_call(*arrays: Array) -> Any:
        made = jax.ffi.ffi_call(ffi.TARGET, results, input_output_aliases=operator.aliases)
        return list(made(*arrays, **{ffi.ATTRIBUTE: calls[0].key}))[: len(context.avals_out)]

    return mlir.lower_fun(custom_call, multiple_results=True)(context, *values)


# ---------------------------------------------------------------- gradients


class JaxGradients(Gradients):
    """How a chain of gradients is called: what is saved for it, and what it is given."""

    def __init__(self, name: str, forward: Operator, backward: Operator, gradients: Sequence[str]) -> None:
        super().__init__(name, forward.graph, backward.graph, gradients)
        own = {t.name: t for t in (*forward.graph.inputs, *forward.graph.outputs)}
        for tensor in backward.graph.inputs:
            other = own.get(tensor.name) or own[tensor.name[1:]]
            numbers = not tensor.shape or not other.shape
            if bool(tensor.shape) != bool(other.shape) or (numbers and tensor.dtype is not other.dtype):
                raise RequestError(
                    f"{name}: backward takes {tensor.name}: {tensor.type}, and {other.name} is {other.type} there\n"
                    "  declare a number alike in both chains"
                )
        self.forward, self.backward = forward, backward
        self.arrays = [t.name for t in forward.arrays]

    def saved(self, numbers: tuple[int, ...], *given: Any) -> Any:
        """The outputs, and what the backward chain takes. Raises RequestError where it lacks a gradient that is asked
        for."""
        for name, operand in zip(self.arrays, given, strict=True):
            if operand.perturbed and f"d{name}" not in self.made:
                raise RequestError(
                    f"{self.name}: the gradient of {name} is asked for, and backward has no output d{name}\n"
                    f"  return it there, or pass jax.lax.stop_gradient({name})"
                )
        arrays = [operand.value for operand in given]
        outputs = self.forward.bind(numbers, arrays)
        values = {**dict(zip(self.arrays, arrays, strict=True)), **dict(zip(self.outputs, outputs, strict=True))}
        return outputs, {name: values[name] for name in self.wanted if name in values}

    def computed(self, numbers: tuple[int, ...], kept: Mapping[str, Array], gradients: Sequence[Any]) -> Any:
        """The gradient of each operand that is an array, in its type; None for those that have none."""
        jax = ffi.need_jax()
        zeros = jax.custom_derivatives.SymbolicZero
        values: dict[str, Any] = dict(kept)
        for name, gradient in zip(self.outputs, gradients, strict=True):
            zero = isinstance(gradient, zeros)
            values[f"d{name}"] = jax.numpy.zeros(gradient.shape, gradient.dtype) if zero else gradient
        scalars = {t.name: one for t, one in zip(self.forward.numbers, numbers, strict=True)}
        own = tuple(scalars[t.name] for t in self.backward.numbers)
        made = self.backward.bind(own, [values[t.name] for t in self.backward.arrays])
        by_name = dict(zip(self.made, made, strict=True))
        types = [t.dtype.numpy for t in self.forward.arrays]
        found = [by_name.get(f"d{name}") for name in self.arrays]
        return tuple(None if one is None else one.astype(dtype) for one, dtype in zip(found, types, strict=True))
