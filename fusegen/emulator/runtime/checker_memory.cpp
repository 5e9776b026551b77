// Which memory a kernel may touch, and with what shadow: buffers, shared memory, and the kernel's own variables.
#ifdef SIMT_CHECK

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "checker.h"

namespace simt {

// --- regions

static void add_shadow(Region& region) {
  region.shadowed = true;
  region.grain_shift = coarsest_grain_shift;
  uintptr_t grain = uintptr_t{1} << coarsest_grain_shift;
  region.origin = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(region.low) & ~(grain - 1));
  region.cell_count =
      static_cast<u64>(region.high - region.origin + static_cast<i64>(grain) - 1) >> coarsest_grain_shift;
  // calloc: a large shadow is made of zero pages that cost nothing until they are touched.
  region.cells = static_cast<Cell*>(std::calloc(region.cell_count + 1, sizeof(Cell)));
  if (!region.cells) {
    throw std::bad_alloc();  // launch() reports it
  }
}

[[noreturn]] static void fail_without_memory(u64 bytes) {
  fail(Fault::resources, 0, "no memory for %llu bytes of what the checking build remembers", bytes);
}

// Makes cells smaller, because an access came that does not cover whole cells. Exact: so far every access did.
void refine(Region& region, u32 shift) {
  Critical critical;
  u64 copies = u64{1} << (region.grain_shift - shift);
  u64 count = region.cell_count * copies;
  Cell* cells = static_cast<Cell*>(std::calloc(count + 1, sizeof(Cell)));
  if (!cells) {
    fail_without_memory(count * sizeof(Cell));
  }
  for (u64 i = 0; i < region.cell_count; ++i) {
    const Cell& cell = region.cells[i];
    if (cell.write.phase | cell.read.phase | cell.foreign_read.phase) {
      std::fill_n(cells + i * copies, copies, cell);
      for (u64 copy = 1; worker->checker->clocks && copy < copies; ++copy) {
        clocks_split(cells[i * copies + copy]);
      }
    }
  }
  std::free(region.cells);
  region.cells = cells;
  region.cell_count = count;
  region.grain_shift = shift;
}

static void add_region(Checker& checker, const Member& member, Memory memory, const Block* owner = nullptr) {
  Region region{};
  region.owner = owner;
  region.low = member.low;
  region.high = member.high;
  region.memory = memory;
  region.members.push_back(member);
  if (member.writable || !member.initialised) {
    add_shadow(region);
  }
  (memory == Memory::image ? checker.image : checker.regions).push_back(std::move(region));
}

static void add_buffers(Checker& checker, const Request& request) {
  std::vector<Member> members;
  for (u64 i = 0; i < request.buffer_count; ++i) {
    const BufferRange& buffer = request.buffers[i];
    members.push_back(
        {buffer.start, buffer.start + buffer.bytes, buffer.name, buffer.writable != 0, buffer.initialised != 0});
  }
  std::stable_sort(members.begin(), members.end(), [](const Member& a, const Member& b) { return a.low < b.low; });
  checker.first_buffer = checker.regions.size();
  for (const Member& member : members) {
    bool overlaps = checker.regions.size() > checker.first_buffer && member.low < checker.regions.back().high;
    if (!overlaps) {
      add_region(checker, member, Memory::global);
      continue;
    }
    Region& region = checker.regions.back();
    std::free(region.cells);
    region.high = std::max(region.high, member.high);
    region.members.push_back(member);
    add_shadow(region);
  }
  checker.last_buffer = checker.regions.size();
}

static void clear_regions(Checker& checker) {
  for (std::vector<Region>* regions : {&checker.regions, &checker.image}) {
    for (Region& region : *regions) {
      std::free(region.cells);
    }
    regions->clear();
  }
}

Checker* make_checker() { return new Checker; }

void destroy_checker(Checker* checker) {
  if (checker) {
    clear_regions(*checker);
  }
  delete checker;
}

void checker_begin_launch(Worker& w) {
  Checker& checker = *w.checker;
  clear_regions(checker);
  checker.static_shared.clear();
  std::fill(std::begin(checker.region_of_site), std::end(checker.region_of_site), u8{0});
  checker.phase = 0;
  checker.first_phases.clear();
  checker.block_indices.clear();
  checker.published.clear();
  checker.taken_over.clear();
  checker.suspicion = Report{};
  checker.sources.clear();
  checker.clocks = w.launch->request.clocked ? std::make_unique<Clocks>() : nullptr;
  const Request& request = w.launch->request;
  checker.warp_shift = static_cast<u32>(__builtin_ctz(request.warp));
  for (const Block& block : w.blocks) {
    char* dynamic = block.dynamic_shared;
    add_region(checker, {dynamic, dynamic + request.shared_bytes, "dynamic shared memory", true, false}, Memory::shared,
               &block);
  }
  for (const Image::Segment& segment : w.launch->image.segments) {
    const char* name = segment.writable ? "the __device__ variables" : "constant data";
    add_region(checker, {segment.low, segment.high, name, segment.writable, true}, Memory::image);
  }
  add_buffers(checker, request);
}

