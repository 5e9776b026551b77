// The shadow memory of the checking build: what is remembered of each access, and of what memory.
#pragma once

#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "worker.h"

namespace simt {

// --- what is remembered of an access

constexpr u32 thread_bits = 10;  // a block has at most 1024 threads
constexpr u32 thread_mask = (1u << thread_bits) - 1;

constexpr u32 flag_atomic = 1u << 31;
constexpr u32 flag_lanes = 1u << 30;    // also by another lane of the warp, not ordered with this access
constexpr u32 flag_warps = 1u << 29;    // also by another warp of the block in this phase
constexpr u32 flag_blocks = 1u << 28;   // also by another block
constexpr u32 flag_copying = 1u << 27;  // a write: by an asynchronous copy that has not been waited for
constexpr u32 site_mask = flag_copying - 1;

struct Stamp {
  u32 phase;  // 0: no access
  u32 who;    // thread, and above it the thread's warp epoch; where there are clocks, the author
  u32 site;   // offset of the instruction in the kernel's library, and flags

  u32 thread() const { return who & thread_mask; }
  u32 epoch() const { return who >> thread_bits; }
  bool has(u32 flag) const { return (site & flag) != 0; }
};

struct Cell {
  Stamp write;
  Stamp read;          // the latest one; flags stand for the others of its phase
  Stamp foreign_read;  // one by an earlier block
};

// --- memory that a kernel may touch

// Subtractions only: a wild pointer may be so high that adding to it wraps around.
inline bool within(const char* low, const char* high, const char* place, u64 bytes) {
  u64 size = static_cast<u64>(high - low);
  return bytes <= size && static_cast<u64>(place - low) <= size - bytes;
}

struct Member {
  char* low;
  char* high;
  const char* name;
  bool writable;
  bool initialised;

  bool holds(const char* place, u64 bytes) const { return within(low, high, place, bytes); }
};

enum class Memory : u8 { shared, global, image };

// How many instructions under way may be reading a piece of shared memory, and one of them.
struct Reading {
  u32 count;
  u32 site;
  const char* instruction;
};

// Buffers that overlap share a region, so that an access through one is seen through the other.
struct Region {
  char* low;
  char* high;
  Memory memory;
  bool shadowed;    // nothing can go wrong in memory that is only read
  u32 grain_shift;  // a cell covers 1 << grain_shift bytes; see refine()
  char* origin;     // of the cells: `low` rounded down
  Cell* cells;
  u64 cell_count;
  const Block* owner;            // of shared memory
  std::vector<Reading> reading;  // of its pieces of 16 bytes, once there is any
  std::vector<Member> members;

