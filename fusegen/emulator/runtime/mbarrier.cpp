// mbarriers: counts of arrivals and of bytes that make phases.
//
// The object lies in shared memory as the machine has it, 64 bits in a layout of its own:
//
//     0 | bytes still to come, + 2^21 (22 bits) | arrivals still to come (20) | arrivals of a phase (20) | phase (1)
//
// A phase completes when neither arrivals nor bytes are missing. A thread that waits sleeps until then, so that a wait
// without end leaves no thread to run, and that is a report.
#include "worker.h"

namespace simt {

constexpr i64 byte_limit = (1 << 20) - 1;
constexpr u32 arrival_limit = (1 << 20) - 1;

struct MbarrierState {
  u32 phase;
  u32 arrivals;
  u32 missing;
  i64 bytes;
};

static u64 packed(const MbarrierState& state) {
  return static_cast<u64>(state.bytes + (1 << 21)) << 41 | u64{state.missing} << 21 | u64{state.arrivals} << 1 |
         state.phase;
}

static MbarrierState unpacked(u64 word) {
  return {static_cast<u32>(word & 1), static_cast<u32>(word >> 1 & arrival_limit),
          static_cast<u32>(word >> 21 & arrival_limit), static_cast<i64>(word >> 41) - (1 << 21)};
}

u64* mbarrier_at(u64 address, bool initialised, const void* site) {
  char* place = from_shared_window(address, site);
  if (reinterpret_cast<uintptr_t>(place) % 8) {
    fail_at(Fault::misaligned, site, 0, "an mbarrier at %#llx, which is no multiple of 8", address);
  }
  checker_touch_mbarrier(place, initialised, site);
  u64* mbarrier = reinterpret_cast<u64*>(place);
  if (initialised && *mbarrier >> 63) {
    fail_at(Fault::mbarrier, site, 0, "there is no mbarrier at %#llx: mbarrier.init makes one", address);
  }
  return mbarrier;
}

static void wake_waiting(u64* mbarrier) {
  for (Fiber* fiber : take_blocked([=](const Fiber& each) { return each.mbarrier == mbarrier; })) {
    fiber->mbarrier = nullptr;
    checker_acquire(*fiber, mbarrier);
    make_ready(warp_of(*fiber), bit(fiber->lane));
  }
}

static void change(u64* mbarrier, MbarrierState state) {
  worker->idle_polls = 0;
  bool completes = state.missing == 0 && state.bytes == 0;
  if (completes) {
    state.phase ^= 1;
    state.missing = state.arrivals;
  }
  *mbarrier = packed(state);
  if (completes) {
    checker_complete(mbarrier);
    wake_waiting(mbarrier);
  }
}

static void count_bytes(MbarrierState& state, i64 bytes, const void* site) {
  state.bytes += bytes;
  if (state.bytes > byte_limit || state.bytes < -byte_limit) {
    fail_at(Fault::mbarrier, site, 0, "an mbarrier counts %lld bytes at most, and here %lld are to come", byte_limit,
            state.bytes);
  }
}

void mbarrier_init(u64 address, u32 count, int line) {
  const void* site = __builtin_return_address(0);
  current_fiber()->line = line;
  if (count == 0 || count > arrival_limit) {
    fail_at(Fault::mbarrier, site, 0, "an mbarrier for %u arrivals; 1 to %u are possible", count, arrival_limit);
  }
  u64* mbarrier = mbarrier_at(address, false, site);
  *mbarrier = packed({0, count, count, 0});
  checker_made_mbarrier(*current_fiber(), mbarrier, site);
}

void mbarrier_invalidate(u64 address, int line) {
  const void* site = __builtin_return_address(0);
  current_fiber()->line = line;
  mbarrier_at(address, true, site);
  *mbarrier_at(address, false, site) = ~u64{0};
}

u64 mbarrier_arrive(u64 address, u32 count, u32 expected_bytes, int line) {
  const void* site = __builtin_return_address(0);
  Fiber& fiber = *current_fiber();
  fiber.line = line;
  u64* mbarrier = mbarrier_at(address, true, site);
  u64 before = *mbarrier;
  MbarrierState state = unpacked(before);
  count_bytes(state, expected_bytes, site);
  if (count == 0 || count > state.missing) {
    fail_at(Fault::mbarrier, site, 0, "%u arrivals at an mbarrier whose phase lacks %u of %u", count, state.missing,
            state.arrivals);
  }
  state.missing -= count;
  checker_release(fiber, mbarrier);
  change(mbarrier, state);
  return before;
}

void mbarrier_expect(u64 address, u32 bytes, int line) {
  const void* site = __builtin_return_address(0);
  current_fiber()->line = line;
  u64* mbarrier = mbarrier_at(address, true, site);
  MbarrierState state = unpacked(*mbarrier);
  count_bytes(state, bytes, site);
  *mbarrier = packed(state);
}

void complete_bytes(u64* mbarrier, u32 bytes, const void* site) {
  if (*mbarrier >> 63) {
    fail_at(Fault::mbarrier, site, 0, "the mbarrier of this copy is gone before the copy is complete");
  }
  MbarrierState state = unpacked(*mbarrier);
  count_bytes(state, -static_cast<i64>(bytes), site);
  change(mbarrier, state);
}

void arrive_once(u64* mbarrier, const void* site) {
  if (*mbarrier >> 63) {
    fail_at(Fault::mbarrier, site, 0, "the mbarrier of this commit is gone before the commit is complete");
  }
  MbarrierState state = unpacked(*mbarrier);
  if (state.missing == 0) {
    fail_at(Fault::mbarrier, site, 0, "an arrival at an mbarrier whose phase lacks 0 of %u", state.arrivals);
  }
  --state.missing;
  change(mbarrier, state);
}

// --- waiting

static bool has_completed(const u64* mbarrier, u32 parity) { return unpacked(*mbarrier).phase != parity; }

static u64* begin_wait(u64 address, u32 parity, const void* site, int line) {
  current_fiber()->line = line;
  if (parity > 1) {
    fail_at(Fault::mbarrier, site, 0, "a wait for parity %u; a phase has parity 0 or 1", parity);
  }
  return mbarrier_at(address, true, site);
}

bool mbarrier_wait(u64 address, u32 parity, int line) {
  u64* mbarrier = begin_wait(address, parity, __builtin_return_address(0), line);
  Fiber& fiber = *current_fiber();
  if (has_completed(mbarrier, parity)) {
    checker_acquire(fiber, mbarrier);
    return true;
  }
  fiber.mbarrier = mbarrier;
  block_current();
  return true;
}

// Many questions of this kind by all threads in turn, while nothing happens in between, are a wait without end.
constexpr u64 patient_polls = 10000;

bool mbarrier_test(u64 address, u32 parity, int line) {
  u64* mbarrier = begin_wait(address, parity, __builtin_return_address(0), line);
  Fiber& fiber = *current_fiber();
  if (!has_completed(mbarrier, parity)) {
    Worker& w = *worker;
    u64 threads = w.blocks.size() * w.launch->threads;
    if (++w.idle_polls > threads && land_load()) {
      w.idle_polls = 0;
    } else if (w.idle_polls > patient_polls * threads) {
      fail_waiting_at(fiber, mbarrier);
    }
    yield_now();
  }
  if (!has_completed(mbarrier, parity)) {
    return false;
  }
  checker_acquire(fiber, mbarrier);
  return true;
}

void fail_waiting_at(const Fiber& fiber, const u64* mbarrier) {
  MbarrierState state = unpacked(*mbarrier);
  PlaceName name;
  name_shared(mbarrier, name);
  fail_for(
      fiber, 0, Fault::deadlock,
      "no thread can run: this thread waits for the phase of parity %u of the mbarrier at %s to complete, which lacks "
      "%u of %u arrivals and %lld bytes",
      state.phase, name, state.missing, state.arrivals, state.bytes);
}

}  // namespace simt
