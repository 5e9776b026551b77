// A block, or the blocks of a cluster together, from the first thread to the last.
#include "worker.h"

namespace simt {

// No thread can run, and some are left. A thread that waits at a warp operation is the one to tell of; where all wait
// at barriers, the barrier itself has spoken already.
static void report_deadlock_in(Block& block) {
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
  fail_for(block.fibers[block.barrier_thread], 0, Fault::deadlock,
           "no thread can run: %u of %u threads are left, %u at a barrier", block.live,
           static_cast<u32>(block.fibers.size()), block.arrived);
}

void Worker::report_deadlock() {
  for (Block& block : blocks) {
    if (block.live) {
      report_deadlock_in(block);
    }
  }
  __builtin_unreachable();
}

static void fiber_main() {
  Request& request = worker->launch->request;
  request.trampoline(request.kernel, request.arguments);
  thread_finished();
}

void Worker::begin_block(Block& block, u64 linear) {
  u64 per_plane = u64{block.grid.x} * block.grid.y;
  block.index = {static_cast<u32>(linear % block.grid.x), static_cast<u32>(linear / block.grid.x % block.grid.y),
                 static_cast<u32>(linear / per_plane)};
  block.live = static_cast<u32>(block.fibers.size());
  block.arrived = 0;
  block.updates_until_yield = 64;
  block.ready_warps = 0;
  for (Warp& warp : block.warps) {
    warp.live = warp.members;
    warp.waiting = 0;
    warp.at_barrier = 0;
    warp.ready = 0;
    make_ready(warp, warp.members);
  }
  for (Fiber& fiber : block.fibers) {
    // Stacks start at different offsets, or the first lines of all of them would fall into the same cache sets.
    char* top = fiber.stack_low + fiber.stack_bytes - 64 - ((fiber.linear * 208) & 8191);
    prepare_context(fiber.context, fiber.stack_low, top, fiber_main);
    fiber.warp_epoch = 0;
    fiber.fenced = false;
    fiber.line = 0;
    fiber.copies.clear();
  }
  clear_shared(block, launch->request);
  checker_begin_block(*this, block);
}

void Worker::run_cluster(u64 linear) {
  u64 seed = launch->request.seed;
  adversarial = seed != 0;
  random_state = (seed * 0x9E3779B97F4A7C15ull + linear * 0xD1B54A32D192ED03ull) | 1;
  ready_blocks = 0;
  for (Block& block : blocks) {
    begin_block(block, linear);
  }
  running = &blocks[0].warps[0];
  pass = ~u64{0};
  switch_to(next_ready());
  for (Block& block : blocks) {
    if (block.live) {
      report_deadlock();
    }
  }
  checker_end_phase(*this);
}

void Worker::run_blocks() {
  current_thread = &scheduler;
  while (!launch->stopped.load(std::memory_order_relaxed)) {
    u64 linear = launch->next_block.fetch_add(1);
    if (linear >= launch->blocks) {
      return;
    }
    run_cluster(linear);
  }
}

}  // namespace simt
