// Atomic updates. In the fast build a compare-and-swap on real memory, since blocks run on several threads; in the
// checking build the checker is told, and nothing can come between.
#pragma once

namespace simt {

#ifdef SIMT_CHECK
template <class T, class Change>
SIMT_INLINE T update(T* place, Change change) {
  u64 before = atomic_begin(place, sizeof(T));
  T old = from_bits<T>(before);
  atomic_commit(place, sizeof(T), to_bits<T>(change(old)));
  return old;
}
#else
template <class T, class Change>
SIMT_INLINE T update(T* place, Change change) {
  using Bits = typename BitsOf<sizeof(T)>::type;
  if (--current_thread->block->updates_until_yield == 0) {
    yield_now();
  }
  Bits* bits = reinterpret_cast<Bits*>(place);
  Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED);
  Bits after;
  do {
    after = static_cast<Bits>(to_bits<T>(change(from_bits<T>(before))));
  } while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
  return from_bits<T>(before);
}
#endif

}  // namespace simt

#define SIMT_ATOMIC(name, expression)                                       \
  template <class T>                                                        \
  SIMT_INLINE T name(T* place, simt::NotDeduced<T> value) {                 \
    return simt::update(place, [value](T old) -> T { return expression; }); \
  }                                                                         \
  template <class T>                                                        \
  SIMT_INLINE T name##_block(T* place, simt::NotDeduced<T> value) {         \
    return name(place, value);                                              \
  }                                                                         \
  template <class T>                                                        \
  SIMT_INLINE T name##_system(T* place, simt::NotDeduced<T> value) {        \
    return name(place, value);                                              \
  }

SIMT_ATOMIC(atomicAdd, static_cast<T>(old + value))
SIMT_ATOMIC(atomicSub, static_cast<T>(old - value))
SIMT_ATOMIC(atomicMax, old < value ? value : old)
SIMT_ATOMIC(atomicMin, value < old ? value : old)
SIMT_ATOMIC(atomicExch, value)
SIMT_ATOMIC(atomicAnd, (old & value))
SIMT_ATOMIC(atomicOr, old | value)
SIMT_ATOMIC(atomicXor, old ^ value)
SIMT_ATOMIC(atomicInc, old >= value ? T(0) : T(old + 1))
SIMT_ATOMIC(atomicDec, old == T(0) || old > value ? value : T(old - 1))

template <class T>
SIMT_INLINE T atomicCAS(T* place, simt::NotDeduced<T> expected, simt::NotDeduced<T> value) {
  return simt::update(
      place, [expected, value](T old) -> T { return simt::to_bits(old) == simt::to_bits(expected) ? value : old; });
}
template <class T>
SIMT_INLINE void unsafeAtomicAdd(T* place, simt::NotDeduced<T> value) {
  atomicAdd(place, value);
}
