// What a thread has copied asynchronously and not waited for.
#pragma once

#include <vector>

#include "../dialect/simt.h"
#include "tensor_copies.h"

namespace simt {

struct Copy {
  char* to;
  const char* from;
  u32 bytes;
  u32 filled;  // the first of them, from `from`; the rest are zeros
  u32 group;
  bool landed;
  bool read;                   // of a store: the source is free again
  const void* site;            // where the kernel issued it
  const Tile* tile = nullptr;  // of a tensor copy: the other side, of which `from` or `to` is null
};

// What an mbarrier counts: the bytes of `copy`, or an arrival once all of `earlier` are complete.
struct BulkLoad {
  Copy copy;
  u64* mbarrier;
  std::vector<Copy> earlier = {};
  bool arrives = false;
  bool of_commit = false;  // the arrival of a tcgen05.commit in another block
};

struct CopyQueue {
  std::vector<Copy> pending;
  u32 group = 0;  // that a copy issued now belongs to: counts the thread's commits

  void clear() {
    pending.clear();
    group = 0;
  }
};

}  // namespace simt
