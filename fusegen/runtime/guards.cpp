// What torch's guards (fusegen/runtime/guards.py) say of tensors, and where these are, read from torch's own structs:
// in a twentieth of the time. Compiled against the headers that torch brings along, for exactly that torch, and held
// against its guards before anybody asks.
//
// IMPL, given to the compiler, is how many bytes behind the start of a tensor's Python object its TensorImpl is said.

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
// and now (layout, modes and lazy negation among it), dtype, place, gradient, sizes and strides.
template <typename Word>
bool tell(const c10::TensorImpl &tensor, const Mode &mode, Word word)
{
    if (!word(static_cast<int64_t>(((tensor.key_set() | mode.included_) - mode.excluded_).raw_repr()))
        || !word(static_cast<int64_t>(tensor.dtype().toScalarType())))
        return false;
    const auto device = tensor.device();
    if (!word(static_cast<int64_t>(device.type())) || !word(device.index()) || !word(tensor.requires_grad()))
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

// Both take what Python knows to be tensors, with Python's lock held. Torch throws for those of which it can't tell
// these things.
#define EXPORTED extern "C" __attribute__((visibility("default")))

// Writes down what tensors are like, if `traits` is a place for it: so many numbers, or -1 where torch can't tell.
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

// Whether as many tensors are like those that were noted (NULL: whatever they are like), and their addresses.
EXPORTED int alike(const void *const *tensors, ptrdiff_t count, const int64_t *traits, uint64_t *addresses) noexcept
try {
    const auto mode = c10::impl::tls_local_dispatch_key_set();
    for (ptrdiff_t i = 0; i < count; i++) {
        auto &tensor = read(tensors[i]);
        if (traits && !tell(tensor, mode, [&](int64_t trait) { return trait == *traits++; }))
            return 0;
        addresses[i] = reinterpret_cast<uintptr_t>(tensor.mutable_data());
    }
    return 1;
} catch (...) {
    return 0;
}
