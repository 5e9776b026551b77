// Tensor memory is allocated and given back by a whole warp, of a block or of each block of a pair (.cta_group::2): there
// both make the same calls in turn, and none of the two goes on before the other one has come, so that a pair's columns are
// the same in both.
//
// PTX ISA 9, "tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit" and "Issue Granularity".
#include "shared_matrices.h"

namespace simt {

struct TensorAllocation {
  u64 place;  // of shared memory, where the address goes; or the address
  u32 columns;
  bool pair;
  const void* site;
  u64 call = 0;  // its number among those that a pair of blocks make together, from 1
};

static TensorAllocation agreed_allocation(void** slots, u64 lanes, const char* what) {
  const TensorAllocation first = *static_cast<TensorAllocation*>(slots[lowest_lane(lanes)]);
  require_tensor_warp(lanes, what, first.site);
  FOR_EACH_LANE(lane, lanes) {
    const auto& other = *static_cast<TensorAllocation*>(slots[lane]);
    if (other.place != first.place || other.columns != first.columns) {
      fail_at(Fault::divergent_warp, first.site, 0, "the lanes of a warp give %s different operands", what);
    }
  }
  const u32 columns = first.columns;
  if (columns < tensor_unit || columns > tensor_columns || (columns & (columns - 1))) {
    fail_at(Fault::tensor, first.site, 0, "%s of %u columns; 32, 64, 128, 256 and 512 are possible", what, columns);
  }
  return first;
}

// --- calls that both blocks of a pair make

static void make_call(void** slots, u64 lanes, const TensorAllocation& call, bool allocates, const char* what) {
  Block& block = block_of(*current_fiber());
  require_group(block, call.pair, what, call.site);
  if (!call.pair) {
    return;
  }
  Block& peer = peer_of(block, what, call.site);
  {
    Critical critical;
    block.tensor_calls.push_back({allocates, call.columns});
  }
  const u64 number = block.tensor_calls.size();
  if (peer.tensor_calls.size() >= number) {
    const TensorCall& other = peer.tensor_calls[number - 1];
    if (other.allocates != allocates || other.columns != call.columns) {
      fail_at(Fault::tensor, call.site, 0, "%s of %u columns, where the other block of the pair %s %u", what, call.columns,
              other.allocates ? "allocates" : "gives back", other.columns);
    }
  }
  FOR_EACH_LANE(lane, lanes) { static_cast<TensorAllocation*>(slots[lane])->call = number; }
  for (Fiber* fiber : take_blocked([&](const Fiber& each) {
         return each.tensor_call && block_of(each).rank == peer.rank && each.tensor_call <= number;
       })) {
    fiber->tensor_call = 0;
    make_ready(warp_of(*fiber), bit(fiber->lane));
  }
}

static void wait_for_peer(const TensorAllocation& call, const char* what) {
  Fiber& fiber = *current_fiber();
  if (call.pair && peer_of(block_of(fiber), what, call.site).tensor_calls.size() < call.call) {
    fiber.tensor_call = call.call;
    block_current();
  }
}

void fail_at_tensor_call(const Fiber& fiber) {
  const Block& block = block_of(fiber);
  const bool allocates = block.tensor_calls[fiber.tensor_call - 1].allocates;
  fail_for(fiber, 0, Fault::deadlock,
           "no thread can run: this thread is at tcgen05.%s.cta_group::2, to which no warp of the other block of its pair "
           "comes",
           allocates ? "alloc" : "dealloc");
}

// --- columns

// The first columns in reach that are free, or in an adversarial schedule the last.
static u32 tensor_place_for(const TensorMemory& memory, u32 columns) {
  const u32 places = tensor_columns / columns;
  for (u32 i = 0; i < places; ++i) {
    const u32 first = (worker->adversarial ? places - 1 - i : i) * columns;
    bool free = true;
    for (u32 column = first; column < first + columns; column += tensor_unit) {
      free = free && !memory.allocated(column);
    }
    if (free) {
      return first;
    }
  }
  return tensor_columns;
}

static void allocate_lanes(void** slots, u64 lanes) {
  const TensorAllocation wanted = agreed_allocation(slots, lanes, "tcgen05.alloc");
  make_call(slots, lanes, wanted, true, "tcgen05.alloc");
  TensorMemory& memory = tensor_memory_of(block_of(*current_fiber()));
  if (memory.relinquished) {
    fail_at(Fault::tensor, wanted.site, 0,
            "tcgen05.alloc in a block that has given up its right to it by tcgen05.relinquish_alloc_permit");
  }
  const u32 first = tensor_place_for(memory, wanted.columns);
  if (first == tensor_columns) {
    fail_at(Fault::tensor, wanted.site, 0,
            "tcgen05.alloc of %u columns waits for ever: the block itself has the others", wanted.columns);
  }
  {
    Critical critical;
    memory.cells.resize(tensor_lanes * tensor_columns);
  }
  for (u32 column = first; column < first + wanted.columns; ++column) {
    memory.owner[column / tensor_unit] = first + 1;
    memory.columns[column] = TensorColumn{};
    for (u32 lane = 0; lane < tensor_lanes; ++lane) {
      memory.cell(lane, column) = 0x7fffffffu;  // NaN
    }
  }
  memory.sizes[first / tensor_unit] = wanted.columns;
  char* place = from_shared_window(wanted.place, wanted.site);
  if (reinterpret_cast<uintptr_t>(place) % 4) {
    fail_at(Fault::misaligned, wanted.site, 0, "tcgen05.alloc writes to %#llx, which is no multiple of 4", wanted.place);
  }
  checker_write(place, 4, wanted.site);
  std::memcpy(place, &first, sizeof first);
}

void tensor_alloc(bool pair, u64 place, u32 columns, int line) {
  TensorAllocation wanted{place, columns, pair, __builtin_return_address(0)};
  warp_collect(0xffffffffu, &wanted, allocate_lanes, line);
  wait_for_peer(wanted, "tcgen05.alloc");
}

static void deallocate_lanes(void** slots, u64 lanes) {
  const TensorAllocation given = agreed_allocation(slots, lanes, "tcgen05.dealloc");
  const u32 first = static_cast<u32>(given.place);
  make_call(slots, lanes, given, false, "tcgen05.dealloc");
  const Block& block = block_of(*current_fiber());
  TensorMemory& memory = *block.tensor_memory;
  if (first % tensor_unit || first >= tensor_columns || memory.owner[first / tensor_unit] != first + 1 ||
      memory.sizes[first / tensor_unit] != given.columns) {
    fail_at(Fault::tensor, given.site, 0, "tcgen05.dealloc of %u columns at %#x, which tcgen05.alloc has not given",
            given.columns, first);
  }
  for (u32 column = first; column < first + given.columns; ++column) {
    const TensorColumn& found = memory.columns[column];
    if (found.under_way) {
      fail_at(Fault::race, given.site, 0,
              "tcgen05.dealloc of column %u, which a tcgen05.mma that nobody has waited for may still be writing", column);
    }
    checker_tensor_write(block.rank, column, given.site);
  }
  for (u32 column = first; column < first + given.columns; column += tensor_unit) {
    memory.owner[column / tensor_unit] = 0;
  }
}

void tensor_dealloc(bool pair, u32 address, u32 columns, int line) {
  TensorAllocation given{address, columns, pair, __builtin_return_address(0)};
  warp_collect(0xffffffffu, &given, deallocate_lanes, line);
  wait_for_peer(given, "tcgen05.dealloc");
}

void tensor_relinquish(bool pair) {
  Block& block = block_of(*current_fiber());
  require_group(block, pair, "tcgen05.relinquish_alloc_permit", __builtin_return_address(0));
  block.tensor_memory->relinquished = true;
}

// --- the end of a block

void end_tensor_memory(Block& block) {
  if (!block.tensor_memory) {
    return;
  }
  TensorMemory& memory = *block.tensor_memory;
  for (u32 unit = 0; unit < tensor_columns / tensor_unit; ++unit) {
    if (memory.owner[unit]) {
      fail_for(*current_fiber(), 0, Fault::tensor,
               "the block ends with %u columns of tensor memory allocated: tcgen05.dealloc must come first",
               memory.sizes[memory.owner[unit] / tensor_unit]);
    }
  }
  if (!memory.commits.empty()) {
    fail_at(Fault::race, memory.commits.front().site, 0,
            "the block ends before this tcgen05.commit has arrived: nothing that it waits for comes after");
  }
  for (const BulkLoad& load : worker->loads) {
    if (load.of_commit && shared_memory_holds(block, load.mbarrier)) {
      fail_at(Fault::race, load.copy.site, 0,
              "block (%u, %u, %u) may end before this tcgen05.commit arrives at an mbarrier in its shared memory: nothing "
              "that it waits for comes after",
              block.index.x, block.index.y, block.index.z);
    }
  }
  Critical critical;
  block.tensor_memory.reset();
}

}  // namespace simt
