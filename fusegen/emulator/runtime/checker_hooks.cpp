// Where the code that -fsanitize=thread and -fsanitize=undefined add to a kernel calls.
//
// The kernel is compiled with these options but not linked with their runtimes; the functions here take their place.
// That gives one call per access, with the size and the caller's address, in process and without LD_PRELOAD.
#ifdef SIMT_CHECK

#include "checker.h"

namespace simt {

struct SourceLocation {
  const char* file;
  u32 line;
  u32 column;
};

struct TypeDescriptor {
  u16 kind;
  u16 info;
  char name[1];
};

struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  u8 log_alignment;
  u8 check_kind;
};

struct OutOfBounds {
  SourceLocation location;
  const TypeDescriptor* array;
  const TypeDescriptor* index;
};

}  // namespace simt

#define CALLER __builtin_return_address(0)
#define SIMT_HOOKS(bytes)                                                                                           \
  void __tsan_read##bytes(void* p) { simt::check_access(p, bytes, simt::Access::read, true, CALLER); }              \
  void __tsan_write##bytes(void* p) { simt::check_access(p, bytes, simt::Access::write, false, CALLER); }           \
  void __tsan_unaligned_read##bytes(void* p) { simt::check_access(p, bytes, simt::Access::read, true, CALLER); }    \
  void __tsan_unaligned_write##bytes(void* p) { simt::check_access(p, bytes, simt::Access::write, false, CALLER); } \
  void __tsan_volatile_read##bytes(void* p) { simt::check_access(p, bytes, simt::Access::read, true, CALLER); }     \
  void __tsan_volatile_write##bytes(void* p) { simt::check_access(p, bytes, simt::Access::write, false, CALLER); }

#pragma GCC visibility push(default)
extern "C" {

SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)

void __tsan_read_range(void* p, unsigned long bytes) { simt::check_access(p, bytes, simt::Access::read, true, CALLER); }

void __tsan_write_range(void* p, unsigned long bytes) {
  simt::check_access(p, bytes, simt::Access::write, false, CALLER);
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

void __ubsan_handle_type_mismatch_v1_abort(simt::TypeMismatch* what, void* address) {
  simt::fail_at(simt::Fault::misaligned, CALLER, 0, "address %p is no multiple of %llu, the alignment of type %s",
                address, 1ull << what->log_alignment, what->type->name);
}

void __ubsan_handle_out_of_bounds_abort(simt::OutOfBounds* what, unsigned long index) {
  simt::fail_at(simt::Fault::out_of_bounds, CALLER, 0, "index %ld is outside the array of type %s",
                static_cast<long>(index), what->array->name);
}

void __ubsan_handle_divrem_overflow_abort(void*, unsigned long, unsigned long) {
  simt::fail_at(simt::Fault::divide_by_zero, CALLER, 0, "an integer is divided by zero");
}

void __ubsan_handle_shift_out_of_bounds_abort(void*, unsigned long, unsigned long by) {
  simt::fail_at(simt::Fault::shift, CALLER, 0, "shift by %ld bits", static_cast<long>(by));
}

}  // extern "C"
#pragma GCC visibility pop

#endif
