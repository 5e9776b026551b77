"""Whether tensors are like those of an earlier call: torch's guards say it, and C++ repeats what they said.

    guard(tensors)     torch's own guards for tensors like these
    guards_hold()      whether this torch has guards that tell apart what they must
    begin(module)      starts a thread that gets C++ (`guards.cpp`) for the module of shortcut.c: guards, fresh tensors

`TensorGuards`, which torch.compile calls before each of its graphs, is the law. C++ notes what the guards compared of
the first tensors that they let pass, compares later ones with that, and makes results as torch made the first ones. For
six tensors it takes 58 ns, the guards 1052 (docs/measurements.md, "Guards of tensors").

Before C++ is used it has to tell the same tensors apart as the guards, and to make tensors as torch does. Compiling it
takes a second or two, in a thread, once for each torch. Without a C++ compiler, the guards are asked at each call. The
logger `fusegen.shortcuts` says on DEBUG why.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from fusegen.errors import MissingError
from fusegen.runtime import background, native
from fusegen.storage.libraries import LibraryKey, Wait, kept

log = logging.getLogger("fusegen.shortcuts")

SOURCE = Path(__file__).with_name("guards.cpp")
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
COMPILERS = ("c++", "g++", "clang++")  # not zig's, whose standard library is not torch's
HINT = "apt install g++"
LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")  # of torch
WORD = 8  # bytes


class Functions(NamedTuple):
    """Of guards.cpp, as ctypes has them."""

    note: Any
    alike: Any
    unwatched: Any
    form: Any
    make: Any


# ---------------------------------------------------------------- torch's own


def guard(tensors: Sequence[Any]) -> Callable[..., bool]:
    """Whether as many tensors are like these: a function of torch's own. Where one of them requires a gradient, they
    are only while torch computes none, which the guards leave out."""
    from torch._C._dynamo.guards import TensorGuards

    found: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if not any(tensor.requires_grad for tensor in tensors):
        return found
    differentiates = sys.modules["torch"].is_grad_enabled
    return lambda *others: not differentiates() and found(*others)


@cache
def guards_hold() -> bool:
    """Whether this torch has the guards and they tell apart what they must; they are no public part of torch."""
    torch = sys.modules["torch"]
    try:
        one, alike, others = examples()
        others = (*others, torch.nn.Parameter(one, requires_grad=False), one.numpy(), None)
        like = guard((one, one))
        hold = like(one, alike) and not any(like(a, b) for x in others for a, b in ((one, x), (x, one)))
    except (AttributeError, ImportError, TypeError, RuntimeError) as error:
        log.debug("no shortcuts: torch %s has other guards: %r", torch.__version__, error)
        return False
    if not hold:
        log.debug("no shortcuts: the guards of torch %s don't tell all tensors apart", torch.__version__)
    return bool(hold)


def examples() -> tuple[Any, Any, tuple[Any, ...]]:
    """A tensor, another one like it, and some that are not, each in its own way."""
    torch = sys.modules["torch"]
    one, alike = (torch.zeros(4, 6, dtype=torch.float32, device="cpu") for _ in range(2))
    others = (
        one.to(torch.int32),
        one.to("meta"),
        one[:3].clone(),
        one.new_zeros(4, 7)[:, :6],
        one.new_zeros(6, 4).t(),
        one.new_zeros(1, 6).expand(4, 6),
        one[None].clone(),
        one.to_sparse(),
        torch._neg_view(one),
        one.clone().requires_grad_(),
    )
    return one, alike, others


# ---------------------------------------------------------------- the same in C++


@cache
def begin(module: Any) -> Future[bool]:
    """Get the functions in the background, and let the module have them. Whether it does."""
    try:
        found = background.begun(partial(give, module, background.wait), "fusegen-guards")
    except RuntimeError as error:  # no further threads here
        found = Future()
        found.set_result(without(error))
    return found


def give(module: Any, wait: Wait) -> bool:
    """Let the module of shortcut.c read tensors by the functions of guards.cpp, where they can be had."""
    try:
        found = get(wait)
        if not sees(found):
            log.debug("operators of torch take its dispatcher: %s doesn't see all that watches them", SOURCE.name)
            found = found._replace(unwatched=None)
        module.read_by(*map(address, found))
    except Exception as error:  # whatever it is, calls go on without
        return without(error)
    return True


def without(error: Exception) -> bool:
    log.debug("torch's guards are asked at each call, which takes some 1 us more: %s", str(error) or repr(error))
    return False


def get(wait: Wait = subprocess.Popen.communicate) -> Functions:
    """The functions of guards.cpp, from the cache or compiled now.

    Raises MissingError, CompileError and OSError; and MissingError where they don't know this torch.
    """
    torch = sys.modules["torch"]
    home = Path(torch.__path__[0])
    header, place = home / "include/c10/core/TensorImpl.h", impl_offset()
    if not header.exists():
        raise MissingError(f"torch's headers are missing here: no {header}")
    command = (
        *compiler(), *FLAGS, f"-DIMPL={place}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-isystem{home / 'include'}", str(SOURCE), *(str(home / "lib" / name) for name in LIBRARIES),
    )  # fmt: skip
    text = hashlib.sha256(SOURCE.read_bytes() + header.read_bytes()).hexdigest()
    key = LibraryKey(SOURCE.stem, f"torch-{torch.__version__}", text, shlex.join(command))
    library = kept(key, lambda: command, ".so", load, wait)
    found = Functions(library.note, library.alike, library.unwatched, library.form, library.make)
    if not holds(found):
        raise MissingError(f"{SOURCE.name} doesn't tell all tensors of torch {torch.__version__} apart")
    if not makes(found):
        raise MissingError(f"{SOURCE.name} doesn't make tensors as torch {torch.__version__} does")
    return found


def compiler() -> tuple[str, ...]:
    """The words of $CXX, else c++, g++ or clang++. Raises MissingError."""
    if found := native.first_command("CXX", COMPILERS):
        return found
    raise MissingError(f"there is no C++ compiler here\n  to get it: {HINT}")


def impl_offset() -> int:
    """How many bytes behind the start of a tensor's Python object the address of its TensorImpl is.

    Looked for, since the header that tells takes a compiler ten seconds. Raises MissingError.
    """
    torch = sys.modules["torch"]
    found: set[int] | None = None
    for tensor in (torch.zeros(2, device="cpu"), torch.nn.Parameter(torch.zeros(2, device="cpu"))):
        size = type(tensor).__basicsize__ // WORD
        words = (ctypes.c_uint64 * size).from_address(id(tensor))
        here = {WORD * place for place in range(size) if words[place] == tensor._cdata}
        found = here if found is None else found & here
    if not found or len(found) > 1:
        raise MissingError(f"tensors of torch {torch.__version__} don't say where their TensorImpl is")
    return found.pop()


def load(library: Path) -> Any:
    found = ctypes.PyDLL(str(library))  # what keeps Python's lock
    found.note.restype = found.form.restype = ctypes.c_ssize_t
    found.make.restype = ctypes.c_void_p
    return found


def address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def holds(functions: Functions) -> bool:
    """Whether the functions tell apart what guards must, and find what they tell alike where it is."""
    torch = sys.modules["torch"]
    one, other, others = examples()
    shifted = torch.zeros(5, 6, dtype=torch.float32, device="cpu")[1:]

    def like(traits: Any, tensor: Any) -> bool:
        place = ctypes.c_uint64()
        found = functions.alike(objects(tensor), ctypes.c_ssize_t(1), traits, ctypes.byref(place))
        return bool(found) and place.value == tensor.data_ptr()

    gradient = one.clone().requires_grad_()
    with torch.no_grad():
        traits = written(functions.note, gradient)
        if traits is None or not like(traits, gradient):
            return False
    with torch.enable_grad():
        if like(traits, gradient):
            return False
    traits = written(functions.note, one)
    if traits is None or not all(like(traits, tensor) for tensor in (one, other, shifted)):
        return False
    with torch.inference_mode():
        if like(traits, one):
            return False
    return not any(like(traits, tensor) for tensor in others)


def makes(functions: Functions) -> bool:
    """Whether the functions make of a tensor's form what torch makes, and know what takes more than that."""
    torch = sys.modules["torch"]
    one, _, _ = examples()
    views = one[1:], one.t()[2:], one.clone().requires_grad_()
    if any(written(functions.form, view) is not None for view in views):
        return False
    for tensor in (one, one.new_empty(3, 1, 5, dtype=torch.bfloat16), one.new_empty((), dtype=torch.int32)):
        form = written(functions.form, tensor)
        if form is None:
            return False
        forms, place = ctypes.c_void_p(ctypes.addressof(form)), ctypes.c_uint64()
        made = remade(functions, forms, place)
        if (
            made is None
            or forms.value != ctypes.addressof(form) + ctypes.sizeof(form)
            or place.value != made.data_ptr()
        ):
            return False
        if not guard((tensor,))(made) or made._version or made.data_ptr() == tensor.data_ptr():
            return False
        if made.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            return False
    return True


