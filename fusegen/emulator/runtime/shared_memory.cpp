// The shared memory of a block: where variables lie in it, and what addresses its window has.
//
//     | margin | dynamic shared memory | margin | static variables, each with margins |
//
// Each block that runs has such a piece, laid out alike, so that a variable is an offset. A matrix descriptor holds 18
// bits of an address in the window: what a kernel for a GPU can have, margins included, lies below 2^18.
#include <cstdio>
#include <mutex>

#include "worker.h"

namespace simt {

constexpr u64 static_bytes = 256 * 1024;  // no GPU has more, margins included

static u64 round_up(u64 value, u64 to) { return (value + to - 1) / to * to; }

// An odd multiple of the alignment that is asked for: a kernel that counts on more must declare more.
static u64 odd_multiple(u64 at_least, u64 alignment) { return round_up(at_least, 2 * alignment) + alignment; }

static u64 dynamic_offset(const Request& request) { return odd_multiple(shared_margin, request.shared_alignment); }

constexpr u64 base_alignment = 2 * largest_shared_alignment;

static u64 static_offset(const Request& request) {
  return round_up(dynamic_offset(request) + request.shared_bytes + shared_margin, base_alignment);
}

void allocate_shared(Block& block, const Request& request) {
  u64 bytes = static_offset(request) + static_bytes;
  if (block.memory.size() < bytes + base_alignment) {
    block.memory.assign(bytes + base_alignment, static_cast<char>(0xff));
  }
  u64 address = round_up(reinterpret_cast<uintptr_t>(block.memory.data()), base_alignment);
  block.window = reinterpret_cast<char*>(address);
  block.dynamic_shared = block.window + dynamic_offset(request);
  block.shared = block.window + static_offset(request);
}

// A block finds whatever was there before; 0xff is NaN in every float format, and -1.
void clear_shared(Block& block, const Request& request) {
  std::memset(block.shared, 0xff, __atomic_load_n(request.static_shared_end, __ATOMIC_RELAXED));
  std::memset(block.dynamic_shared, 0xff, request.shared_bytes);
}

// --- static variables

static std::mutex& places_mutex() {
  static std::mutex* const instance = new std::mutex;
  return *instance;
}

static u32 give_place(SharedVariable& variable) {
  Critical critical;
  std::lock_guard<std::mutex> lock(places_mutex());
  u32 offset = __atomic_load_n(&variable.offset, __ATOMIC_RELAXED);
  if (offset == 0) {
    u32* end = worker->launch->request.static_shared_end;
    u64 place = odd_multiple(*end + shared_margin, variable.alignment);
    if (place + variable.bytes + shared_margin > static_bytes) {
      return 0;
    }
    offset = static_cast<u32>(place);
    __atomic_store_n(end, static_cast<u32>(place + variable.bytes), __ATOMIC_RELAXED);
    __atomic_store_n(&variable.offset, offset, __ATOMIC_RELEASE);
  }
  return offset;
}

char* place_shared(SharedVariable& variable) {
  const void* site = __builtin_return_address(0);
  u32 offset = __atomic_load_n(&variable.offset, __ATOMIC_ACQUIRE);
  if (offset == 0) {
    offset = give_place(variable);
  }
  if (offset == 0) {  // not in give_place: a fault leaves without unlocking
    fail_at(Fault::out_of_bounds, site, 0, "with %s the static shared variables need more than %llu bytes",
            variable.name, static_bytes);
  }
  Block& block = block_of(*current_fiber());
  char* low = block.shared + offset;
  checker_declare_shared(variable);
  return low;
}

// --- the window: 32-bit addresses of shared memory, as PTX has them. A generic address cut to 32 bits is none.

bool shared_memory_holds(const Block& block, const void* address) {
  const char* low = block.memory.data();
  return address >= low && address < low + block.memory.size();
}

u64 shared_window(const void* address) {
  for (const Block& block : worker->blocks) {
    if (shared_memory_holds(block, address)) {
      return window_base(block.rank) | static_cast<u64>(static_cast<const char*>(address) - block.window);
    }
  }
  fail_at(Fault::out_of_bounds, __builtin_return_address(0), 0, "%p is no address in shared memory", address);
}

char* from_shared_window(u64 address, const void* site) {
  const std::vector<Block>& blocks = worker->blocks;
  u64 rank = (address >> window_rank_shift) - 2;
  u64 offset = address & ((u64{1} << window_rank_shift) - 1);
  if (rank >= blocks.size() || offset + largest_shared_alignment > blocks[rank].memory.size()) {
    fail_at(Fault::out_of_bounds, site, 0,
            "%#llx is no address of shared memory: __cvta_generic_to_shared makes one of a pointer", address);
  }
  return blocks[rank].window + offset;
}

const void* from_shared(u64 address) { return from_shared_window(address, __builtin_return_address(0)); }

#ifndef SIMT_CHECK
void name_shared(const void* place, PlaceName& name) {
  name[0] = 0;
  for (const Block& block : worker->blocks) {
    if (shared_memory_holds(block, place)) {
      long long offset = static_cast<const char*>(place) - block.window;
      std::snprintf(name, sizeof name, "byte %lld of shared memory", offset);
    }
  }
}
#endif

}  // namespace simt
