// Clusters: the barrier of all their blocks, and each other's shared memory.
//
// To arrive and to wait are two steps, and threads that have returned are not waited for, as on the machine.
#include "worker.h"

namespace simt {

static void complete_if_all_arrived() {
  Worker& w = *worker;
  u32 live = 0;
  for (const Block& block : w.blocks) {
    live += block.live;
  }
  if (live == 0 || w.cluster_arrived < live) {
    return;
  }
  w.cluster_arrived = 0;
  w.idle_polls = 0;
  ++w.cluster_completed;
  checker_complete(&w.cluster_completed);
  checker_settle();
  for (Fiber* fiber : take_blocked([](const Fiber& each) { return each.at_cluster_barrier; })) {
    fiber->at_cluster_barrier = false;
    checker_acquire(*fiber, &w.cluster_completed);
    make_ready(warp_of(*fiber), bit(fiber->lane));
  }
}

void cluster_arrive(bool release, int line) {
  Fiber& fiber = *current_fiber();
  fiber.line = line;
  if (fiber.cluster_arrivals != fiber.cluster_waits) {
    fail(Fault::divergent_barrier, line,
         "this thread arrives at the cluster barrier again without having waited there");
  }
  ++fiber.cluster_arrivals;
  if (release) {
    checker_release(fiber, &worker->cluster_completed);
  }
  ++worker->cluster_arrived;
  complete_if_all_arrived();
}

void cluster_wait(int line) {
  Worker& w = *worker;
  Fiber& fiber = *current_fiber();
  fiber.line = line;
  if (fiber.cluster_arrivals == fiber.cluster_waits) {
    fail(Fault::divergent_barrier, line, "this thread waits at the cluster barrier without having arrived there");
  }
  ++fiber.cluster_waits;
  if (w.cluster_completed >= fiber.cluster_waits) {
    checker_acquire(fiber, &w.cluster_completed);
    return;
  }
  fiber.at_cluster_barrier = true;
  block_current();
}

void leave_cluster(const Fiber& fiber) {
  if (fiber.cluster_arrivals > worker->cluster_completed) {
    --worker->cluster_arrived;
  }
  complete_if_all_arrived();
}

void fail_at_cluster_barrier(const Fiber& fiber) {
  for (const Block& block : worker->blocks) {
    for (const Fiber& other : block.fibers) {
      bool live = block.warps[other.warp].live & bit(other.lane);
      if (live && other.cluster_arrivals == worker->cluster_completed) {
        fail_for(
            fiber, other.line, Fault::deadlock,
            "no thread can run: this thread waits at the cluster barrier for thread (%u, %u, %u) of block (%u, %u, "
            "%u), which waits on line %d",
            other.index.x, other.index.y, other.index.z, block.index.x, block.index.y, block.index.z, other.line);
      }
    }
  }
  fail_for(fiber, 0, Fault::deadlock, "no thread can run: this thread waits at the cluster barrier");
}

// --- ranks

u32 cluster_rank() { return block_of(*current_thread).rank; }

Index3 cluster_size() { return worker->launch->request.cluster; }

static const Block& block_at(u32 rank, const void* site) {
  const std::vector<Block>& blocks = worker->blocks;
  if (rank >= blocks.size()) {
    fail_at(Fault::out_of_bounds, site, 0, "block %u of a cluster of %u", rank, static_cast<u32>(blocks.size()));
  }
  return blocks[rank];
}

static const Block* owner_of(const void* address) {
  for (const Block& block : worker->blocks) {
    if (shared_memory_holds(block, address)) {
      return &block;
    }
  }
  return nullptr;
}

static const Block& require_owner(const void* address, const void* site) {
  const Block* owner = owner_of(address);
  if (!owner) {
    fail_at(Fault::out_of_bounds, site, 0, "%p is no address in the shared memory of this cluster", address);
  }
  return *owner;
}

void* map_shared_rank(const void* address, u32 rank) {
  const void* site = __builtin_return_address(0);
  const Block& owner = require_owner(address, site);
  return block_at(rank, site).shared + (static_cast<const char*>(address) - owner.shared);
}

u32 shared_rank_of(const void* address) { return require_owner(address, __builtin_return_address(0)).rank; }

u64 map_window_rank(u64 address, u32 rank) {
  const void* site = __builtin_return_address(0);
  from_shared_window(address, site);
  block_at(rank, site);
  return window_base(rank) | (address & ((u64{1} << window_rank_shift) - 1));
}

}  // namespace simt
