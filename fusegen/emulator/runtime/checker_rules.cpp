// The checking build's memory rules: every access of the kernel arrives here and is judged against shadow memory.
//
// Order. Two accesses of one place, not both reads and not both atomic, must be ordered: by a block barrier between
// them, by __syncwarp within a warp, or, between blocks, by `write; __threadfence(); atomic` in one block and an
// atomic on the same place in the other ("last block done"). Shuffles order nothing. The rule looks at what was
// ordered, never at what happened to come first, so a race is found whatever the schedule.
//
// Phases. The one worker numbers the stretches between barriers through the whole launch, so a phase says which block
// it belongs to, and "an earlier phase of this block" is two comparisons.
#ifdef SIMT_CHECK

#include <algorithm>
#include <cstdio>

#include "checker.h"

namespace simt {

// --- reports

// A read of what nothing has written is reported at the end of its phase. If another thread writes the place before
// that, the fault is the missing barrier between the two, and it is found as the race that it is.
void checker_settle() {
  if (checker_suspicion(*worker)) {
    escape_from_fiber();
  }
}

// In a cluster the writer may be in another block: only the cluster's barrier settles it.
void checker_end_phase(Block& block) {
  if (worker->blocks.size() == 1) {
    checker_settle();
  }
  checker_meet_block(block);
  ++worker->checker->phase;
}

const Report* checker_suspicion(Worker& w) {
  const Report& suspicion = w.checker->suspicion;
  return suspicion.kind == static_cast<u32>(Fault::none) ? nullptr : &suspicion;
}

static u32 block_number(const Checker& checker, u32 phase) {
  auto after = std::upper_bound(checker.first_phases.begin(), checker.first_phases.end(), phase);
  return static_cast<u32>(after - checker.first_phases.begin()) - 1;
}

[[noreturn]] void fail_race(const Region& region, const char* place, const Stamp& earlier, Access earlier_kind,
                            Access access, const void* site) {
  const Checker& checker = *worker->checker;
  const Member& member = member_at(region, place);
  long long byte = place - member.low;
  u64 other_site = earlier.site & site_mask;
  bool is_copy = stamp_is_copy(earlier);
  if (is_copy && earlier_kind == Access::read) {
    fail_at(Fault::race, site, other_site,
            "%s of byte %lld of %s, which a wgmma.mma_async or tcgen05.mma has read: this thread has neither waited for "
            "it nor heard of one that has",
            verb(access), byte, member.name);
  }
  if (is_copy && !earlier.has(flag_copying)) {
    fail_at(Fault::race, site, other_site,
            "%s of byte %lld of %s, which an asynchronous copy has filled: this thread has not seen the phase of its "
            "mbarrier complete",
            verb(access), byte, member.name);
  }
  u32 threads = worker->launch->threads;
  u32 author = checker.clocks ? earlier.who : earlier.thread();
  u64 cluster = block_number(checker, earlier.phase);
  Index3 block = checker.block_indices[cluster * worker->blocks.size() + author / threads];
  Index3 thread = worker->blocks[0].fibers[author % threads].index;
  if (is_copy) {
    fail_at(Fault::race, site, other_site,
            "%s of byte %lld of %s while the copy into it is under way that thread (%u, %u, %u) of block (%u, %u, %u) "
            "has issued and not waited for",
            verb(access), byte, member.name, thread.x, thread.y, thread.z, block.x, block.y, block.z);
  }
  fail_at(Fault::race, site, other_site,
          "%s of byte %lld of %s is not ordered with the %s by block (%u, %u, %u) thread (%u, %u, %u)", verb(access),
          byte, member.name, verb(earlier_kind), block.x, block.y, block.z, thread.x, thread.y, thread.z);
}

// --- order

// Another block's access is ordered if that block has published it, and this thread, or this block before its last
// barrier, has taken that over.

static bool is_visible(const Checker& checker, const Takeover& takeover, const Fiber& fiber) {
  if (checker.clocks) {
    return clocks_visible(takeover, fiber);
  }
  u32 thread = fiber.linear;
  return takeover.by_thread == thread || takeover.in_phase < checker.phase;
}

bool published_to(const Checker& checker, const Stamp& earlier, const Fiber& fiber) {
  for (const Takeover& takeover : checker.taken_over) {
    if (!is_visible(checker, takeover, fiber)) {
      continue;
    }
    auto found = takeover.history->find(checker.first_phases[block_number(checker, earlier.phase)]);
    if (found == takeover.history->end()) {
      continue;
    }
    const Publication& publication = found->second;
    if (checker.clocks) {
      if (earlier.who < publication.known->size() && earlier.phase < (*publication.known)[earlier.who]) {
        return true;
      }
      continue;
    }
    if (earlier.phase < publication.phases_before ||
        (earlier.phase == publication.phases_before && earlier.thread() == publication.thread)) {
      return true;
    }
  }
  return false;
}

// Who the other blocks were that flag_blocks stands for is not remembered: a block that has taken over anything is
// trusted to have waited for them.
static bool has_taken_over(const Checker& checker, const Fiber& fiber) {
  return std::any_of(checker.taken_over.begin(), checker.taken_over.end(),
                     [&](const Takeover& takeover) { return is_visible(checker, takeover, fiber); });
}

// Did `earlier`, and all that its flags stand for, come before whatever `fiber` does now?
static inline bool ordered(const Checker& checker, const Stamp& earlier, const Fiber& fiber) {
  if (earlier.has(flag_copying)) {
    return false;
  }
  if (earlier.phase < checker.first_phase) {
    return published_to(checker, earlier, fiber);
  }
  if (earlier.has(flag_blocks) && !has_taken_over(checker, fiber)) {
    return false;
  }
  if (earlier.phase < checker.phase) {
    return true;
  }
  if (earlier.has(flag_warps)) {
    return false;
  }
  if (earlier.thread() >> checker.warp_shift == fiber.warp && earlier.epoch() < fiber.warp_epoch) {
    return true;
  }
  return earlier.thread() == fiber.linear && !earlier.has(flag_lanes);
}

static u32 flags_of_company(const Checker& checker, const Stamp& earlier, const Fiber& fiber) {
  if (earlier.phase < checker.first_phase) {
    return flag_blocks;
  }
  u32 kept = earlier.site & flag_blocks;
  if (earlier.phase < checker.phase) {
    return kept;
  }
  kept |= earlier.site & flag_warps;
  if (earlier.thread() >> checker.warp_shift != fiber.warp) {
    return kept | flag_warps;
  }
  if (earlier.epoch() < fiber.warp_epoch) {
    return kept;
  }
  return kept | (earlier.thread() == fiber.linear ? earlier.site & flag_lanes : flag_lanes);
}

void suspect(const Region& region, const char* place, Access access, const void* site) {
  if (checker_suspicion(*worker)) {
    return;
  }
  Report& report = worker->checker->suspicion;
  const Member& member = member_at(region, place);
  report.kind = static_cast<u32>(Fault::uninitialised);
  report.site = worker->launch->image.site(site);
  describe_place(report);
  std::snprintf(report.text, sizeof report.text, "%s of byte %lld of %s, which nothing has written", verb(access),
                static_cast<long long>(place - member.low), member.name);
}

static inline void check_cell(Region& region, Cell& cell, const char* place, Access access, bool needs_value,
                              const Fiber& fiber, const void* site, u32 site_offset) {
  const Checker& checker = *worker->checker;
  u32 known_since = region.memory == Memory::shared ? checker.first_phase : 1;
  if (region.memory == Memory::shared) {
    // Shared memory starts anew with each block.
    if (cell.write.phase < known_since) {
      cell.write.phase = 0;
    }
    if (cell.read.phase < known_since) {
      cell.read.phase = 0;
    }
  }
  const Stamp now{checker.phase, fiber.linear | fiber.warp_epoch << thread_bits, site_offset};

  if (cell.write.phase) {
    bool both_atomic = access == Access::atomic && cell.write.has(flag_atomic);
    if (!both_atomic && !ordered(checker, cell.write, fiber)) {
      fail_race(region, place, cell.write, cell.write.has(flag_atomic) ? Access::atomic : Access::write, access, site);
    }
  } else if (needs_value && !member_at(region, place).initialised) {
    suspect(region, place, access, site);
  }

  if (access == Access::read) {
    if (cell.read.phase && cell.read.phase < checker.first_phase) {
      cell.foreign_read = cell.read;
      cell.read = now;
    } else if (cell.read.phase == checker.phase) {
      u32 company = flags_of_company(checker, cell.read, fiber);
      cell.read = now;
      cell.read.site |= company;
    } else {
      cell.read = now;
    }
    return;
  }

  if (cell.read.phase && !ordered(checker, cell.read, fiber)) {
    fail_race(region, place, cell.read, Access::read, access, site);
  }
  if (cell.foreign_read.phase && !ordered(checker, cell.foreign_read, fiber)) {
    fail_race(region, place, cell.foreign_read, Access::read, access, site);
  }
  u32 company = 0;
  if (access == Access::atomic) {
    company = flag_atomic;
    if (cell.write.phase && cell.write.has(flag_atomic)) {
      company |= flags_of_company(checker, cell.write, fiber);
    }
  }
  cell.write = now;
  cell.write.site |= company;
  cell.read.phase = 0;
  cell.foreign_read.phase = 0;
}

// --- one access

u32 offset_of_site(const void* site) {
  auto base = reinterpret_cast<uintptr_t>(worker->launch->image.base);
  return static_cast<u32>(reinterpret_cast<uintptr_t>(site) - base) & site_mask;
}

void check_registers(const void* address, u64 bytes, Access access, const void* site) {
  touch_registers(*current_fiber(), static_cast<const char*>(address), bytes, verb(access), access != Access::read, site);
}

void check_memory(const void* address, u64 bytes, Access access, bool needs_value, const void* site) {
  char* place = static_cast<char*>(const_cast<void*>(address));
  const Fiber& fiber = *static_cast<const Fiber*>(current_fiber());
  if (worker->launch->request.unfinished_count && !fiber.waited) {
    require_finished(place, bytes, access, site);
  }
  Checker& checker = *worker->checker;
  auto site_bits = reinterpret_cast<uintptr_t>(site);
  u8& remembered = checker.region_of_site[site_bits & 4095];
  Region* region = &checker.regions[remembered];
  if (!region->holds(place, bytes)) {
    region = &find_region(place, bytes, access, site, remembered);
  }
  if (region->members.size() > 1 || access != Access::read) {
    require_permission(*region, place, bytes, access, site);
  }
  if (!region->shadowed) {
    return;
  }
  if (checker.clocks) {
    if (region->owner && region->owner != fiber.block) {
      require_reachable(*region, place, access, fiber, site);
    }
    if (access != Access::read) {
      require_no_source(*region, place, bytes, access, site);
      require_no_reading(*region, place, bytes, access, site);
    }
  }
  u64 offset = static_cast<u64>(place - region->origin);
  u64 grain = u64{1} << region->grain_shift;
  if ((offset | bytes) & (grain - 1)) {
    refine(*region, static_cast<u32>(__builtin_ctzll(offset | bytes | grain)));
  }
  u32 site_offset = offset_of_site(site);
  u64 step = u64{1} << region->grain_shift;
  Cell* cell = region->cells + (offset >> region->grain_shift);
  auto check = checker.clocks ? check_cell_by_clock : check_cell;
  for (u64 done = 0; done < bytes; done += step, ++cell) {
    check(*region, *cell, place + done, access, needs_value, fiber, site, site_offset);
  }
}

void checker_read(const void* place, u64 bytes, const void* site) {
  check_access(place, bytes, Access::read, true, site);
}

void checker_write(const void* place, u64 bytes, const void* site) {
  check_access(place, bytes, Access::write, false, site);
}

// --- atomics

static void exchange_clocks(Publications& history, const Fiber& fiber) {
  Checker& checker = *worker->checker;
  if (auto ours = history.find(checker.first_phase); ours != history.end()) {
    clocks_take_over(fiber, ours->second.known);
  }
  const Stamp now = clocks_stamp(fiber, 0);
  checker.taken_over.push_back({&history, now.who, now.phase});
  if (fiber.fenced) {
    history.insert_or_assign(checker.first_phase, Publication{0, 0, clocks_published(fiber)});
  }
}

// What this block has published becomes part of the place's history, and all that history becomes this block's.
static void exchange_publications(const void* place) {
  Checker& checker = *worker->checker;
  const Fiber& fiber = *current_fiber();
  Critical critical;
  Publications& history = checker.published[place];
  Takeover takeover{&history, fiber.linear, checker.phase};
  if (checker.clocks) {
    exchange_clocks(history, fiber);
    return;
  }
  bool known = std::any_of(checker.taken_over.begin(), checker.taken_over.end(), [&](const Takeover& earlier) {
    return earlier.history == takeover.history && earlier.by_thread == takeover.by_thread;
  });
  if (!known) {
    checker.taken_over.push_back(takeover);
  }
  if (fiber.fenced) {
    history.insert_or_assign(checker.first_phase, Publication{checker.phase, fiber.linear, nullptr});
  }
}

u64 atomic_begin(const void* address, u32 bytes) {
  const void* site = __builtin_return_address(0);
  if (reinterpret_cast<uintptr_t>(address) % bytes) {
    fail_at(Fault::misaligned, site, 0, "atomic update of %u bytes at address %p, which is no multiple of %u", bytes,
            address, bytes);
  }
  if (--current_fiber()->block->updates_until_yield == 0) {
    yield_now();
  }
  check_access(address, bytes, Access::atomic, true, site);
  if (current_fiber()->fenced || !worker->checker->published.empty()) {
    exchange_publications(address);
  }
  u64 bits = 0;
  std::memcpy(&bits, address, bytes);
  return bits;
}

void atomic_commit(void* address, u32 bytes, u64 bits) { std::memcpy(address, &bits, bytes); }

void note_read(const void* address, u64 bytes) {
  check_access(address, bytes, Access::read, true, __builtin_return_address(0));
}

void note_write(const void* address, u64 bytes) {
  check_access(address, bytes, Access::write, false, __builtin_return_address(0));
}

}  // namespace simt

#endif
