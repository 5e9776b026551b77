// A block's tensor memory, and what tcgen05 instructions have under way there.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "wgmma.h"

namespace simt {

constexpr u32 tensor_lanes = 128;
constexpr u32 tensor_columns = 512;  // of 32 bits in each lane
constexpr u32 tensor_unit = 32;      // columns of the smallest allocation
constexpr u32 tensor_quarters = 4;   // of the lanes, one for each warp of a warpgroup

// One tcgen05.mma: `rows` lanes by n columns from `column` on.
struct TensorProduct {
  u32 column;
  u32 n;
  SharedMatrix a;
  SharedMatrix b;
  bool adds;
  bool whole;  // sums of s32
  const void* site;
  u32 issuer;  // the thread, in its block
};

struct TensorCommit {
  u64 last;  // the number of the last product that it waits for
  u32 issuer;
  u64* mbarrier;
  const void* site;
};

struct TensorReader {
  u32 thread;  // the first lane of the warp
  u64 at;
};

// Of one column. Times are those of TensorMemory::now.
struct TensorColumn {
  u64 product = 0;       // number of the latest one that writes it, 0 if none has
  bool under_way = false;  // that one
  u32 writer = 0;        // its thread
  u64 landed_at = 0;
  std::vector<TensorReader> readers[tensor_quarters];  // since it landed
};

struct TensorMemory {
  std::vector<u32> cells;  // by lanes; none until something is allocated
  TensorColumn columns[tensor_columns];
  u32 owner[tensor_columns / tensor_unit] = {};  // the allocation that a unit belongs to: its first column, plus 1
  u32 sizes[tensor_columns / tensor_unit] = {};  // and of the unit that begins one, its columns
  bool relinquished = false;
  std::deque<TensorProduct> products;  // that have not landed, in order
  u64 issued = 0;                      // products so far
  u64 committed = 0;                   // the last one that some commit waits for
  std::deque<TensorCommit> commits;    // that have not arrived, in order
  u64 now = 1;

  u32& cell(u32 lane, u32 column) { return cells[lane * tensor_columns + column]; }
  bool allocated(u32 column) const { return owner[column / tensor_unit] != 0; }
};

// Of one thread: when it last passed each of tcgen05's fences, and loads that it has not waited for.
struct TensorOrder {
  u64 before = 0;
  u64 after = 0;
  struct Load {
    float* to;
    u32 lane;
    u32 column;
  };
  std::vector<Load> loads;
  const void* load_site = nullptr;
};

}  // namespace simt
