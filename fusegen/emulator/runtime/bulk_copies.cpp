// Bulk copies: into shared memory, counted by an mbarrier; out of it, waited for by groups of the thread that issues.
//
// As with cp.async a copy lands at once in the plain schedule. In an adversarial one a load lands when no thread can
// run without it, loads in any order; a store lands at its wait.
#include "worker.h"

namespace simt {

static void require_multiples_of_16(u64 to, u64 from, u32 bytes, const void* site) {
  if ((to | from | bytes) % 16) {
    fail_at(Fault::misaligned, site, 0,
            "a bulk copy of %u bytes from %#llx to %#llx: size and addresses must be multiples of 16", bytes, from, to);
  }
}

// --- loads

static void land(const BulkLoad& load) {
  const Copy& copy = load.copy;
  std::memcpy(copy.to, copy.from, copy.bytes);
  checker_end_load(copy, load.mbarrier);
  complete_bytes(load.mbarrier, copy.bytes, copy.site);
}

bool land_load() {
  Worker& w = *worker;
  if (w.loads.empty()) {
    return false;
  }
  u64 chosen = next_random() % w.loads.size();
  BulkLoad load = w.loads[chosen];
  w.loads[chosen] = w.loads.back();
  w.loads.pop_back();
  land(load);
  return true;
}

void bulk_load(u64 to, const void* from, u32 bytes, u64 mbarrier, int line) {
  const void* site = __builtin_return_address(0);
  Worker& w = *worker;
  current_fiber()->line = line;
  require_multiples_of_16(to, reinterpret_cast<uintptr_t>(from), bytes, site);
  if ((to ^ mbarrier) >> window_rank_shift) {
    fail_at(Fault::mbarrier, site, 0, "a bulk copy into one block, counted by an mbarrier of another");
  }
  BulkLoad load{{from_shared_window(to, site), static_cast<const char*>(from), bytes, bytes, 0, false, false, site},
                mbarrier_at(mbarrier, true, site)};
  checker_begin_copy(load.copy);
  if (!w.adversarial) {
    land(load);
    return;
  }
  Critical critical;
  w.loads.push_back(load);
}

// --- stores

static void finish_reading(Copy& copy) {
  if (!copy.landed) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    copy.landed = true;
  }
  if (!copy.read) {
    checker_end_source(copy);
    copy.read = true;
  }
}

void bulk_store(void* to, u64 from, u32 bytes, int line) {
  const void* site = __builtin_return_address(0);
  Fiber& fiber = *current_fiber();
  fiber.line = line;
  require_multiples_of_16(reinterpret_cast<uintptr_t>(to), from, bytes, site);
  Copy copy{
      static_cast<char*>(to), from_shared_window(from, site), bytes, bytes, fiber.stores.group, false, false, site};
  checker_begin_copy(copy);
  checker_begin_source(copy);
  if (!worker->adversarial) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    copy.landed = true;
  }
  Critical critical;
  fiber.stores.pending.push_back(copy);
}

void commit_bulk_stores() { ++current_fiber()->stores.group; }

static void finish_stores(Fiber& fiber, u32 last, bool only_read) {
  std::vector<Copy>& pending = fiber.stores.pending;
  u64 kept = 0;
  for (u64 i = 0; i < pending.size(); ++i) {
    Copy copy = pending[i];
    if (copy.group <= last) {
      finish_reading(copy);
    }
    if (copy.group > last || only_read) {
      pending[kept++] = copy;
    } else {
      checker_end_copy(copy);
    }
  }
  pending.resize(kept);
}

void wait_bulk_stores(u32 allowed, bool only_read) {
  Fiber& fiber = *current_fiber();
  if (fiber.stores.group > allowed) {
    finish_stores(fiber, fiber.stores.group - allowed - 1, only_read);
  }
}

// What has been read may arrive after the thread's end; what is still to be read may be gone by then.
void end_stores(Fiber& fiber) {
  for (const Copy& copy : fiber.stores.pending) {
    if (!copy.read) {
      fail_at(Fault::race, copy.site, 0,
              "the thread ends while this bulk copy of %u bytes may still be reading shared memory: it has not waited "
              "for the copy's group",
              copy.bytes);
    }
  }
  if (!fiber.stores.pending.empty()) {
    finish_stores(fiber, fiber.stores.group, false);
  }
}

}  // namespace simt
