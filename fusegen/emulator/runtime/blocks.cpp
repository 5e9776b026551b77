// A block, or the blocks of a cluster together, from the first thread to the last.
#include "worker.h"

namespace simt {

// No thread can run, and some are left. One that waits for registers is the one to tell of, then one that waits at a
// warp operation, at an mbarrier or a barrier of part of a block, then at the cluster's barrier; where all wait at a block's, that has spoken already.
static void tell_of_warp_operation(Block& block) {
  for (Warp& warp : block.warps) {
    if (!warp.waiting) {
      continue;
    }
    u32 lane = lowest_lane(warp.waiting);
    const Fiber& fiber = block.fibers[warp.first_thread + lane];
    u64 missing = warp.lanes[lane].mask & warp.live & ~warp.waiting;
    if (!missing) {
      continue;
    }
    u32 other = lowest_lane(missing);
    int other_line = block.fibers[warp.first_thread + other].line;
    fail_for(fiber, other_line, Fault::deadlock,
             "no thread can run: lane %u waits at %s on line %d for lane %u, which waits at the barrier on line %d",
             lane, name_of(warp.lanes[lane].operation), fiber.line, other, other_line);
  }
}

void Worker::report_deadlock() {
  for (Block& block : blocks) {
    tell_of_registers(block);
    tell_of_warp_operation(block);
    tell_of_warpgroup(block);
  }
  for (Fiber* fiber : blocked) {
    if (fiber->mbarrier) {
      fail_waiting_at(*fiber, fiber->mbarrier);
    }
    if (fiber->named_barrier) {
      fail_at_named_barrier(*fiber);
    }
    if (fiber->tensor_call) {
      fail_at_tensor_call(*fiber);
    }
  }
  if (!blocked.empty()) {
    fail_at_cluster_barrier(*blocked.front());
  }
  for (Block& block : blocks) {
    if (block.live) {
      fail_for(block.fibers[block.barrier_thread], 0, Fault::deadlock,
               "no thread can run: %u of %u threads are left, %u at a barrier", block.live,
               static_cast<u32>(block.fibers.size()), block.arrived);
    }
  }
  __builtin_unreachable();
}

static void fiber_main() {
  Request& request = worker->launch->request;
  request.trampoline(request.kernel, request.arguments);
  thread_finished();
}

static Index3 place_of(u64 linear, Index3 size) {
  return {static_cast<u32>(linear % size.x), static_cast<u32>(linear / size.x % size.y),
          static_cast<u32>(linear / (u64{size.x} * size.y))};
}

void Worker::begin_block(Block& block, u64 linear) {
  Index3 size = launch->request.cluster;
  Index3 cluster = place_of(linear, {block.grid.x / size.x, block.grid.y / size.y, block.grid.z / size.z});
  Index3 in_cluster = place_of(block.rank, size);
  block.index = {cluster.x * size.x + in_cluster.x, cluster.y * size.y + in_cluster.y,
                 cluster.z * size.z + in_cluster.z};
  block.live = static_cast<u32>(block.fibers.size());
  block.arrived = 0;
  block.updates_until_yield = 64;
  block.ready_warps = 0;
  for (NamedBarrier& named : block.named) {
    named = NamedBarrier{};
  }
  for (Warp& warp : block.warps) {
    warp.live = warp.members;
    warp.waiting = 0;
    warp.at_barrier = 0;
    warp.ready = 0;
    make_ready(warp, warp.members);
  }
  begin_registers(block);
  for (Fiber& fiber : block.fibers) {
    // Stacks start at different offsets, or the first lines of all of them would fall into the same cache sets.
    char* top = fiber.stack_low + fiber.stack_bytes - 64 - ((fiber.linear * 208) & 8191);
    prepare_context(fiber.context, fiber.stack_low, top, fiber_main);
    fiber.warp_epoch = 0;
    fiber.fenced = false;
    fiber.waited = false;
    fiber.line = 0;
    fiber.copies.clear();
    fiber.stores.clear();
    fiber.mbarrier = nullptr;
    fiber.wgmma = WgmmaOrder{};
    fiber.tensor = TensorOrder{};
    fiber.named_barrier = nullptr;
    fiber.wants_registers = false;
    fiber.at_cluster_barrier = false;
    fiber.tensor_call = 0;
    fiber.cluster_arrivals = 0;
    fiber.cluster_waits = 0;
  }
  Critical critical;
  block.tensor_memory.reset();
  block.tensor_calls.clear();
  block.warpgroups.clear();
  for (u32 first = 0; first < block.fibers.size(); first += warpgroup_threads) {
    block.warpgroups.emplace_back().first_thread = first;
  }
  clear_shared(block, launch->request);
}

void Worker::run_cluster(u64 linear) {
  u64 seed = launch->request.seed;
  adversarial = seed != 0;
  random_state = (seed * 0x9E3779B97F4A7C15ull + linear * 0xD1B54A32D192ED03ull) | 1;
  ready_blocks = 0;
  blocked.clear();
  loads.clear();
  {
    Critical critical;
    tiles.clear();
  }
  idle_polls = 0;
  tensor_now = 1;
  cluster_arrived = 0;
  cluster_completed = 0;
  for (Block& block : blocks) {
    begin_block(block, linear);
  }
  checker_begin_cluster(*this);
  running = &blocks[0].warps[0];
  pass = ~u64{0};
  switch_to(next_ready());
  for (Block& block : blocks) {
    if (block.live) {
      report_deadlock();
    }
  }
  checker_settle();
}

void Worker::run_blocks() {
  current_thread = &scheduler;
  while (!launch->stopped.load(std::memory_order_relaxed)) {
    u64 linear = launch->next_cluster.fetch_add(launch->request.block_step);
    if (linear >= launch->clusters) {
      return;
    }
    run_cluster(linear);
  }
}

}  // namespace simt
