// What torch's guards (fusegen/runtime/guards.py) say of tensors, and where these are, read from torch's own structs:
// in a twentieth of the time. And fresh tensors like one that torch made, in half of it. Compiled against the headers
// that torch brings along, for exactly that torch, and held against its guards before anybody asks.
//
// IMPL, given to the compiler, is how many bytes behind the start of a tensor's Python object its TensorImpl is said.

#include <ATen/core/TensorBase.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstddef>
#include <cstdint>

#ifndef __GLIBCXX__
#error "torch's structs are those of libstdc++"
#endif

namespace {

using Mode = c10::impl::LocalDispatchKeySet;

c10::TensorImpl &read(const void *tensor)
{
    return **reinterpret_cast<c10::TensorImpl *const *>(static_cast<const char *>(tensor) + IMPL);
}

// Tells `word` of everything in which like tensors are the same, until it says no: what torch would dispatch on here
// and now (layout, modes and lazy negation among it), dtype, place, whether a gradient is wanted, sizes and strides.
template <typename Word>
bool tell(const c10::TensorImpl &tensor, const Mode &mode, Word word)
{
    if (!word(static_cast<int64_t>(((tensor.key_set() | mode.included_) - mode.excluded_).raw_repr()))
        || !word(static_cast<int64_t>(tensor.dtype().toScalarType())))
        return false;
    const auto device = tensor.device();
    const auto gradient = tensor.requires_grad() ? 1 + c10::GradMode::is_enabled() : 0;
    if (!word(static_cast<int64_t>(device.type())) || !word(device.index()) || !word(gradient))
        return false;
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    if (!word(static_cast<int64_t>(sizes.size())))
        return false;
    for (const auto size : sizes)
        if (!word(size))
            return false;
    for (const auto stride : strides)
        if (!word(stride))
            return false;
    return true;
}

}  // namespace

struct _object *THPVariable_Wrap(const at::TensorBase &tensor);  // of libtorch_python: to a PyObject

// Of libtorch_cpu. The headers that declare them take a compiler seconds.
namespace at {
bool hasCallbacks();
namespace impl {
bool torch_function_mode_enabled();
}
}  // namespace at

// All take what Python knows to be tensors, with Python's lock held. Torch throws for those of which it can't tell these
// things. What they write down is so many numbers, or -1 where torch can't tell; they write if there is a place for it.
#define EXPORTED extern "C" __attribute__((visibility("default")))

// Writes down what tensors are like.
EXPORTED ptrdiff_t note(const void *const *tensors, ptrdiff_t count, int64_t *traits) noexcept
try {
    const auto mode = c10::impl::tls_local_dispatch_key_set();
    ptrdiff_t size = 0;
    for (ptrdiff_t i = 0; i < count; i++)
        tell(read(tensors[i]), mode, [&](int64_t trait) {
            if (traits)
                traits[size] = trait;
            size++;
            return true;
        });
    return size;
} catch (...) {
    return -1;
}

// Whether as many tensors are like those that were noted, and their addresses.
EXPORTED int alike(const void *const *tensors, ptrdiff_t count, const int64_t *traits, uint64_t *addresses) noexcept
try {
    const auto mode = c10::impl::tls_local_dispatch_key_set();
    for (ptrdiff_t i = 0; i < count; i++) {
        auto &tensor = read(tensors[i]);
        if (!tell(tensor, mode, [&](int64_t trait) { return trait == *traits++; }))
            return 0;
        addresses[i] = reinterpret_cast<uintptr_t>(tensor.mutable_data());
    }
    return 1;
} catch (...) {
    return 0;
}

// Whether torch, asked for an operator of these tensors here and now, would do no more than call its kernel: no mode
// and no transform looks on, no profiler counts, nothing is cast by autocast and no gradient wanted.
EXPORTED int unwatched(const void *const *tensors, ptrdiff_t count) noexcept
try {
    // Backends are no keys that a set of keys can be asked without: as bits they are.
    using c10::DispatchKey, c10::DispatchKeySet;
    constexpr auto aside = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
    constexpr auto plain = aside | DispatchKeySet(DispatchKey::CPU) | DispatchKeySet(DispatchKey::CUDA);
    const auto mode = c10::impl::tls_local_dispatch_key_set();
    if (mode.included_.raw_repr() & ~c10::default_included_set.raw_repr()
        || mode.excluded_.raw_repr() & ~aside.raw_repr()
        || c10::default_excluded_set.raw_repr() & ~mode.excluded_.raw_repr())
        return 0;
    const bool differentiates = c10::GradMode::is_enabled();
    for (ptrdiff_t i = 0; i < count; i++) {
        const auto &tensor = read(tensors[i]);
        if (tensor.key_set().raw_repr() & ~plain.raw_repr() || (differentiates && tensor.requires_grad()))
            return 0;
    }
    return !at::impl::torch_function_mode_enabled() && !at::hasCallbacks();
} catch (...) {
    return 0;
}

// Writes down what it takes to make tensors like these, which torch has just made; also -1 where it takes more than
// memory, a dtype, sizes and strides.
EXPORTED ptrdiff_t form(const void *const *tensors, ptrdiff_t count, int64_t *forms) noexcept
try {
    ptrdiff_t size = 0;
    const auto write = [&](int64_t number) {
        if (forms)
            forms[size] = number;
        size++;
    };
    for (ptrdiff_t i = 0; i < count; i++) {
        auto &tensor = read(tensors[i]);
        const auto &storage = tensor.storage();
        if (!storage.allocator() || storage.data() != tensor.data() || tensor.requires_grad())
            return -1;
        write(reinterpret_cast<intptr_t>(storage.allocator()));
        write(static_cast<int64_t>(tensor.key_set().raw_repr()));
        write(static_cast<int64_t>(tensor.dtype().toScalarType()));
        write(static_cast<int64_t>(storage.nbytes()));
        write(tensor.dim());
        for (const auto extent : tensor.sizes())
            write(extent);
        for (const auto stride : tensor.strides())
            write(stride);
    }
    return size;
} catch (...) {
    return -1;
}

// A new reference to a fresh tensor, on the current device and for the current stream, its address, and the next form.
// It is what at::detail::empty_strided_generic does, with nothing left to find out. NULL where torch throws, as without
// memory: it says why where it is asked for the same in Python.
EXPORTED struct _object *make(const int64_t **forms, uint64_t *address) noexcept
try {
    const auto form = *forms;
    const auto allocator = reinterpret_cast<c10::Allocator *>(static_cast<intptr_t>(form[0]));
    const auto bytes = static_cast<size_t>(form[3]), axes = static_cast<size_t>(form[4]);
    auto storage = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator, /*resizable=*/true);
    const at::TensorBase made(c10::make_intrusive<c10::TensorImpl>(
        c10::Storage(std::move(storage)), c10::DispatchKeySet::from_raw_repr(static_cast<uint64_t>(form[1])),
        c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(form[2]))));
    auto &tensor = *made.unsafeGetTensorImpl();
    tensor.set_sizes_and_strides({form + 5, axes}, {form + 5 + axes, axes});
    *address = reinterpret_cast<uintptr_t>(tensor.mutable_data());
    *forms = form + 5 + 2 * axes;
    return THPVariable_Wrap(made);
} catch (...) {
    return nullptr;
}
