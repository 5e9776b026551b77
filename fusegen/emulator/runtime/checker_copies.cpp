// The checking build's rules for asynchronous copies, and for the mbarriers that count them.
//
// From issue to wait the destination belongs to the copy: whoever touches it, the issuing thread too, is told. Then it
// is as if written by the thread that has waited, or, where an mbarrier counts the copy, by an author whom a thread
// knows that has seen the phase complete. A source in shared memory may only be read until the copy has read it.
//
// The mbarrier. That threads see it made is what __syncthreads or the cluster's barrier is for. That a copy does, too,
// takes a fence behind mbarrier.init, by the thread that made it (fence.mbarrier_init.release.cluster), or by one that
// knows of it (fence.proxy.async). PTX says since 9.3 that copies reach mbarriers by the generic proxy, so that meeting
// is enough; before, it left that open, and NVIDIA's guide and libraries fence. Kernels here run under older drivers.
#ifdef SIMT_CHECK

#include <algorithm>

#include "checker.h"

namespace simt {

static void stamp_bytes(char* to, u64 bytes, const Stamp& stamp, const void* site) {
  u8 unused;
  Region& region = find_region(to, bytes, Access::write, site, unused);
  u64 first = static_cast<u64>(to - region.origin) >> region.grain_shift;
  u64 count = bytes >> region.grain_shift;
  for (u64 i = first; i < first + count; ++i) {
    region.cells[i].write = stamp;
  }
}

static void stamp_destination(const Copy& copy, const Stamp& stamp) {
  if (copy.to) {
    stamp_bytes(copy.to, copy.bytes, stamp, copy.site);
    return;
  }
  copy.tile->for_each_line([&](char* global, u64, u64 bytes) { stamp_bytes(global, bytes, stamp, copy.site); });
}

static Stamp stamp_of(const Copy& copy, u32 flag) {
  const Checker& checker = *worker->checker;
  const Fiber& fiber = *current_fiber();
  u32 site = offset_of_site(copy.site) | flag;
  if (checker.clocks) {
    return clocks_stamp(fiber, site);
  }
  return {checker.phase, fiber.linear | fiber.warp_epoch << thread_bits, site};
}

// Of a box that juts out, what is outside is neither read nor written.
static void check_tile(const Copy& copy) {
  if (copy.to) {
    copy.tile->for_each_line(
        [&](char* global, u64, u64 bytes) { check_access(global, bytes, Access::read, true, copy.site); });
    check_access(copy.to, copy.bytes, Access::write, false, copy.site);
    return;
  }
  copy.tile->for_each_piece(const_cast<char*>(copy.from), [&](char*, char* shared, u64 bytes) {
    check_access(shared, bytes, Access::read, true, copy.site);
    require_fenced(shared, bytes, copy.site);
  });
  copy.tile->for_each_line(
      [&](char* global, u64, u64 bytes) { check_access(global, bytes, Access::write, false, copy.site); });
}

void checker_begin_copy(const Copy& copy) {
  if (copy.tile) {
    check_tile(copy);
  } else {
    check_access(copy.from, copy.filled, Access::read, true, copy.site);
    check_access(copy.to, copy.bytes, Access::write, false, copy.site);
  }
  stamp_destination(copy, stamp_of(copy, flag_copying));
}

void checker_end_copy(const Copy& copy) { stamp_destination(copy, stamp_of(copy, 0)); }

void checker_end_load(const Copy& copy, const void* mbarrier) {
  stamp_destination(copy, {clocks_land(mbarrier), clocks_copier(mbarrier), offset_of_site(copy.site)});
}

void checker_end_plain_load(const Copy& copy, const void* mbarrier) {
  stamp_destination(copy, {clocks_land(mbarrier, true), clocks_copier(mbarrier, true), offset_of_site(copy.site)});
}

void checker_begin_source(const Copy& copy) {
  if (!copy.tile) {
    require_fenced(copy.from, copy.bytes, copy.site);
  }
  Critical critical;
  worker->checker->sources.push_back(copy);
}

void checker_end_source(const Copy& copy) {
  std::vector<Copy>& sources = worker->checker->sources;
  auto found = std::find_if(sources.begin(), sources.end(), [&](const Copy& each) {
    return each.from == copy.from && each.bytes == copy.bytes && each.to == copy.to && each.tile == copy.tile;
  });
  if (found != sources.end()) {
    sources.erase(found);
  }
}

// Making an mbarrier is a plain write, using it an atomic update.
void checker_touch_mbarrier(const void* place, bool initialised, const void* site) {
  check_access(place, 8, initialised ? Access::atomic : Access::write, false, site);
}

void require_no_source(const Region& region, const char* place, u64 bytes, Access access, const void* site) {
  for (const Copy& copy : worker->checker->sources) {
    if (place < copy.from + copy.bytes && copy.from < place + bytes) {
      const Member& member = member_at(region, place);
      fail_at(Fault::race, site, offset_of_site(copy.site),
              "%s of byte %lld of %s while a bulk copy that has not been waited for may still be reading it",
              verb(access), static_cast<long long>(place - member.low), member.name);
    }
  }
}

}  // namespace simt

#endif
