// What a warpgroup, four warps that multiply together, has issued and not waited for.
#pragma once

#include <deque>
#include <vector>

#include "../dialect/simt.h"

namespace simt {

constexpr u32 warpgroup_threads = 128;

struct Span {
  const char* low;
  const char* high;

  void include(const float* value) {
    const auto* first = reinterpret_cast<const char*>(value);
    low = low && low < first ? low : first;
    high = high > first + sizeof *value ? high : first + sizeof *value;
  }
  void include(const Span& other) {
    low = low && low < other.low ? low : other.low;
    high = high > other.high ? high : other.high;
  }
  bool meets(const char* place, u64 bytes) const { return place < high && low < place + bytes; }
};

// Of one thread.
struct WgmmaOrder {
  u32 group = 0;        // that an instruction issued now belongs to: counts the thread's commits
  u32 pending = 0;      // instructions that it has not waited for
  bool fenced = false;  // by wgmma.fence, and the latest accumulators have not been touched since
  bool arrived = false;
  const char* low = nullptr;  // of the latest accumulators, where they are one array
  const char* high = nullptr;
  Span under_way{};  // from the first register of an instruction that it has not waited for to the last
};

// A factor in shared memory, by rows of A or columns of B: how its lines lie, by the fields of a descriptor.
struct MatrixLayout {
  u64 start;
  u64 leading;  // byte offsets
  u64 stride;
  u32 span;     // bytes that a swizzle permutes, 16 without one
  u32 permute;  // which of the bits 7 to 9 count
};

// What one instruction reads: 32 bytes deep, 16 numbers of 16 bits, 8 of tf32, 32 of 8 bits.
struct SharedMatrix {
  MatrixLayout layout;
  u32 rows;  // of A, or columns of B
  Number number;
  bool transposed;  // rows, and not the depth, are contiguous
  u32 block;        // by its rank, in whose shared memory it lies

  u32 chunk() const { return of_8_bits(number) ? 16 : number == Number::tf32 ? 4 : 8; }  // elements of 16 bytes
};

struct Wgmma {
  Number number;  // of A; of B one as wide
  u32 n;
  u32 group;

  u32 chunk() const { return of_8_bits(number) ? 16 : number == Number::tf32 ? 4 : 8; }  // elements of 16 bytes
  u32 depth() const { return 2 * chunk(); }

  bool a_in_registers;
  SharedMatrix a;
  SharedMatrix b;
  bool adds;   // to what the accumulators hold
  float sign;  // of the product
  const void* site;
  std::vector<WgmmaOperand> fragments;  // of A: four registers a thread
  std::vector<float*> sums;    // n / 2 a thread; of whole numbers s32 in the same places
  std::vector<float> addends;  // likewise; none if an earlier instruction gives them
  Span spans[warpgroup_threads] = {};  // from a thread's first accumulator to its last, mostly one array
  bool landed = false;
  bool finished = false;  // some thread has waited for it
  u32 phase = 0;          // of its reads, in the checking build
  bool waited[warpgroup_threads] = {};
  u32 waits = 0;
};

struct WgmmaIssue;

struct Warpgroup {
  u32 first_thread;
  u32 arrived = 0;
  int line = 0;
  const WgmmaIssue* issues[warpgroup_threads];
  std::deque<Wgmma> pending;
};

}  // namespace simt