  bool holds(const char* place, u64 bytes) const { return within(low, high, place, bytes); }
};

constexpr u32 coarsest_grain_shift = 4;  // a cell per 16-byte vector, until something smaller is accessed

// --- clocks, see checker_clocks.cpp

using Clock = std::vector<u32>;  // by author: all its accesses in phases below this one
using Known = std::shared_ptr<const Clock>;

struct ThreadOrder {
  u32 phase;  // of its accesses from now on
  Known known;
};

// An mbarrier, or the cluster's barrier.
struct Meeting {
  u32 author;  // of the copies that it counts
  Clock given;
  Known latest;  // to be joined into `given`
  Known taken;   // by who sees the phase complete
  u32 phase;     // of reads: that `taken` tells of
  Stamp made;    // of an mbarrier: by whom, and when
};

// Of a commit, at one of its mbarriers: what its thread knew, and the work that it waits for.
struct Arrival {
  Known known;
  u32 reader;
  u32 phase;
};

struct Join {
  Known left;
  Known right;
  Known both;
};

constexpr u32 joins_kept = 8;

struct Clocks {
  std::vector<ThreadOrder> threads;  // of the cluster, by author
  Clock fenced;                      // below these phases some fence.proxy.async has come behind an author's writes
  std::unordered_set<u32> plain_copiers;  // of the authors, the copies by cp.async that mbarriers count
  Clock fenced_mbarriers;            // and it or fence.mbarrier_init behind what mbarriers an author has made
  std::unordered_map<const void*, Meeting> meetings;
  std::unordered_map<const void*, std::deque<Known>> commits;  // that have not landed: what their threads knew
  std::unordered_map<const void*, std::deque<Arrival>> arrivals;  // that are still to come, by mbarrier
  std::vector<std::vector<Stamp>> readers;  // of cells, where there are several
  std::vector<u32> free_readers;
  Known latest_fenced;  // what `fenced` has been joined with last
  Join joins[joins_kept];
  u32 next_join = 0;
};

// What a block has published by a fence and an atomic update. Blocks run one after another, so whoever updates the same
// place later takes over all of it.
struct Publication {
  u32 phases_before;  // all of the block's phases below this one
  u32 thread;         // and in that phase this thread's own accesses
  Known known;        // where there are clocks, this instead of both
};
using Publications = std::unordered_map<u32, Publication>;  // by the block's first phase

struct Takeover {
  const Publications* history;
  u32 by_thread;
  u32 in_phase;
};

enum class Access : u8 { read, write, atomic };

// Of a column of tensor memory.
struct TensorStamps {
  Stamp write;
  u32 writer = 0;  // the thread, as an author
  std::vector<Stamp> reads[tensor_quarters];
};

struct Checker {
  std::vector<Region> regions;
  u64 first_buffer = 0;  // of the regions; they are in order of their addresses
  u64 last_buffer = 0;   // one past the last
  std::vector<Region> image;       // the library that holds the kernel
  std::vector<u32> static_shared;  // the variables that are regions already
  std::unique_ptr<Clocks> clocks;  // null in a launch that does without
  std::vector<Copy> sources;       // of copies that read shared memory
  u8 region_of_site[4096];         // where the instruction hit last time: nearly always where it hits now
  u32 warp_shift = 5;
  u32 phase = 0;
  u32 first_phase = 0;            // of the running cluster: without clusters, of the block
  std::vector<u32> first_phases;  // of every cluster so far
  std::vector<Index3> block_indices;
  std::unordered_map<const void*, Publications> published;
  std::vector<Takeover> taken_over;  // by the running block
  std::vector<TensorStamps> tensor;  // of the cluster's columns, block by block
  Report suspicion;                  // the first read in this phase of what nothing had written, if any
};

// checker_memory.cpp
const char* verb(Access access);
const Member& member_at(const Region& region, const char* place);
void refine(Region& region, u32 shift);
// The region that holds an access, or a report that none does. `remembered` is left for the next access from that site.
Region& find_region(const char* place, u64 bytes, Access access, const void* site, u8& remembered);
void require_permission(const Region& region, const char* place, u64 bytes, Access access, const void* site);

// checker_rules.cpp
[[noreturn]] void fail_race(const Region& region, const char* place, const Stamp& earlier, Access earlier_kind,
                            Access access, const void* site);
void suspect(const Region& region, const char* place, Access access, const void* site);
bool published_to(const Checker& checker, const Stamp& earlier, const Fiber& fiber);

u32 offset_of_site(const void* site);

// checker_copies.cpp
void require_no_source(const Region& region, const char* place, u64 bytes, Access access, const void* site);

// grids.cpp
void require_finished(const char* place, u64 bytes, Access access, const void* site);  // by the launches before this one

// checker_reads.cpp
void require_fenced(const char* place, u64 bytes, const void* site);  // what asynchronous instructions read
void require_no_reading(const Region& region, const char* place, u64 bytes, Access access, const void* site);

// checker_clocks.cpp
void clocks_begin_cluster(Checker& checker, u32 threads);
void checker_meet_block(Block& block);
Stamp clocks_stamp(const Fiber& fiber, u32 site);
bool stamp_is_copy(const Stamp& stamp);
// The phase of what a copy writes that this mbarrier counts, and its author; `plain`: by the generic proxy.
u32 clocks_land(const void* object, bool plain = false);
u32 clocks_copier(const void* object, bool plain = false);
Known clocks_published(const Fiber& fiber);
void clocks_take_over(const Fiber& fiber, const Known& published);
bool clocks_visible(const Takeover& takeover, const Fiber& fiber);
u32 clocks_next_phase(const void* reader);  // and its author's clock moves on
void clocks_acquire_reads(const Fiber& fiber, const void* reader, u32 phase);
bool clocks_ordered(const Stamp& earlier, const Fiber& fiber);          // does the thread know of it?
void clocks_remember_copied(Cell& cell, const Stamp& read);
void clocks_require_written(Region& region, Cell& cell, const char* place, const Fiber& fiber, const void* site);
void clocks_require_fenced(const Region& region, const Cell& cell, const char* place, const void* site);
void clocks_split(Cell& copy);  // of a cell that has been made smaller
void check_cell_by_clock(Region& region, Cell& cell, const char* place, Access access, bool needs_value,
                         const Fiber& fiber, const void* site, u32 site_offset);
void require_reachable(const Region& region, const char* place, Access access, const Fiber& fiber, const void* site);

// checker_rules.cpp: judge and remember one access to memory that threads share; or to a thread's own, which may be
// registers of wgmma.
__attribute__((noinline)) void check_memory(const void* address, u64 bytes, Access access, bool needs_value,
                                            const void* site);
__attribute__((noinline)) void check_registers(const void* address, u64 bytes, Access access, const void* site);

// One access. `site` is the return address into the kernel. Most accesses are to a thread's own memory, and pass by
// here: what judges the others is no part of this function, whose registers it would have to save.
inline void check_access(const void* address, u64 bytes, Access access, bool needs_value, const void* site) {
  Worker* w = worker;
  if (!w || !w->inside) {
    return;  // a global's constructor, while the library is loaded
  }
  w->last_site = site;
  const Fiber& fiber = *static_cast<const Fiber*>(current_fiber());
  if (static_cast<u64>(static_cast<const char*>(address) - fiber.stack_low) < fiber.stack_bytes || bytes == 0) {
    if (fiber.wgmma.pending || fiber.wgmma.high) {
      check_registers(address, bytes, access, site);
    }
    return;
  }
  check_memory(address, bytes, access, needs_value, site);
}

}  // namespace simt
