// Which thread of a block runs next, the block barrier, and a block from its first thread to its last.
#include <chrono>
#include <cstdarg>
#include <cstdio>

#include <sched.h>

#include "worker.h"

namespace simt {

#ifdef SIMT_CHECK
__thread ThreadView* current_thread __attribute__((tls_model("initial-exec"), visibility("hidden")));
#else
__thread ThreadView* current_thread __attribute__((tls_model("initial-exec")));
__thread BlockView* current_block __attribute__((tls_model("initial-exec")));
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

static u64 next_random() {
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
    worker->ready_warps |= bit(static_cast<u32>(&warp - worker->warps.data()));
  }
}

// The nth set bit, counted from `start` around the word.
static u32 pick_bit_from(u64 bits, u32 start) {
  u64 from_start = bits & (~u64{0} << start);
  return static_cast<u32>(__builtin_ctzll(from_start ? from_start : bits));
}

// Round robin visits each ready lane of a warp once, then goes to the next warp. The adversarial schedule stays with
// one warp for as long as that warp can run, so that it gets far ahead of the others, and visits its lanes in any
// order: where a barrier is missing, this reads what is not yet written (or no longer there), and the numbers come
// out wrong.
Fiber* next_ready() {
  Worker& w = *worker;
  for (;;) {
    Warp& warp = w.warps[w.cursor];
    u64 candidates = w.pass & warp.ready;
    if (candidates) {
      u32 lane =
          w.adversarial ? pick_bit_from(candidates, next_random() & 63) : static_cast<u32>(__builtin_ctzll(candidates));
      if (!w.adversarial) {
        w.pass &= ~u64{1} << lane;
      }
      warp.ready &= ~bit(lane);
      if (!warp.ready) {
        w.ready_warps &= ~bit(w.cursor);
      }
      return &w.fibers[warp.first_thread + lane];
    }
    if (!w.ready_warps) {
      return &w.scheduler;
    }
    u32 start = w.adversarial ? next_random() & 63 : (w.cursor + 1) & 63;
    w.cursor = pick_bit_from(w.ready_warps, start);
    w.pass = ~u64{0};
  }
}

void yield_now() {
  Worker& w = *worker;
  Fiber* fiber = current_fiber();
  w.block.updates_until_yield = w.adversarial ? 1 + (next_random() & 63) : 64;
  make_ready(w.warps[fiber->warp], bit(fiber->lane));
  if (w.adversarial) {
    w.cursor = pick_bit_from(w.ready_warps, next_random() & 63);
    w.pass = ~u64{0};
  }
  Fiber* next = next_ready();
  if (next == fiber) {
    sched_yield();  // what it spins on may be the work of a block on another worker
  }
  switch_to(next);
}

// --- the block barrier

static void release_barrier() {
  Worker& w = *worker;
  w.arrived = 0;
  w.reduce_result = w.reduced;
  for (Warp& warp : w.warps) {
    make_ready(warp, warp.at_barrier);
    warp.at_barrier = 0;
  }
  checker_end_phase(w);
}

// All threads that still run are at the barrier. That is enough on some machines, but a thread that has returned
// makes the behaviour undefined, so it is a fault here.
static void complete_barrier() {
  Worker& w = *worker;
  u32 threads = static_cast<u32>(w.fibers.size());
  if (w.live != threads) {
    u32 gone = 0;
    while (w.warps[w.fibers[gone].warp].live & bit(w.fibers[gone].lane)) {
      ++gone;
    }
    Index3 left = w.fibers[gone].index;
    fail_for(w.fibers[w.barrier_thread], 0, Fault::divergent_barrier,
             "this thread waits at a barrier that %u of the block's %u threads never reach: thread (%u, %u, %u) has "
             "returned",
             threads - w.live, threads, left.x, left.y, left.z);
  }
  release_barrier();
}

void barrier(int line) {
  Worker& w = *worker;
  Fiber* fiber = current_fiber();
  fiber->line = line;
  if (w.arrived == 0) {
    w.barrier_line = line;
    w.barrier_thread = fiber->linear;
  } else if (line != w.barrier_line) {
    Index3 other = w.fibers[w.barrier_thread].index;
    fail_for(*fiber, w.barrier_line, Fault::divergent_barrier,
             "this thread is at the barrier on line %d while thread (%u, %u, %u) waits at the one on line %d", line,
             other.x, other.y, other.z, w.barrier_line);
  }
  Warp& warp = w.warps[fiber->warp];
  warp.at_barrier |= bit(fiber->lane);
  if (++w.arrived == w.live) {
    complete_barrier();
  } else if (warp.waiting) {
    complete_converged(warp);
  }
  switch_to(next_ready());
}

