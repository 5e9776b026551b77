// One worker: an operating-system thread that runs blocks one after another, each thread of a block as a fiber.
//
// A fiber runs until it waits (barrier, warp operation) or ends; there is no preemption. Which fiber comes next is one
// question, answered by next_ready(), out of one 64-bit mask of ready lanes per warp. The blocks of a cluster run
// together.
#pragma once

#include <setjmp.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

#include "../dialect/simt.h"
#include "context.h"
#include "copies.h"
#include "tensor_memory.h"
#include "wgmma.h"

namespace simt {

enum class WarpOperation : u8 { none, sync, shuffle, ballot, collect };

struct NamedBarrier;

struct Fiber : ThreadView {
  Context context;
  char* stack_low;
  u64 stack_bytes;
  int line;        // of the barrier or warp operation it waits at
  u32 warp_epoch;  // counts __syncwarp; the race rule's order within a warp
  bool fenced;     // has called __threadfence in this block
  bool waited;     // for the launches before this one
  CopyQueue copies;
  CopyQueue stores;  // bulk copies out of shared memory
  u64* mbarrier;     // it sleeps at this one, or null
  WgmmaOrder wgmma;
  TensorOrder tensor;
  NamedBarrier* named_barrier;  // it sleeps at this one, or null
  bool wants_registers;
  bool at_cluster_barrier;
  u64 tensor_call;  // it waits for the other block of its pair to make this one, by its number from 1; or 0
  u32 cluster_arrivals;
  u32 cluster_waits;
};

constexpr u32 named_barriers = 16;  // of a block

struct NamedBarrier {
  u32 arrived = 0;
  u32 expected = 0;
  int line = 0;
  u64 lanes[32] = {};  // of each warp, that have arrived
};

struct LaneWait {
  u64 mask;  // as the kernel gave it, or `converged`
  u64 value;
  u64 result;
  void* slot;
  u32 source_lane;
  WarpOperation operation;
};

struct Block;

struct Warp {
  Block* block;
  u64 members;
  u64 live;
  u64 ready;
  u64 waiting;  // at a warp operation
  u64 at_barrier;
  u32 first_thread;
  u32 registers;  // of each lane
  u32 wanted;     // more than that while it waits for them
  u32 register_changes;
  int register_line;  // of the latest
  Combine combine;
  LaneWait lanes[64];
};

struct Block : BlockView {
  u32 rank = 0;  // in its cluster
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  u32 live = 0;
  u64 ready_warps = 0;
  std::vector<char> memory;  // all of its shared memory
  char* window = nullptr;    // where it begins, and its addresses in PTX's shared state space

  std::vector<Warpgroup> warpgroups;
  std::unique_ptr<TensorMemory> tensor_memory;  // none until an instruction is for it
  std::vector<TensorCall> tensor_calls;         // that the blocks of a pair make together, so far
  NamedBarrier named[named_barriers];
  u32 free_registers = 0;  // that warps have given back, by the lane of a warp

  // the block barrier
  u32 arrived = 0;
  int barrier_line = 0;
  u32 barrier_thread = 0;
  int reduced = 0;
  int reduce_result = 0;
};

// The part of the process that holds the kernel's machine code and its global variables.
struct Image {
  struct Segment {
    char* low;
    char* high;
    bool writable;
  };
  char* base = nullptr;
  std::vector<Segment> segments;

  bool contains(const void* address) const;
  u64 site(const void* address) const;  // offset from `base`, or 0 outside
};

struct Launch {
  Request& request;
  Image image;
  u64 clusters;  // one past the last that runs
  u32 threads;  // of a block
  std::atomic<u64> next_cluster;
  std::atomic<bool> stopped;
  std::atomic<bool> waited;  // has any thread, for the launches before this one?
  std::mutex report_mutex;
};

// Room for one product of a warpgroup: too much for a fiber's stack.
struct MatrixSpace {
  std::vector<float> a;
  std::vector<float> b;
  std::vector<double> sums;
};

struct Checker;  // checker.h; only the checking build has one

struct Worker {
  explicit Worker(bool checking);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void prepare(Launch& launch);
  void run_blocks();
  void finish();

