// Stack switching: one `Context` per emulated thread.
//
// The hand-written switch saves what the calling convention says a callee keeps and nothing else: about 10 ns, where
// ucontext needs 250 ns because it also saves the signal mask with a system call. The x86-64 version is what the
// tests run. The aarch64 version follows the AAPCS64; it has run reductions and a timeout under QEMU 7.2, never on a
// real machine. Other machines take ucontext (-DSIMT_UCONTEXT forces it).
#pragma once

#include <cstdint>
#include <cstring>

#if !defined(SIMT_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define SIMT_UCONTEXT 1
#endif

#ifdef SIMT_UCONTEXT
#include <ucontext.h>
#endif

namespace simt {

#ifdef SIMT_UCONTEXT

struct Context {
  ucontext_t registers;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }

inline void prepare_context(Context& context, char* stack_low, char* stack_top, void (*entry)()) {
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack_low;
  context.registers.uc_stack.ss_size = static_cast<size_t>(stack_top - stack_low);
  context.registers.uc_link = nullptr;  // `entry` never returns
  makecontext(&context.registers, entry, 0);
}

#else

struct Context {
  void* stack_pointer;
};

extern "C" void simt_switch_stack(void** from_stack_pointer, void* to_stack_pointer);

inline void switch_context(Context& from, Context& to) { simt_switch_stack(&from.stack_pointer, to.stack_pointer); }

#if defined(__x86_64__)

inline void prepare_context(Context& context, char*, char* stack_top, void (*entry)()) {
  // At a function's first instruction the stack pointer is 8 below a multiple of 16: `ret` leaves it just so.
  void** slot = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack_top) & ~uintptr_t{15});
  *--slot = nullptr;                         // where a caller's return address would be
  *--slot = reinterpret_cast<void*>(entry);  // popped by `ret`
  for (int saved = 0; saved < 6; ++saved) {
    *--slot = nullptr;
  }
  context.stack_pointer = slot;
}

#else

constexpr int saved_bytes = 160;      // x19..x30 and d8..d15
constexpr int link_register_at = 88;  // x30 in that area

inline void prepare_context(Context& context, char*, char* stack_top, void (*entry)()) {
  char* top = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(stack_top) & ~uintptr_t{15});
  char* area = top - saved_bytes;
  std::memset(area, 0, saved_bytes);
  *reinterpret_cast<void**>(area + link_register_at) = reinterpret_cast<void*>(entry);
  context.stack_pointer = area;
}

#endif
#endif

}  // namespace simt