int barrier_reduce(int predicate, Reduce how, int line) {
  Worker& w = *worker;
  int truth = predicate != 0;
  if (w.arrived == 0) {
    w.reduced = truth;
  } else {
    switch (how) {
      case Reduce::any: w.reduced |= truth; break;
      case Reduce::all: w.reduced &= truth; break;
      case Reduce::count: w.reduced += truth; break;
    }
  }
  barrier(line);
  return w.reduce_result;
}

// --- the end of a thread

void thread_finished() {
  Worker& w = *worker;
  Fiber* fiber = current_fiber();
  Warp& warp = w.warps[fiber->warp];
  warp.live &= ~bit(fiber->lane);
  --w.live;
  FOR_EACH_LANE(lane, warp.waiting) {
    if ((warp.waiting & bit(static_cast<u32>(lane))) && warp.lanes[lane].mask != converged) {
      complete_named(warp, static_cast<u32>(lane));
    }
  }
  if (warp.waiting) {
    complete_converged(warp);
  }
  if (w.live && w.arrived == w.live) {
    complete_barrier();
  }
  switch_to(next_ready());
  __builtin_unreachable();
}

// No thread can run, and some are left. A thread that waits at a warp operation is the one to tell of; where all wait
// at barriers, the barrier itself has spoken already.
void Worker::report_deadlock() {
  for (Warp& warp : warps) {
    if (!warp.waiting) {
      continue;
    }
    u32 lane = lowest_lane(warp.waiting);
    const Fiber& fiber = fibers[warp.first_thread + lane];
    u64 missing = warp.lanes[lane].mask & warp.live & ~warp.waiting;
    if (!missing) {
      continue;
    }
    u32 other = lowest_lane(missing);
    int other_line = fibers[warp.first_thread + other].line;
    fail_for(fiber, other_line, Fault::deadlock,
             "no thread can run: lane %u waits at %s on line %d for lane %u, which waits at the barrier on line %d",
             lane, name_of(warp.lanes[lane].operation), fiber.line, other, other_line);
  }
  fail_for(fibers[barrier_thread], 0, Fault::deadlock, "no thread can run: %u of %u threads are left, %u at a barrier",
           live, static_cast<u32>(fibers.size()), arrived);
}

// --- running blocks

static void fiber_main() {
  Request& request = worker->launch->request;
  request.trampoline(request.kernel, request.arguments);
  thread_finished();
}

void Worker::run_block(u64 linear) {
  u64 per_plane = u64{block.grid.x} * block.grid.y;
  block.index = {static_cast<u32>(linear % block.grid.x), static_cast<u32>(linear / block.grid.x % block.grid.y),
                 static_cast<u32>(linear / per_plane)};
  u64 seed = launch->request.seed;
  adversarial = seed != 0;
  random_state = (seed * 0x9E3779B97F4A7C15ull + linear * 0xD1B54A32D192ED03ull) | 1;
  live = static_cast<u32>(fibers.size());
  arrived = 0;
  block.updates_until_yield = 64;
  ready_warps = 0;
  cursor = 0;
  pass = ~u64{0};
  for (Warp& warp : warps) {
    warp.live = warp.members;
    warp.waiting = 0;
    warp.at_barrier = 0;
    warp.ready = 0;
    make_ready(warp, warp.members);
  }
  for (Fiber& fiber : fibers) {
    // Stacks start at different offsets, or the first lines of all of them would fall into the same cache sets.
    char* top = fiber.stack_low + fiber.stack_bytes - 64 - ((fiber.linear * 208) & 8191);
    prepare_context(fiber.context, fiber.stack_low, top, fiber_main);
    fiber.warp_epoch = 0;
    fiber.fenced = false;
    fiber.line = 0;
  }
  // Shared memory holds whatever was there before; 0xff is NaN in every float format, and -1.
  std::memset(block.dynamic_shared, 0xff, launch->request.shared_bytes);
  checker_begin_block(*this);
  switch_to(next_ready());
  if (live) {
    report_deadlock();
  }
  checker_end_phase(*this);
}

void Worker::run_blocks() {
#ifndef SIMT_CHECK
  current_block = &block;
#endif
  current_thread = &scheduler;
  while (!launch->stopped.load(std::memory_order_relaxed)) {
    u64 linear = launch->next_block.fetch_add(1);
    if (linear >= launch->blocks) {
      return;
    }
    run_block(linear);
  }
}

// --- what a kernel may ask, out of line

void fence() { current_fiber()->fenced = true; }

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
Index3 block_index() { return worker->block.index; }
Index3 block_size() { return worker->block.size; }
Index3 grid_size() { return worker->block.grid; }
u32 lane_index() { return current_thread->lane; }
char* dynamic_shared() { return worker->block.dynamic_shared; }
#endif

}  // namespace simt
