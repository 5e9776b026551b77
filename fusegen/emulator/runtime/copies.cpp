// Asynchronous copies into shared memory: cp.async and its groups.
//
// When such a copy lands is open until its thread waits for it. So it lands at once in the plain schedule and at the
// wait in an adversarial one: a missing wait shows in the numbers of the second, a stage that is filled again while it
// is still being read in those of the first. The checking build finds both whatever the schedule: to it the destination
// belongs to the copy from issue to wait. Or an mbarrier is told of a thread's copies by an arrival that comes once they
// are complete (cp.async.mbarrier.arrive.noinc), like the bytes of a bulk copy, whenever that is.
#include "worker.h"

namespace simt {

void land(Copy& copy) {
  if (!copy.landed) {
    std::memcpy(copy.to, copy.from, copy.filled);
    std::memset(copy.to + copy.filled, 0, copy.bytes - copy.filled);
    copy.landed = true;
  }
}

// Copies of the groups up to and with `last`.
static void finish_copies(Fiber& fiber, u32 last) {
  std::vector<Copy>& pending = fiber.copies.pending;
  u64 kept = 0;
  for (u64 i = 0; i < pending.size(); ++i) {
    Copy& copy = pending[i];
    if (copy.group > last) {
      pending[kept++] = copy;
      continue;
    }
    land(copy);
    checker_end_copy(copy);
  }
  pending.resize(kept);
}

void land_copies(Fiber& fiber) {
  if (!fiber.copies.pending.empty()) {
    finish_copies(fiber, fiber.copies.group);
  }
}

static void require_alignment(u64 address, u32 bytes, const char* what, const void* site) {
  if (address % bytes) {
    fail_at(Fault::misaligned, site, 0, "a copy of %u bytes with its %s at %#llx, which is no multiple of %u", bytes,
            what, address, bytes);
  }
}

void copy_async(u64 to, const void* from, u32 bytes, u32 filled) {
  const void* site = __builtin_return_address(0);
  Fiber& fiber = *current_fiber();
  require_alignment(to, bytes, "destination", site);
  require_alignment(reinterpret_cast<uintptr_t>(from), bytes, "source", site);
  if (filled > bytes) {
    fail_at(Fault::out_of_bounds, site, 0, "a copy of %u bytes with %u bytes of source", bytes, filled);
  }
  Copy copy{from_shared_window(to, site),
            static_cast<const char*>(from),
            bytes,
            filled,
            fiber.copies.group,
            false,
            false,
            site};
  checker_begin_copy(copy);
  if (!worker->adversarial) {
    land(copy);
  }
  Critical critical;
  fiber.copies.pending.push_back(copy);
}

void commit_copies() { ++current_fiber()->copies.group; }

// Groups may be empty: the latest `allowed` commits may be under way when this returns.
void wait_copies(u32 allowed) {
  Fiber& fiber = *current_fiber();
  if (fiber.copies.group > allowed) {
    finish_copies(fiber, fiber.copies.group - allowed - 1);
  }
}

void wait_all_copies() { land_copies(*current_fiber()); }

// From here on the copies are the mbarrier's: a wait for their groups knows nothing of them.
void arrive_with_copies(u64 address, int line) {
  const void* site = __builtin_return_address(0);
  Fiber& fiber = *current_fiber();
  fiber.line = line;
  u64* mbarrier = mbarrier_at(address, true, site);
  BulkLoad load{Copy{nullptr, nullptr, 0, 0, 0, false, false, site}, mbarrier, fiber.copies.pending, true};
  fiber.copies.pending.clear();
  issue_load(load);
}

}  // namespace simt