void checker_begin_cluster(Worker& w) {
  Checker& checker = *w.checker;
  Critical critical;
  checker.first_phase = ++checker.phase;
  checker.first_phases.push_back(checker.phase);
  for (const Block& block : w.blocks) {
    checker.block_indices.push_back(block.index);
  }
  checker.taken_over.clear();
  checker.sources.clear();
  if (checker.clocks) {
    clocks_begin_cluster(checker, static_cast<u32>(w.blocks.size()) * w.launch->threads);
  }
}

void checker_declare_shared(const SharedVariable& variable) {
  Checker& checker = *worker->checker;
  for (u32 known : checker.static_shared) {
    if (known == variable.offset) {
      return;
    }
  }
  Critical critical;
  try {
    checker.static_shared.push_back(variable.offset);
    for (const Block& block : worker->blocks) {
      char* low = block.shared + variable.offset;
      add_region(checker, {low, low + variable.bytes, variable.name, true, false}, Memory::shared, &block);
    }
  } catch (const std::bad_alloc&) {
    fail_without_memory(variable.bytes);  // an exception can't leave a fiber
  }
}

void name_shared(const void* place, PlaceName& name) {
  name[0] = 0;
  const char* low = static_cast<const char*>(place);
  for (const Region& region : worker->checker->regions) {
    if (region.holds(low, 1)) {
      const Member& member = member_at(region, low);
      std::snprintf(name, sizeof name, "byte %lld of %s", static_cast<long long>(low - member.low), member.name);
    }
  }
}

// --- which memory an address belongs to, and reports of none

const char* verb(Access access) {
  switch (access) {
    case Access::read: return "read";
    case Access::write: return "write";
    case Access::atomic: return "atomic update";
  }
  return "";
}

static u64 distance(const Member& member, const char* place) {
  if (place < member.low) {
    return static_cast<u64>(member.low - place);
  }
  return place < member.high ? 0 : static_cast<u64>(place - member.high) + 1;
}

[[noreturn]] static void fail_out_of_bounds(const char* place, u64 bytes, Access access, const void* site) {
  Checker& checker = *worker->checker;
  for (const Block& block : worker->blocks) {
    for (const Fiber& fiber : block.fibers) {
      if (place >= fiber.stack_low && place < fiber.stack_low + fiber.stack_bytes) {
        fail_at(Fault::out_of_bounds, site, 0, "%s of %llu bytes in the local memory of thread (%u, %u, %u)",
                verb(access), bytes, fiber.index.x, fiber.index.y, fiber.index.z);
      }
    }
  }
  const Member* nearest = nullptr;
  for (const Region& region : checker.regions) {
    for (const Member& member : region.members) {
      if (!nearest || distance(member, place) < distance(*nearest, place)) {
        nearest = &member;
      }
    }
  }
  constexpr u64 far_away = u64{1} << 32;
  if (!nearest || distance(*nearest, place) > far_away) {
    fail_at(Fault::out_of_bounds, site, 0, "%s of %llu bytes at address %p, which is in no buffer", verb(access), bytes,
            static_cast<const void*>(place));
  }
  long long offset = place - nearest->low;
  fail_at(Fault::out_of_bounds, site, 0, "%s of %llu bytes at byte %lld of %s, which has %lld bytes", verb(access),
          bytes, offset, nearest->name, static_cast<long long>(nearest->high - nearest->low));
}

const Member& member_at(const Region& region, const char* place) {
  for (const Member& member : region.members) {
    if (place >= member.low && place < member.high) {
      return member;
    }
  }
  return region.members.front();
}

void require_permission(const Region& region, const char* place, u64 bytes, Access access, const void* site) {
  const Member* holding = nullptr;
  for (const Member& member : region.members) {
    if (member.holds(place, bytes)) {
      holding = &member;
      if (access == Access::read || member.writable) {
        return;
      }
    }
  }
  if (!holding) {
    fail_out_of_bounds(place, bytes, access, site);
  }
  fail_at(Fault::read_only, site, 0, "%s of %llu bytes at byte %lld of %s, which is read-only", verb(access), bytes,
          static_cast<long long>(place - holding->low), holding->name);
}

// Of buffers there may be many: one for each row, where rows lie far apart.
static Region* region_holding(Checker& checker, const char* place, u64 bytes) {
  Region* const begin = checker.regions.data() + checker.first_buffer;
  Region* const end = checker.regions.data() + checker.last_buffer;
  Region* behind = std::upper_bound(begin, end, place, [](const char* at, const Region& each) { return at < each.low; });
  if (behind != begin && behind[-1].holds(place, bytes)) {
    return behind - 1;
  }
  for (Region& region : checker.regions) {
    if (region.memory == Memory::shared && region.holds(place, bytes)) {
      return &region;
    }
  }
  return nullptr;
}

Region& find_region(const char* place, u64 bytes, Access access, const void* site, u8& remembered) {
  Checker& checker = *worker->checker;
  if (Region* region = region_holding(checker, place, bytes)) {
    const i64 i = region - checker.regions.data();
    remembered = static_cast<u8>(i < 255 ? i : 0);
    return *region;
  }
  for (Region& region : checker.image) {
    if (region.holds(place, bytes)) {
      return region;
    }
  }
  fail_out_of_bounds(place, bytes, access, site);
}

}  // namespace simt

#endif
