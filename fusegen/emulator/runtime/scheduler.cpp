// Which thread runs next, the block barrier, and the end of a thread.
#include <sched.h>

#include <chrono>
#include <cstdarg>
#include <cstdio>

#include "worker.h"

namespace simt {

#ifdef SIMT_CHECK
__thread ThreadView* current_thread __attribute__((tls_model("initial-exec"), visibility("hidden")));
#else
__thread ThreadView* current_thread __attribute__((tls_model("initial-exec")));
#endif
__thread Worker* worker __attribute__((tls_model("initial-exec"), visibility("hidden")));

Fiber* current_fiber() { return static_cast<Fiber*>(current_thread); }

// --- the schedule

void switch_to(Fiber* next) {
  Fiber* from = current_fiber();
  if (from == next) {
    return;
  }
  current_thread = next;
  switch_context(from->context, next->context);
}

u64 next_random() {
  u64 x = worker->random_state;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  worker->random_state = x;
  return x;
}

void make_ready(Warp& warp, u64 lanes) {
  warp.ready |= lanes;
  if (warp.ready) {
    Block& block = *warp.block;
    block.ready_warps |= bit(static_cast<u32>(&warp - block.warps.data()));
    worker->ready_blocks |= bit(block.rank);
  }
}

// The nth set bit, counted from `start` around the word.
static u32 pick_bit_from(u64 bits, u32 start) {
  u64 from_start = bits & (~u64{0} << start);
  return static_cast<u32>(__builtin_ctzll(from_start ? from_start : bits));
}

static u32 any_below(u64 limit) { return static_cast<u32>((next_random() >> 32) % limit); }

// The warp behind the running one; behind a block's last warp comes the next block's first.
static Warp* next_warp() {
  Worker& w = *worker;
  Block& block = *w.running->block;
  u64 behind = block.ready_warps & (~u64{1} << (w.running - block.warps.data()));
  if (behind) {
    return &block.warps[lowest_lane(behind)];
  }
  Block& next = w.blocks[pick_bit_from(w.ready_blocks, (block.rank + 1) & 63)];
  return &next.warps[lowest_lane(next.ready_warps)];
}

static Warp* any_warp() {
  Worker& w = *worker;
  u64 blocks = w.blocks.size();
  Block& block = w.blocks[blocks == 1 ? 0 : pick_bit_from(w.ready_blocks, any_below(blocks))];
  return &block.warps[pick_bit_from(block.ready_warps, any_below(block.warps.size()))];
}

// Round robin visits each ready lane of a warp once, then goes to the next warp. The adversarial schedule stays with
// one warp for as long as that warp can run, so that it gets far ahead of the others, and visits its lanes in any
// order: where a barrier is missing, this reads what is not yet written (or no longer there), and the numbers come
// out wrong.
Fiber* next_ready() {
  Worker& w = *worker;
  for (;;) {
    Warp& warp = *w.running;
    u64 candidates = w.pass & warp.ready;
    if (candidates) {
      u32 lane = w.adversarial ? pick_bit_from(candidates, any_below(w.launch->request.warp))
                               : static_cast<u32>(__builtin_ctzll(candidates));
      if (!w.adversarial) {
        w.pass &= ~u64{1} << lane;
      }
      warp.ready &= ~bit(lane);
      Block& block = *warp.block;
      if (!warp.ready) {
        block.ready_warps &= ~bit(static_cast<u32>(&warp - block.warps.data()));
        if (!block.ready_warps) {
          w.ready_blocks &= ~bit(block.rank);
        }
      }
      return &block.fibers[warp.first_thread + lane];
    }
    if (!w.ready_blocks) {
      if (land_load()) {
        continue;
      }
      return &w.scheduler;
    }
    w.running = w.adversarial ? any_warp() : next_warp();
    w.pass = ~u64{0};
  }
}

void block_current() {
  {
    Critical critical;
    worker->blocked.push_back(current_fiber());
  }
  switch_to(next_ready());
}

void yield_now() {
  Worker& w = *worker;
  Fiber* fiber = current_fiber();
  fiber->block->updates_until_yield = w.adversarial ? 1 + (next_random() & 63) : 64;
  make_ready(warp_of(*fiber), bit(fiber->lane));
  if (w.adversarial) {
    w.running = any_warp();
    w.pass = ~u64{0};
  }
  Fiber* next = next_ready();
  if (next == fiber) {
    sched_yield();  // what it spins on may be the work of a block on another worker
  }
  switch_to(next);
}

// --- the block barrier

static void release_barrier(Block& block) {
  block.arrived = 0;
  block.reduce_result = block.reduced;
  for (Warp& warp : block.warps) {
    make_ready(warp, warp.at_barrier);
    warp.at_barrier = 0;
  }
  worker->idle_polls = 0;
  checker_end_phase(block);
}

// All threads that still run are at the barrier. That is enough on some machines, but a thread that has returned
// makes the behaviour undefined, so it is a fault here.
static void complete_barrier(Block& block) {
  u32 threads = static_cast<u32>(block.fibers.size());
  if (block.live != threads) {
    u32 gone = 0;
    while (block.warps[block.fibers[gone].warp].live & bit(block.fibers[gone].lane)) {
      ++gone;
    }
    Index3 left = block.fibers[gone].index;
    fail_for(block.fibers[block.barrier_thread], 0, Fault::divergent_barrier,
             "this thread waits at a barrier that %u of the block's %u threads never reach: thread (%u, %u, %u) has "
             "returned",
             threads - block.live, threads, left.x, left.y, left.z);
  }
  release_barrier(block);
}

void barrier(int line) {
  Fiber* fiber = current_fiber();
  Block& block = block_of(*fiber);
  fiber->line = line;
  if (block.arrived == 0) {
    block.barrier_line = line;
    block.barrier_thread = fiber->linear;
  } else if (line != block.barrier_line) {
    Index3 other = block.fibers[block.barrier_thread].index;
    fail_for(*fiber, block.barrier_line, Fault::divergent_barrier,
             "this thread is at the barrier on line %d while thread (%u, %u, %u) waits at the one on line %d", line,
             other.x, other.y, other.z, block.barrier_line);
  }
  Warp& warp = warp_of(*fiber);
  warp.at_barrier |= bit(fiber->lane);
  if (++block.arrived == block.live) {
    complete_barrier(block);
  } else if (warp.waiting) {
    complete_converged(warp);
  }
  switch_to(next_ready());
}

int barrier_reduce(int predicate, Reduce how, int line) {
  Block& block = block_of(*current_fiber());
  int truth = predicate != 0;
  if (block.arrived == 0) {
    block.reduced = truth;
  } else {
    switch (how) {
      case Reduce::any: block.reduced |= truth; break;
      case Reduce::all: block.reduced &= truth; break;
      case Reduce::count: block.reduced += truth; break;
    }
  }
  barrier(line);
  return block.reduce_result;
}

// --- the end of a thread

void thread_finished() {
  Fiber* fiber = current_fiber();
  Block& block = block_of(*fiber);
  Warp& warp = warp_of(*fiber);
  land_copies(*fiber);
  end_stores(*fiber);
  end_wgmma(*fiber);
  end_tensor_work(*fiber);
  worker->idle_polls = 0;
  warp.live &= ~bit(fiber->lane);
  --block.live;
  FOR_EACH_LANE(lane, warp.waiting) {
    if ((warp.waiting & bit(static_cast<u32>(lane))) && warp.lanes[lane].mask != converged) {
      complete_named(warp, static_cast<u32>(lane));
    }
  }
  if (warp.waiting) {
    complete_converged(warp);
  }
  if (block.live == 0) {
    end_registers(block);
    end_tensor_memory(block);
    checker_end_block(block);
  } else if (block.arrived == block.live) {
    complete_barrier(block);
  }
  if (worker->blocks.size() > 1 || worker->cluster_arrived) {
    leave_cluster(*fiber);
  }
  switch_to(next_ready());
  __builtin_unreachable();
}

// --- what a kernel may ask, out of line

void fence() { current_fiber()->fenced = true; }

void fence_proxy() { checker_fence_proxy(*current_fiber()); }

void fence_mbarriers() { checker_fence_mbarriers(*current_fiber()); }

int device_printf(const char* format, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  int length = std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  Critical critical;  // stdout has a lock
  std::fputs(text, stdout);
  std::fflush(stdout);
  return length;
}

i64 clock_ticks() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

#ifdef SIMT_CHECK
Index3 thread_index() { return current_thread->index; }
Index3 block_index() { return current_thread->block->index; }
Index3 block_size() { return current_thread->block->size; }
Index3 grid_size() { return current_thread->block->grid; }
u32 lane_index() { return current_thread->lane; }
char* dynamic_shared() { return current_thread->block->dynamic_shared; }
#endif

}  // namespace simt
