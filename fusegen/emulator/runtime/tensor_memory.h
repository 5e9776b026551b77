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

// One tcgen05.mma: 128 lanes by n columns from `column` on. That of a pair of blocks is of 256 rows: each block has 128 of
// them, in its shared memory and in its tensor memory, and half of B's columns.
struct TensorProduct {
  u32 column;
  u32 n;
  u32 blocks;         // 1, or 2 of a pair
  SharedMatrix a[2];  // of each of them
  SharedMatrix b[2];
  bool adds;
  bool whole;  // sums of s32
  const void* site;
  u32 issuer;  // the thread, in its block
};

struct TensorCommit {
  u64 last;  // the number of the last product that it waits for
  u32 issuer;
  std::vector<u64*> mbarriers;
  const void* site;
};

struct TensorReader {
  u32 thread;  // the first lane of the warp
  u64 at;
};

// Of one column. Times are those of Worker::tensor_now.
struct TensorColumn {
  u64 product = 0;       // number of the latest one that writes it, 0 if none has; of a pair's, in its first block
  bool under_way = false;  // that one
  u32 writer = 0;        // its thread, of the cluster's
  u64 landed_at = 0;
  std::vector<TensorReader> readers[tensor_quarters];  // since it landed
};

// A call that one warp of each block of a pair makes: neither goes on before the other one has come.
struct TensorCall {
  bool allocates;  // or gives back
  u32 columns;
};

struct TensorMemory {
  std::vector<u32> cells;  // by lanes; none until something is allocated
  TensorColumn columns[tensor_columns];
  u32 owner[tensor_columns / tensor_unit] = {};  // the allocation that a unit belongs to: its first column, plus 1
  u32 sizes[tensor_columns / tensor_unit] = {};  // and of the unit that begins one, its columns
  bool relinquished = false;
  u32 group = 0;  // .cta_group of its instructions, 0 before the first
  std::deque<TensorProduct> products;  // that have not landed, in order
  u64 issued = 0;                      // products so far
  u64 committed = 0;                   // the last one that some commit waits for
  std::deque<TensorCommit> commits;    // that have not arrived, in order

  u32& cell(u32 lane, u32 column) { return cells[lane * tensor_columns + column]; }
  bool allocated(u32 column) const { return owner[column / tensor_unit] != 0; }
};

// tensor_memory.cpp, for tensor_allocation.cpp
struct Block;
TensorMemory& tensor_memory_of(Block& block);
Block& peer_of(Block& block, const char* what, const void* site);
void require_group(Block& block, bool pair, const char* what, const void* site);  // one .cta_group in a kernel
void require_tensor_warp(u64 lanes, const char* what, const void* site);

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
