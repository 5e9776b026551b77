// The checking build's rules for instructions that read shared memory after they were issued (wgmma, tcgen05.mma).
//
// At issue what they read must be written, and known to be, with a fence between the proxies. From then until a thread
// has waited nobody may write there. Afterwards the reads are those of an author of their own, whom the threads know
// that have waited.
#ifdef SIMT_CHECK

#include "checker.h"

namespace simt {

constexpr u32 piece_shift = 4;

static Region& shared_region(const char* place, const void* site) {
  u8 unused;
  return find_region(place, u64{1} << piece_shift, Access::read, site, unused);
}

static Reading& reading_of(Region& region, const char* place) {
  if (region.reading.empty()) {
    Critical critical;
    region.reading.resize(static_cast<u64>(region.high - region.origin + 15) >> piece_shift);
  }
  return region.reading[static_cast<u64>(place - region.origin) >> piece_shift];
}

template <class Visit>
static void for_each_cell(Region& region, const char* place, Visit visit) {
  const u64 first = static_cast<u64>(place - region.origin) >> region.grain_shift;
  const u64 count = (u64{1} << piece_shift) >> region.grain_shift;
  for (u64 i = 0; i < count; ++i) {
    visit(region.cells[first + i], place + (i << region.grain_shift));
  }
}

void checker_begin_read(const char* place, const char* instruction, const void* site) {
  Region& region = shared_region(place, site);
  for_each_cell(region, place, [&](Cell& cell, const char* at) {
    clocks_require_written(region, cell, at, *current_fiber(), site);
    clocks_require_fenced(region, cell, at, site);
  });
  Reading& reading = reading_of(region, place);
  ++reading.count;
  reading.site = offset_of_site(site);
  reading.instruction = instruction;
}

void checker_end_read(const char* place, const void* reader, const void* site, u32 phase, u32 times) {
  Region& region = shared_region(place, site);
  reading_of(region, place).count -= times;
  const Stamp stamp{phase, clocks_copier(reader), offset_of_site(site)};
  for_each_cell(region, place, [&](Cell& cell, const char*) { clocks_remember_copied(cell, stamp); });
}

void require_fenced(const char* place, u64 bytes, const void* site) {
  u8 unused;
  Region& region = find_region(place, bytes, Access::read, site, unused);
  const u64 first = static_cast<u64>(place - region.origin) >> region.grain_shift;
  for (u64 i = 0; i < bytes >> region.grain_shift; ++i) {
    clocks_require_fenced(region, region.cells[first + i], place + (i << region.grain_shift), site);
  }
}

u32 checker_next_phase(const void* reader) { return clocks_next_phase(reader); }

void checker_acquire_reads(const Fiber& fiber, const void* reader, u32 phase) {
  clocks_acquire_reads(fiber, reader, phase);
}

void require_no_reading(const Region& region, const char* place, u64 bytes, Access access, const void* site) {
  if (region.reading.empty()) {
    return;
  }
  const u64 first = static_cast<u64>(place - region.origin) >> piece_shift;
  const u64 last = static_cast<u64>(place + bytes - 1 - region.origin) >> piece_shift;
  for (u64 i = first; i <= last; ++i) {
    if (region.reading[i].count) {
      const Member& member = member_at(region, place);
      fail_at(Fault::race, site, region.reading[i].site,
              "%s of byte %lld of %s while a %s that nobody has waited for may still be reading it", verb(access),
              static_cast<long long>(place - member.low), member.name, region.reading[i].instruction);
    }
  }
}

}  // namespace simt

#endif
