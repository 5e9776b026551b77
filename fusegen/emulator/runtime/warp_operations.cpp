// Operations that the lanes of a warp do together: shuffles, votes, __syncwarp, and whatever is built on warp_collect.
//
// A lane that arrives leaves its value and waits. The last one to arrive does the exchange for all and makes them
// ready.
#include "worker.h"

namespace simt {

const char* name_of(WarpOperation operation) {
  switch (operation) {
    case WarpOperation::sync: return "__syncwarp";
    case WarpOperation::shuffle: return "a shuffle";
    case WarpOperation::ballot: return "a vote";
    case WarpOperation::collect: return "a warp-wide instruction";
    case WarpOperation::none: break;
  }
  return "nothing";
}

static void finish_shuffle(Warp& warp, u64 group) {
  FOR_EACH_LANE(lane, group) {
    u32 source = warp.lanes[lane].source_lane;
    if (!(group & bit(source))) {
      fail_for(warp.block->fibers[warp.first_thread + lane], 0, Fault::inactive_lane,
               "lane %u reads lane %u by a shuffle that lane %u takes no part in (lanes %#llx do)",
               static_cast<u32>(lane), source, source, group);
    }
    warp.lanes[lane].result = warp.lanes[source].value;
  }
}

static void finish_ballot(Warp& warp, u64 group) {
  u64 votes = 0;
  FOR_EACH_LANE(lane, group) { votes |= warp.lanes[lane].value << lane; }
  FOR_EACH_LANE(lane, group) { warp.lanes[lane].result = votes; }
}

static void finish_sync(Warp& warp, u64 group) {
  u32 epoch = 0;
  FOR_EACH_LANE(lane, group) {
    u32 lane_epoch = warp.block->fibers[warp.first_thread + lane].warp_epoch;
    epoch = lane_epoch > epoch ? lane_epoch : epoch;
  }
  FOR_EACH_LANE(lane, group) { warp.block->fibers[warp.first_thread + lane].warp_epoch = epoch + 1; }
  checker_meet_lanes(warp, group);
}

static void finish_collect(Warp& warp, u64 group) {
  void* slots[64] = {};
  FOR_EACH_LANE(lane, group) { slots[lane] = warp.lanes[lane].slot; }
  warp.combine(slots, group);
}

// Every lane of `group` has arrived: exchange, and let all of them run.
static void complete(Warp& warp, u64 group, WarpOperation operation) {
  switch (operation) {
    case WarpOperation::sync: finish_sync(warp, group); break;
    case WarpOperation::shuffle: finish_shuffle(warp, group); break;
    case WarpOperation::ballot: finish_ballot(warp, group); break;
    case WarpOperation::collect: finish_collect(warp, group); break;
    case WarpOperation::none: break;
  }
  warp.waiting &= ~group;
  worker->idle_polls = 0;
  make_ready(warp, group);
}

// Lanes that meet must meet in the same operation, on the same line, with the same mask.
static void require_agreement(Warp& warp, u64 group, u32 with_lane) {
  const LaneWait& expected = warp.lanes[with_lane];
  const Fiber& fiber = warp.block->fibers[warp.first_thread + with_lane];
  FOR_EACH_LANE(lane, group) {
    const LaneWait& found = warp.lanes[lane];
    const Fiber& other = warp.block->fibers[warp.first_thread + lane];
    if (found.operation != expected.operation || other.line != fiber.line) {
      fail_for(fiber, other.line, Fault::divergent_warp,
               "lane %u is at %s on line %d while lane %u, which its mask names, is at %s on line %d", with_lane,
               name_of(expected.operation), fiber.line, static_cast<u32>(lane), name_of(found.operation), other.line);
    }
    if (found.mask != expected.mask) {
      fail_for(fiber, 0, Fault::divergent_warp,
               "lane %u gives mask %#llx and lane %u gives mask %#llx to the same operation", with_lane, expected.mask,
               static_cast<u32>(lane), found.mask);
    }
  }
}

// Completes the operation that `lane` waits at if every lane that its mask names and that still lives is waiting too.
bool complete_named(Warp& warp, u32 lane) {
  u64 group = warp.lanes[lane].mask & warp.live;
  if ((warp.waiting & group) != group) {
    return false;
  }
  require_agreement(warp, group, lane);
  complete(warp, group, warp.lanes[lane].operation);
  return true;
}

// The forms without a mask. When no lane of the warp can run, the lanes that wait at the same place go on together. A
// place is a source line: two operations on one line are taken for one. The earliest line goes first: of lanes in a
// loop and lanes behind it, the hardware runs those in the loop.
bool complete_converged(Warp& warp) {
  if (warp.ready || (warp.waiting | warp.at_barrier) != warp.live) {
    return false;
  }
  u64 group = 0;
  int line = 0;
  WarpOperation operation = WarpOperation::none;
  FOR_EACH_LANE(lane, warp.waiting) {
    const LaneWait& wait = warp.lanes[lane];
    if (wait.mask != converged) {
      continue;
    }
    int lane_line = warp.block->fibers[warp.first_thread + lane].line;
    if (!group || lane_line < line) {
      group = 0;
      line = lane_line;
      operation = wait.operation;
    }
    if (lane_line == line && wait.operation == operation) {
      group |= bit(static_cast<u32>(lane));
    }
  }
  if (!group) {
    return false;
  }
  complete(warp, group, operation);
  return true;
}

static u64 warp_operation(WarpOperation operation, u64 mask, int line) {
  Fiber* fiber = current_fiber();
  Warp& warp = warp_of(*fiber);
  LaneWait& wait = warp.lanes[fiber->lane];
  wait.operation = operation;
  wait.mask = mask;
  fiber->line = line;
  warp.waiting |= bit(fiber->lane);
  if (mask == converged) {
    complete_converged(warp);
  } else {
    complete_named(warp, fiber->lane);
  }
  switch_to(next_ready());
  return wait.result;
}

u64 named_lanes(u64 mask, int line) {
  const Fiber* fiber = current_fiber();
  if (!(mask & bit(fiber->lane))) {
    fail(Fault::mask, line, "mask %#llx does not name the lane that gives it, lane %u", mask, fiber->lane);
  }
  return mask;
}

void warp_sync(u64 mask, int line) { warp_operation(WarpOperation::sync, mask, line); }

u64 warp_shuffle(u64 mask, u64 bits, u32 source_lane, int line) {
  LaneWait& wait = warp_of(*current_fiber()).lanes[current_fiber()->lane];
  wait.value = bits;
  wait.source_lane = source_lane;
  return warp_operation(WarpOperation::shuffle, mask, line);
}

u64 warp_ballot(u64 mask, int predicate, int line) {
  LaneWait& wait = warp_of(*current_fiber()).lanes[current_fiber()->lane];
  wait.value = predicate != 0;
  return warp_operation(WarpOperation::ballot, mask, line);
}

void warp_collect(u64 mask, void* slot, Combine combine, int line) {
  Warp& warp = warp_of(*current_fiber());
  warp.lanes[current_fiber()->lane].slot = slot;
  warp.combine = combine;
  warp_operation(WarpOperation::collect, mask, line);
}

}  // namespace simt