def sees(functions: Functions) -> bool:
    """Whether the functions tell calls of an operator that go straight to its kernel from those that torch's modes,
    transforms and profilers are to see."""
    torch = sys.modules["torch"]
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    def unwatched(tensor: Any) -> bool:
        return bool(functions.unwatched(objects(tensor), ctypes.c_ssize_t(1)))

    one, alike, _ = examples()
    wanted = one.clone().requires_grad_()
    straight = [unwatched(one), unwatched(alike)]
    watched = [unwatched(one.to_sparse()), unwatched(torch._neg_view(one)), unwatched(one.to("meta"))]
    with torch.enable_grad():
        watched.append(unwatched(wanted))
    with torch.no_grad():
        straight.append(unwatched(wanted))
    with torch.inference_mode():
        straight += [unwatched(one), unwatched(one.clone())]
    for mode in TorchFunctionMode(), TorchDispatchMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        with mode:
            watched.append(unwatched(one))
    return all(straight) and not any(watched)


def remade(functions: Functions, forms: Any, place: Any) -> Any:
    """A tensor of the first of `forms`, which go on to the next one, and its `place`; None without memory for it."""
    found = functions.make(ctypes.byref(forms), ctypes.byref(place))
    if not found:
        return None
    made = ctypes.cast(found, ctypes.py_object).value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(made))  # the reference that came; `made` is one of its own
    return made


def written(write: Any, *tensors: Any) -> Any:
    """The numbers that `note` or `form` writes of tensors; None where it can't."""
    given = objects(*tensors), ctypes.c_ssize_t(len(tensors))
    size = write(*given, None)
    numbers = (ctypes.c_int64 * max(size, 0))()
    return numbers if size > 0 and write(*given, numbers) == size else None


def objects(*tensors: Any) -> Any:
    """The Python objects' addresses, as C has them."""
    return (ctypes.c_void_p * len(tensors))(*map(id, tensors))
