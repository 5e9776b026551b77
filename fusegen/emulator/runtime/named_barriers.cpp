// Barriers of part of a block: bar.sync and bar.arrive with a number and a count of threads.
//
// Number 0 is __syncthreads. What the threads of a warp do here counts for the whole warp on the machine, so a warp of
// which only some lanes come is a fault.
#include "worker.h"

namespace simt {

static void require_whole_warps(const Fiber& fiber, const NamedBarrier& named, u32 id) {
  const Block& block = block_of(fiber);
  for (u32 i = 0; i < block.warps.size(); ++i) {
    const u64 lanes = named.lanes[i];
    if (lanes && lanes != block.warps[i].members) {
      const Fiber& one = block.fibers[block.warps[i].first_thread + lowest_lane(lanes)];
      fail_for(one, 0, Fault::divergent_barrier,
               "lanes %#llx of a warp come to barrier %u; a warp counts there as a whole, so all of its lanes must",
               lanes, id);
    }
  }
}

static void complete(const Fiber& fiber, NamedBarrier& named, u32 id) {
  require_whole_warps(fiber, named, id);
  named = NamedBarrier{};
  worker->idle_polls = 0;
  checker_complete(&named);
  for (Fiber* each : take_blocked([&](const Fiber& other) { return other.named_barrier == &named; })) {
    each->named_barrier = nullptr;
    checker_acquire(*each, &named);
    make_ready(warp_of(*each), bit(each->lane));
  }
}

void named_barrier(u32 id, u32 threads, bool waits, int line) {
  Fiber& fiber = *current_fiber();
  Block& block = block_of(fiber);
  const u32 all = static_cast<u32>(block.fibers.size());
  fiber.line = line;
  threads = threads ? threads : all;
  if (id == 0 && waits && threads == all) {
    barrier(line);
    return;
  }
  if (id == 0 || id >= named_barriers) {
    fail(Fault::divergent_barrier, line,
         "barrier %u for %u threads; 1 to %u are for part of a block, and 0 is __syncthreads", id, threads,
         named_barriers - 1);
  }
  if (threads > all || threads % worker->launch->request.warp) {
    fail(Fault::divergent_barrier, line, "barrier %u for %u threads; a multiple of a warp is wanted, and up to %u", id,
         threads, all);
  }
  NamedBarrier& named = block.named[id];
  if (named.arrived && named.expected != threads) {
    fail_for(fiber, named.line, Fault::divergent_barrier,
             "this thread expects %u threads at barrier %u, and one on line %d expects %u", threads, id, named.line,
             named.expected);
  }
  if (named.arrived == 0) {
    named.expected = threads;
    named.line = line;
  }
  named.lanes[fiber.warp] |= bit(fiber.lane);
  checker_release(fiber, &named);
  if (++named.arrived == threads) {
    complete(fiber, named, id);
    if (waits) {
      checker_acquire(fiber, &named);
    }
  } else if (waits) {
    fiber.named_barrier = &named;
    block_current();
  }
}

void fail_at_named_barrier(const Fiber& fiber) {
  const Block& block = block_of(fiber);
  const NamedBarrier& named = *fiber.named_barrier;
  fail_for(fiber, 0, Fault::deadlock,
           "no thread can run: this thread waits at barrier %u, where %u of %u threads have arrived",
           static_cast<u32>(&named - block.named), named.arrived, named.expected);
}

}  // namespace simt
