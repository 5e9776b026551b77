// The checking build's rules for tensor memory, by columns: what writes one must know of all that was read of it, what
// reads one that the latest product has landed. See checker_clocks.cpp for what it is to know.
#ifdef SIMT_CHECK

#include "checker.h"

namespace simt {

static TensorStamps& stamps_of(u32 rank, u32 column) {
  Checker& checker = *worker->checker;
  const u64 at = u64{rank} * tensor_columns + column;
  if (checker.tensor.size() <= at) {
    Critical critical;
    checker.tensor.resize(worker->blocks.size() * tensor_columns);
  }
  return checker.tensor[at];
}

static bool of_this_cluster(const Stamp& stamp) { return stamp.phase >= worker->checker->first_phase && stamp.phase; }

void checker_tensor_write(u32 rank, u32 column, const void* site) {
  if (!worker->checker->clocks) {
    return;
  }
  const Fiber& fiber = *current_fiber();
  TensorStamps& found = stamps_of(rank, column);
  const Stamp now = clocks_stamp(fiber, offset_of_site(site));
  const bool own = found.writer == now.who;  // one thread's products come in order
  if (of_this_cluster(found.write) && !own && !clocks_ordered(found.write, fiber)) {
    fail_at(Fault::race, site, found.write.site & site_mask,
            "column %u of tensor memory is written anew, and this thread has not waited for the tcgen05.mma before", column);
  }
  for (std::vector<Stamp>& reads : found.reads) {
    for (const Stamp& read : reads) {
      if (of_this_cluster(read) && !clocks_ordered(read, fiber)) {
        fail_at(Fault::race, site, read.site & site_mask,
                "column %u of tensor memory is written anew, and this thread has not waited for the warp that reads it",
                column);
      }
    }
    Critical critical;
    reads.clear();
  }
  found.write = now;
  found.writer = now.who;
}

void checker_tensor_landed(u32 rank, u32 column, const void* reader, u32 phase) {
  if (!worker->checker->clocks) {
    return;
  }
  TensorStamps& found = stamps_of(rank, column);
  found.write = {phase, clocks_copier(reader), found.write.site};
}

void checker_tensor_read(u32 column, u32 quarter, bool first, const void* site) {
  if (!worker->checker->clocks) {
    return;
  }
  const Fiber& fiber = *current_fiber();
  TensorStamps& found = stamps_of(block_of(fiber).rank, column);
  if (of_this_cluster(found.write) && !clocks_ordered(found.write, fiber)) {
    fail_at(Fault::race, site, found.write.site & site_mask,
            "tcgen05.ld reads column %u of tensor memory, and this thread has not waited for the tcgen05.mma that writes it",
            column);
  }
  if (first) {  // a lane stands for its warp
    Critical critical;
    found.reads[quarter].push_back(clocks_stamp(fiber, offset_of_site(site)));
  }
}

}  // namespace simt

#endif
