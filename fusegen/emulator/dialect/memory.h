// Loads and stores with a cache hint, copies, fences, and what is left of the host's world: printf, assert, clocks.
//
// The hinted loads are macros, not functions: the access then stands on the kernel's own line.
#pragma once

#define __ldg(pointer) (*(pointer))
#define __ldcg(pointer) (*(pointer))
#define __ldca(pointer) (*(pointer))
#define __ldcs(pointer) (*(pointer))
#define __ldlu(pointer) (*(pointer))
#define __ldcv(pointer) (*(pointer))
#define __stcs(pointer, value) ((void)(*(pointer) = (value)))
#define __stcg(pointer, value) ((void)(*(pointer) = (value)))
#define __stwb(pointer, value) ((void)(*(pointer) = (value)))
#define __stwt(pointer, value) ((void)(*(pointer) = (value)))
#ifndef __clang__
#define __builtin_nontemporal_load(pointer) (*(pointer))
#define __builtin_nontemporal_store(value, pointer) ((void)(*(pointer) = (value)))
#endif

// A library call is not instrumented, so copies say themselves what they touch.
SIMT_INLINE void* simt_copy(void* to, const void* from, size_t bytes) {
#ifdef SIMT_CHECK
  simt::note_read(from, bytes);
  simt::note_write(to, bytes);
#endif
  return __builtin_memcpy(to, from, bytes);
}
SIMT_INLINE void* simt_move(void* to, const void* from, size_t bytes) {
#ifdef SIMT_CHECK
  simt::note_read(from, bytes);
  simt::note_write(to, bytes);
#endif
  return __builtin_memmove(to, from, bytes);
}
SIMT_INLINE void* simt_fill(void* to, int byte, size_t bytes) {
#ifdef SIMT_CHECK
  simt::note_write(to, bytes);
#endif
  return __builtin_memset(to, byte, bytes);
}
#define memcpy simt_copy
#define memmove simt_move
#define memset simt_fill

SIMT_INLINE void __threadfence() { simt::fence(); }
SIMT_INLINE void __threadfence_system() { simt::fence(); }
SIMT_INLINE void __threadfence_block() {}
#define __builtin_amdgcn_fence(order, ...) ((void)0)  // of a scope, and of address spaces if it names some
SIMT_INLINE void __nanosleep(unsigned) { simt::yield_now(); }

template <class... Values>
SIMT_INLINE int printf(const char* format, Values... values) {
  return simt::device_printf(format, values...);
}
#define assert(condition) \
  ((condition) ? (void)0 : simt::fail(simt::Fault::trap, __LINE__, "assertion fails: %s", #condition))
SIMT_INLINE void __trap(SIMT_LINE) { simt::fail(simt::Fault::trap, line, "the kernel trapped"); }
#ifndef __clang__
#ifdef SIMT_CHECK
#define __builtin_assume(condition) \
  ((condition) ? (void)0 : simt::fail(simt::Fault::trap, __LINE__, "assumption is wrong: %s", #condition))
#else
#define __builtin_assume(condition) ((condition) ? (void)0 : __builtin_unreachable())
#endif
#endif

SIMT_INLINE long long clock64() { return simt::clock_ticks(); }
SIMT_INLINE long long wall_clock64() { return simt::clock_ticks(); }
SIMT_INLINE int clock() { return static_cast<int>(simt::clock_ticks()); }
