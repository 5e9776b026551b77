// Bulk copies: into shared memory, counted by an mbarrier; out of it, waited for by groups of the thread that issues.
// Of bytes, or of a box of a tensor, whose lines lie one behind the other in shared memory, perhaps with a swizzle.
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

static void round_to_tf32(char* floats, u64 bytes) {
  for (u64 i = 0; i < bytes; i += sizeof(u32)) {
    u32 bits;
    std::memcpy(&bits, floats + i, sizeof bits);
    bits = nearest_tf32(bits, true);
    std::memcpy(floats + i, &bits, sizeof bits);
  }
}

static void transfer(const Copy& copy) {
  if (!copy.tile) {
    std::memcpy(copy.to, copy.from, copy.bytes);
  } else if (copy.to) {
    std::memset(copy.to, 0, copy.bytes);  // where the box is outside the tensor
    const bool to_tf32 = copy.tile->map.to_tf32;
    copy.tile->for_each_piece(copy.to, [=](char* global, char* shared, u64 bytes) {
      std::memcpy(shared, global, bytes);
      if (to_tf32) round_to_tf32(shared, bytes);
    });
  } else {
    copy.tile->for_each_piece(const_cast<char*>(copy.from),
                              [](char* global, char* shared, u64 bytes) { std::memcpy(global, shared, bytes); });
  }
}

static const Tile* tile_at(u64 address, const u64* coordinates, u32 rank, const void* site) {
  Tile tile{};
  std::memcpy(&tile.map, reinterpret_cast<const void*>(address), sizeof tile.map);
  if (address % 64 || tile.map.magic != tensor_map_magic) {
    fail_at(Fault::tensor, site, 0, "there is no tensor map at %#llx: the address of a kernel's argument is wanted",
            address);
  }
  if (tile.map.rank != rank) {
    fail_at(Fault::tensor, site, 0, "a copy of %u axes with a tensor map of %u", rank, tile.map.rank);
  }
  for (u32 axis = 0; axis < rank; ++axis) {
    tile.origin[axis] = static_cast<int>(coordinates[axis]);
  }
  if (tile.origin[0] * static_cast<i64>(tile.map.element_bytes) % 16) {  // an H200 stops: an illegal instruction
    fail_at(Fault::misaligned, site, 0,
            "a tensor copy of a box that begins at element %lld of its line, which is no multiple of 16 bytes",
            static_cast<long long>(tile.origin[0]));
  }
  Critical critical;
  return &worker->tiles.emplace_back(tile);
}

static void require_multiple_of_128(u64 address, const void* site) {
  if (address % 128) {
    fail_at(Fault::misaligned, site, 0, "a tensor copy with its shared memory at %#llx, which is no multiple of 128",
            address);
  }
}

// --- loads

static void land(const BulkLoad& load) {
  const Copy& copy = load.copy;
  if (load.arrives) {
    for (Copy each : load.earlier) {
      land(each);
      checker_end_plain_load(each, load.mbarrier);
    }
    if (load.of_commit) {
      arrive_of_commit(load.mbarrier, copy.site);
    } else {
      arrive_once(load.mbarrier, copy.site);
    }
    return;
  }
  transfer(copy);
  checker_end_load(copy, load.mbarrier);
  complete_bytes(load.mbarrier, copy.bytes, copy.site);
}

bool land_load() {
  Worker& w = *worker;
  const u64 commits = tensor_commits(), waiting = w.loads.size() + commits;
  if (waiting == 0) {
    return false;
  }
  u64 chosen = next_random() % waiting;
  if (chosen >= w.loads.size()) {
    land_commit(static_cast<u32>(chosen - w.loads.size()));
    return true;
  }
  BulkLoad load = w.loads[chosen];
  w.loads[chosen] = w.loads.back();
  w.loads.pop_back();
  land(load);
  return true;
}

void issue_load(const BulkLoad& load) {
  if (!worker->adversarial) {
    land(load);
    return;
  }
  Critical critical;
  worker->loads.push_back(load);
}

static void issue(const Copy& copy, u64 to, u64 mbarrier, bool pair = false) {
  if ((to ^ mbarrier) >> window_rank_shift > u64{pair}) {
    fail_at(Fault::mbarrier, copy.site, 0, "a bulk copy into one block, counted by an mbarrier of another%s",
            pair ? ", which is not of its pair" : "");
  }
  BulkLoad load{copy, mbarrier_at(mbarrier, true, copy.site)};
  checker_use_mbarrier(load.mbarrier, copy.site);
  checker_begin_copy(copy);
  issue_load(load);
}

void bulk_load(u64 to, const void* from, u32 bytes, u64 mbarrier, int line) {
  const void* site = __builtin_return_address(0);
  current_fiber()->line = line;
  require_multiples_of_16(to, reinterpret_cast<uintptr_t>(from), bytes, site);
  issue({from_shared_window(to, site), static_cast<const char*>(from), bytes, bytes, 0, false, false, site}, to,
        mbarrier);
}

void bulk_prefetch(const void* from, u32 bytes, int line) {
  const void* site = __builtin_return_address(0);
  current_fiber()->line = line;
  require_multiples_of_16(0, reinterpret_cast<uintptr_t>(from), bytes, site);
  checker_read(from, bytes, site);
}

void tensor_load(u64 to, u64 map, const u64* coordinates, u32 rank, u64 mbarrier, u32 blocks, bool pair, int line) {
  const void* site = __builtin_return_address(0);
  current_fiber()->line = line;
  require_multiple_of_128(to, site);
  const Tile* tile = tile_at(map, coordinates, rank, site);
  const u32 bytes = tile->bytes();
  if (blocks == 0) {
    issue({from_shared_window(to, site), nullptr, bytes, bytes, 0, false, false, site, tile}, to, mbarrier, pair);
  }
  FOR_EACH_LANE(block, blocks) {  // the same places in each of them
    const u64 there = map_window_rank(to, static_cast<u32>(block));
    issue({from_shared_window(there, site), nullptr, bytes, bytes, 0, false, false, site, tile}, there,
          map_window_rank(mbarrier, static_cast<u32>(block)));
  }
}

// --- stores

static void finish_reading(Copy& copy) {
  if (!copy.landed) {
    transfer(copy);
    copy.landed = true;
  }
  if (!copy.read) {
    checker_end_source(copy);
    copy.read = true;
  }
}

static void issue_store(Fiber& fiber, Copy copy) {
  checker_begin_copy(copy);
  checker_begin_source(copy);
  if (!worker->adversarial) {
    transfer(copy);
    copy.landed = true;
  }
  Critical critical;
  fiber.stores.pending.push_back(copy);
}

void bulk_store(void* to, u64 from, u32 bytes, int line) {
  const void* site = __builtin_return_address(0);
  Fiber& fiber = *current_fiber();
  fiber.line = line;
  require_multiples_of_16(reinterpret_cast<uintptr_t>(to), from, bytes, site);
  issue_store(fiber, {static_cast<char*>(to), from_shared_window(from, site), bytes, bytes, fiber.stores.group, false,
                      false, site});
}

void tensor_store(u64 map, const u64* coordinates, u32 rank, u64 from, int line) {
  const void* site = __builtin_return_address(0);
  Fiber& fiber = *current_fiber();
  fiber.line = line;
  require_multiple_of_128(from, site);
  const Tile* tile = tile_at(map, coordinates, rank, site);
  issue_store(fiber, {nullptr, from_shared_window(from, site), tile->bytes(), tile->bytes(), fiber.stores.group, false,
                      false, site, tile});
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