  Launch* launch = nullptr;
  Fiber scheduler{};          // the operating-system thread's own stack
  std::vector<Block> blocks;  // of one cluster, by rank

  // the schedule
  u64 ready_blocks = 0;
  Warp* running = nullptr;
  u64 pass = 0;  // the lanes of `running` that this pass over it has still to visit
  bool adversarial = false;
  u64 random_state = 1;
  std::vector<Fiber*> blocked;  // at an mbarrier or at the cluster barrier
  std::vector<BulkLoad> loads;  // issued and not landed
  std::deque<Tile> tiles;       // of the tensor copies of this cluster
  MatrixSpace matrices;
  u64 tensor_now = 1;  // counts what happens to the cluster's tensor memory
  u64 idle_polls = 0;  // questions to mbarriers since anything last happened

  u32 cluster_arrived = 0;
  u32 cluster_completed = 0;

  // leaving a fiber that must not continue
  sigjmp_buf escape;
  volatile bool inside = false;     // `escape` may be used
  volatile bool critical = false;   // holds a lock of the C library: wait before abandoning
  int patience = 0;                 // signals that may still be ignored in the hope of a better place
  const void* last_site = nullptr;  // the kernel's latest memory access, in the checking build
  Report report{};

  Checker* checker = nullptr;

 private:
  void allocate_stacks(u32 threads);
  void free_stacks();
  void prepare_block(Block& block, u32 rank);
  void begin_block(Block& block, u64 cluster);
  void run_cluster(u64 linear);
  [[noreturn]] void report_deadlock();

  char* stacks = nullptr;
  u32 stack_count = 0;
};

#ifdef SIMT_CHECK
extern __thread ThreadView* current_thread __attribute__((tls_model("initial-exec"), visibility("hidden")));
#endif
extern __thread Worker* worker __attribute__((tls_model("initial-exec"), visibility("hidden")));

constexpr u64 page_bytes = 4096;

inline u64 bit(u32 lane) { return u64{1} << lane; }

inline u32 lowest_lane(u64 lanes) { return static_cast<u32>(__builtin_ctzll(lanes)); }

#define FOR_EACH_LANE(lane, lanes) \
  for (u64 rest_ = (lanes), lane = 0; rest_ && (lane = lowest_lane(rest_), true); rest_ &= rest_ - 1)

// scheduler.cpp
Fiber* current_fiber();
inline Block& block_of(const ThreadView& thread) { return *static_cast<Block*>(thread.block); }
inline Warp& warp_of(const ThreadView& thread) { return block_of(thread).warps[thread.warp]; }
Fiber* next_ready();
void switch_to(Fiber* next);
u64 next_random();
void block_current();  // until another thread makes this one ready
void make_ready(Warp& warp, u64 lanes);
[[noreturn]] void thread_finished();

// shared_memory.cpp
void allocate_shared(Block& block, const Request& request);
void clear_shared(Block& block, const Request& request);
bool shared_memory_holds(const Block& block, const void* address);
using PlaceName = char[160];
void name_shared(const void* place, PlaceName& name);  // for messages; the checking build knows the variable
// An address of the window is a block's rank + 2, and an offset: the bit at the shift tells the blocks of a pair apart.
constexpr u32 window_rank_shift = 24;
constexpr u64 window_base(u64 rank) { return (rank + 2) << window_rank_shift; }
char* from_shared_window(u64 address, const void* site);

// copies.cpp
void land(Copy& copy);
void land_copies(Fiber& fiber);  // all that the thread has issued

// bulk_copies.cpp
void issue_load(const BulkLoad& load);
bool land_load();  // one of those under way, if there is any
void end_stores(Fiber& fiber);

// mbarrier.cpp. The address must be one; it is checked as an access.
u64* mbarrier_at(u64 address, bool initialised, const void* site);
void complete_bytes(u64* mbarrier, u32 bytes, const void* site);
void arrive_once(u64* mbarrier, const void* site);  // for work that no thread waits with
[[noreturn]] void fail_waiting_at(const Fiber& fiber, const u64* mbarrier);

// named_barriers.cpp
[[noreturn]] void fail_at_named_barrier(const Fiber& fiber);

// registers.cpp
void begin_registers(Block& block);
void end_registers(const Block& block);
void tell_of_registers(const Block& block);  // if a warp waits for some that do not come

// cluster.cpp
void leave_cluster(const Fiber& fiber);
[[noreturn]] void fail_at_cluster_barrier(const Fiber& fiber);

// warp_operations.cpp: let the operation end that these lanes wait at, if all have arrived whom it needs
bool complete_named(Warp& warp, u32 lane);
bool complete_converged(Warp& warp);
const char* name_of(WarpOperation operation);

// wgmma.cpp
void end_wgmma(const Fiber& fiber);
void touch_registers(Fiber& fiber, const char* place, u64 bytes, const char* verb, bool writes, const void* site);
void tell_of_warpgroup(Block& block);  // if it waits for a thread that does not come

// tensor_memory.cpp
void end_tensor_work(const Fiber& fiber);
void end_tensor_memory(Block& block);
[[noreturn]] void fail_at_tensor_call(const Fiber& fiber);
u32 tensor_commits();         // blocks with some that have not arrived
void land_commit(u32 which);  // the first one of such a block
void arrive_of_commit(u64* mbarrier, const void* site);

// grids.cpp
void require_waited(Launch& launch);  // at the end of a dependent launch

// signals.cpp: crashes and timeouts become reports for as long as one of these exists
class SignalGuard {
 public:
  SignalGuard();
  ~SignalGuard();
};
int watchdog_signal();

// reports.cpp. Ends the launch with the worker's report, from any fiber and from a signal handler.
[[noreturn]] void escape_from_fiber();
void describe_place(Report& report);
[[noreturn]] void fail_for(const Fiber& fiber, int other_line, Fault kind, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
[[noreturn]] void fail_at(Fault kind, const void* site, u64 other_site, const char* format, ...)
    __attribute__((format(printf, 4, 5)));

// Marks a stretch that uses the allocator or holds a lock: the watchdog must not leave it.
struct Critical {
  Critical() : before(worker->critical) { worker->critical = true; }
  ~Critical() { worker->critical = before; }
  bool before;
};

// Takes out of the blocked ones those that need not wait any longer.
template <class Wanted>
std::vector<Fiber*> take_blocked(Wanted wanted) {
  Critical critical;
  std::vector<Fiber*> taken;
  std::vector<Fiber*>& blocked = worker->blocked;
  u64 kept = 0;
  for (Fiber* fiber : blocked) {
    (wanted(*fiber) ? taken.emplace_back(fiber) : blocked[kept++]) = fiber;
  }
  blocked.resize(kept);
  return taken;
}

// What the checking build adds; empty in the fast one.
#ifdef SIMT_CHECK
Checker* make_checker();
void destroy_checker(Checker* checker);
void checker_begin_launch(Worker& worker);
void checker_begin_cluster(Worker& worker);
void checker_declare_shared(const SharedVariable& variable);
void checker_end_phase(Block& block);  // at its barrier
void checker_end_block(Block& block);
void checker_settle();                                              // reports a suspicion, see checker_rules.cpp
void checker_read(const void* place, u64 bytes, const void* site);  // by the current thread
void checker_write(const void* place, u64 bytes, const void* site);
void checker_begin_copy(const Copy& copy);
void checker_end_copy(const Copy& copy);
void checker_begin_source(const Copy& copy);  // for a copy that reads shared memory
void checker_end_source(const Copy& copy);
void checker_end_load(const Copy& copy, const void* mbarrier);
void checker_end_plain_load(const Copy& copy, const void* mbarrier);  // by the generic proxy
void checker_fence_proxy(const Fiber& fiber);
void checker_made_mbarrier(const Fiber& fiber, const void* mbarrier, const void* site);
void checker_fence_mbarriers(const Fiber& fiber);
void checker_use_mbarrier(const void* mbarrier, const void* site);  // by a copy that it counts
// A read of 16 bytes, which goes on until all have waited: `begin` for each of `times` readers, then one `end`.
void checker_begin_read(const char* place, const char* instruction, const void* site);
void checker_end_read(const char* place, const void* reader, const void* site, u32 phase, u32 times);
u32 checker_next_phase(const void* reader);
void checker_acquire_reads(const Fiber& fiber, const void* reader, u32 phase);  // and all before
void checker_commit(const Fiber& fiber, const void* reader);             // an arrival that comes behind its work so far,
// which it is going to tell who waits there of, once it has arrived; the `last` of its mbarriers comes last
void checker_tell(const void* mbarrier, const void* reader, u32 phase, bool last);
void checker_told(const void* mbarrier);  // now it has
void checker_tensor_write(u32 rank, u32 column, const void* site);  // of that block's, by the current thread
void checker_tensor_landed(u32 rank, u32 column, const void* reader, u32 phase);
void checker_tensor_read(u32 column, u32 quarter, bool first, const void* site);
void checker_touch_mbarrier(const void* place, bool initialised, const void* site);
void checker_meet_lanes(Warp& warp, u64 lanes);                // at a __syncwarp
void checker_release(const Fiber& fiber, const void* object);  // gives what the thread knows to this barrier
void checker_complete(const void* object);                     // whose phase completes
void checker_acquire(const Fiber& fiber, const void* object);  // and tells it to who has waited
const Report* checker_suspicion(Worker& worker);               // see checker_rules.cpp; null if there is none
#else
inline Checker* make_checker() { return nullptr; }
inline void destroy_checker(Checker*) {}
inline void checker_begin_launch(Worker&) {}
inline void checker_begin_cluster(Worker&) {}
inline void checker_declare_shared(const SharedVariable&) {}
inline void checker_end_phase(Block&) {}
inline void checker_end_block(Block&) {}
inline void checker_settle() {}
inline void checker_read(const void*, u64, const void*) {}
inline void checker_write(const void*, u64, const void*) {}
inline void checker_begin_copy(const Copy&) {}
inline void checker_end_copy(const Copy&) {}
inline void checker_begin_source(const Copy&) {}
inline void checker_end_source(const Copy&) {}
inline void checker_end_load(const Copy&, const void*) {}
inline void checker_end_plain_load(const Copy&, const void*) {}
inline void checker_fence_proxy(const Fiber&) {}
inline void checker_made_mbarrier(const Fiber&, const void*, const void*) {}
inline void checker_fence_mbarriers(const Fiber&) {}
inline void checker_use_mbarrier(const void*, const void*) {}
inline void checker_begin_read(const char*, const char*, const void*) {}
inline void checker_end_read(const char*, const void*, const void*, u32, u32) {}
inline u32 checker_next_phase(const void*) { return 0; }
inline void checker_acquire_reads(const Fiber&, const void*, u32) {}
inline void checker_commit(const Fiber&, const void*) {}
inline void checker_tell(const void*, const void*, u32, bool) {}
inline void checker_told(const void*) {}
inline void checker_tensor_write(u32, u32, const void*) {}
inline void checker_tensor_landed(u32, u32, const void*, u32) {}
inline void checker_tensor_read(u32, u32, bool, const void*) {}
inline void checker_touch_mbarrier(const void*, bool, const void*) {}
inline void checker_meet_lanes(Warp&, u64) {}
inline void checker_release(const Fiber&, const void*) {}
inline void checker_complete(const void*) {}
inline void checker_acquire(const Fiber&, const void*) {}
inline const Report* checker_suspicion(Worker&) { return nullptr; }
#endif

}  // namespace simt
