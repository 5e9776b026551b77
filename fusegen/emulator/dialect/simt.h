// The contract between a compiled kernel and the runtime library (runtime/*.cpp).
//
// Both sides include this file; nothing else crosses the border. It pulls in no standard header, so that a kernel sees
// no more names than NVRTC and hiprtc would show it (no uint32_t, no INFINITY), and so that a kernel compiles quickly.
#pragma once

#pragma GCC visibility push(default)  // the runtime hides everything else
namespace simt {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct Index3 {
  u32 x;
  u32 y;
  u32 z;
};

// What a kernel may ask about the thread and the block it runs as. The runtime's own records begin with these.
struct BlockView {
  Index3 index;
  Index3 size;
  Index3 grid;
  char* shared;             // where the block's static shared variables begin
  char* dynamic_shared;     // the shared memory whose size the launch gives
  u32 updates_until_yield;  // counts atomic updates, so that a thread spinning on one lets the others run
};

struct ThreadView {
  Index3 index;
  u32 linear;  // position in the block
  u32 warp;    // position of its warp in the block
  u32 lane;    // position in the warp
  BlockView* block;
};

// A static __shared__ variable of the kernel. All blocks have it at the same place in their shared memory.
struct SharedVariable {
  u64 bytes;
  u64 alignment;
  const char* name;
  u32 offset;  // 0 until a thread has passed the declaration: the compiler doesn't tell what variables there are
};

#ifdef SIMT_CHECK
// Out of line and by value: the emulator's own records are then no memory accesses of the kernel, and `const` lets the
// compiler ask once. A thread never moves to another worker, so the answer stays right across barriers.
Index3 thread_index() __attribute__((const));
Index3 block_index() __attribute__((const));
Index3 block_size() __attribute__((const));
Index3 grid_size() __attribute__((const));
u32 lane_index() __attribute__((const));
char* dynamic_shared() __attribute__((const));
#else
// initial-exec: one load instead of a call. A pointer fits the space that glibc keeps for libraries loaded late.
// __thread, not thread_local: that one may have a constructor in another file, which clang asks for at every access.
extern __thread ThreadView* current_thread __attribute__((tls_model("initial-exec")));

inline const Index3& thread_index() { return current_thread->index; }
inline const Index3& block_index() { return current_thread->block->index; }
inline const Index3& block_size() { return current_thread->block->size; }
inline const Index3& grid_size() { return current_thread->block->grid; }
inline u32 lane_index() { return current_thread->lane; }
inline char* dynamic_shared() { return current_thread->block->dynamic_shared; }
#endif

// The kinds of fault, in the order of KINDS in kernel.py.
enum class Fault : u32 {
  none,
  out_of_bounds,
  misaligned,
  uninitialised,
  read_only,
  race,
  divergent_barrier,
  divergent_warp,
  inactive_lane,
  mask,
  divide_by_zero,
  shift,
  deadlock,
  timeout,
  segfault,
  stack_overflow,
  trap,
  resources,
  mbarrier,
  tensor,
  registers,
};

// Ends the launch with a report. `line` is the kernel's source line, or 0 when the caller's address must tell it.
[[noreturn]] void fail(Fault kind, int line, const char* format, ...) __attribute__((format(printf, 3, 4)));

// --- block-wide
enum class Reduce : u32 { any, all, count };
void barrier(int line);
int barrier_reduce(int predicate, Reduce how, int line);

// By a part of the block; no count stands for all of it. Who does not wait has arrived.
void named_barrier(u32 id, u32 threads, bool waits, int line);
void set_registers(u32 registers, bool takes, int line);  // setmaxnreg: .inc takes, .dec gives

// --- warp-wide. Each operation names the lanes that take part; `converged` stands for the forms without a mask, and
// means those lanes that arrive together, as on a machine that runs a warp in lock step.
constexpr u64 converged = 0;
u64 named_lanes(u64 mask, int line);  // checks that a mask names its caller, and returns it
void warp_sync(u64 mask, int line);
u64 warp_shuffle(u64 mask, u64 bits, u32 source_lane, int line);
u64 warp_ballot(u64 mask, int predicate, int line);

// The general form: each lane deposits a pointer, and the last to arrive runs `combine` over the slots of all lanes.
// See warp.h for its uses, and runtime/matrices.cpp for instructions that need the whole warp.
using Combine = void (*)(void** slots, u64 lanes);
void warp_collect(u64 mask, void* slot, Combine combine, int line);

// --- matrix instructions: all lanes of the warp, each with its fragments. `d` holds the addend, then the result.
enum class Number : u32 { f16, bf16, tf32, f32, e4m3, e5m2, e4m3fnuz, e5m2fnuz, s8, u8 };
constexpr bool of_8_bits(Number number) { return number >= Number::e4m3; }
constexpr bool is_whole(Number number) { return number >= Number::s8; }

// The bits of the nearest tf32, whose lower 13 are 0: ties away from zero, or to even. What is not finite loses those
// bits, too, as in the code for sm_80.
inline u32 nearest_tf32(u32 bits, bool to_even) {
  constexpr u32 tie = 1u << 12, kept = ~(2 * tie - 1);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  return (finite ? bits + (to_even ? tie - 1 + (bits >> 13 & 1) : tie) : bits) & kept;
}

// m16n8k`k` of a warp of 32, of numbers of these types; `d`: f32, of whole numbers s32
void mma(Number left, Number right, u32 k, const u32* a, const u32* b, void* d, int line);
// Of 64 lanes, each with `values` numbers of A and of B.
void mfma(Number left, Number right, u32 size, u32 values, const void* a, const void* b, void* d, int modifiers,
          int line);
// WMMA: 16x16x16 of 32 lanes, of which two have a row of a factor: each all 16 elements, or where the factors are `halved`
// 8 of them.
void wmma(Number left, Number right, bool halved, const void* a, const void* b, void* d, int line);
void load_matrices(u32 count, bool transposed, u64 address, u32* fragments, int line);  // ldmatrix: 8x8 of 16 bits
void store_matrices(u32 count, u64 address, const u32* fragments, int line);  // stmatrix

// A register that an instruction reads some time after it is issued: its bits then, and where it lies, if it is a variable.
struct PtxRegister {
  u32 bits;
  const u32* place;

  inline __attribute__((always_inline)) operator u32() const { return bits; }
};

// An accumulator that an instruction writes later: where it lies.
struct PtxSum {
  void* place;
};

// --- wgmma, by the warpgroups of a block: n / 2 accumulators by reference, then the operands of the instruction
struct WgmmaOperand {
  u64 bits;

  const u32* place = nullptr;  // of a register that is read until the wait

  inline __attribute__((always_inline)) WgmmaOperand(const PtxSum& sum) : bits(reinterpret_cast<u64>(sum.place)) {}
  inline __attribute__((always_inline)) WgmmaOperand(const PtxRegister& value) : bits(value.bits), place(value.place) {}
  inline __attribute__((always_inline)) WgmmaOperand(u64 value) : bits(value) {}
  inline __attribute__((always_inline)) WgmmaOperand(u32 value) : bits(value) {}
  inline __attribute__((always_inline)) WgmmaOperand(int value) : bits(static_cast<u64>(i64{value})) {}
  inline __attribute__((always_inline)) WgmmaOperand(bool value) : bits(value) {}
};
// `a` and `b`: what the factors are numbers of.
void wgmma(Number a, Number b, u32 n, const WgmmaOperand* operands, u32 count, int line);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(u32 allowed);

// --- tensor memory: allocated, loaded and given back by whole warps, written by the products of one thread; `pair`: of
// both blocks of a pair (.cta_group::2)
enum class TensorKind : u32 { f16, tf32, f8f6f4, i8 };
void tensor_alloc(bool pair, u64 place, u32 columns, int line);  // the address goes to that place in the window
void tensor_dealloc(bool pair, u32 address, u32 columns, int line);
void tensor_relinquish(bool pair);
void tensor_fence(bool after);  // tcgen05.fence::after_thread_sync, or ::before_thread_sync
void tensor_mma(bool pair, TensorKind kind, u32 to, u64 a, u64 b, u32 instruction, bool adds, int line);
// Arrives at that mbarrier, or at the same place of each of `blocks`, where that is not 0.
void tensor_commit(bool pair, u64 mbarrier, u32 blocks, int line);
void tensor_load_registers(u32 count, u32 address, void** registers, int line);  // .16x256b: of 8 columns each
void tensor_wait_loads(int line);

// --- memory
char* place_shared(SharedVariable& variable);  // where it lies in this block; gives it a place if it has none
u64 shared_window(const void* address);        // the address in PTX's shared state space
const void* from_shared(u64 address);          // and back
void fence();      // __threadfence: what this thread wrote becomes visible through a later atomic
void fence_proxy();  // fence.proxy.async: what this thread knows of may be read by asynchronous instructions
void fence_mbarriers();  // fence.mbarrier_init: the mbarriers that this thread has made may be used by them
void yield_now();  // lets other threads of the block run, so that one thread may spin on another
int device_printf(const char* format, ...) __attribute__((format(printf, 1, 2)));
i64 clock_ticks();

// --- asynchronous copies into shared memory, by groups of the thread that issues them (cp.async)
void copy_async(u64 to, const void* from, u32 bytes, u32 filled);  // `to` in the window; zeros behind `filled` bytes
void commit_copies();
void wait_copies(u32 allowed);  // at most so many groups stay under way
void wait_all_copies();
void arrive_with_copies(u64 mbarrier, int line);  // once all that this thread has issued so far are complete

// --- mbarriers, by their addresses in the window
void mbarrier_init(u64 address, u32 count, int line);
void mbarrier_invalidate(u64 address, int line);
u64 mbarrier_arrive(u64 address, u32 count, u32 expected_bytes, int line);  // the state before
void mbarrier_expect(u64 address, u32 bytes, int line);
bool mbarrier_test(u64 address, u32 parity, int line);  // lets others run if the answer is no
bool mbarrier_wait(u64 address, u32 parity, int line);  // true, when the phase has completed

// --- bulk copies: into shared memory, counted by an mbarrier; and out of it, by groups
void bulk_load(u64 to, const void* from, u32 bytes, u64 mbarrier, int line);
void bulk_store(void* to, u64 from, u32 bytes, int line);
void bulk_prefetch(const void* from, u32 bytes, int line);  // to a cache: nothing comes of it but what a read is told of
// Of a box of a tensor, at coordinates with the contiguous axis first; into every block of `blocks`, or if that is 0,
// into the block of the address. `pair`: the mbarrier may be the other block's of a pair.
void tensor_load(u64 to, u64 map, const u64* coordinates, u32 rank, u64 mbarrier, u32 blocks, bool pair, int line);
void tensor_store(u64 map, const u64* coordinates, u32 rank, u64 from, int line);
void commit_bulk_stores();
void wait_bulk_stores(u32 allowed, bool only_read);

// --- clusters
void cluster_arrive(bool release, int line);
void cluster_wait(int line);
u32 cluster_rank() __attribute__((const));
Index3 cluster_size() __attribute__((const));
void* map_shared_rank(const void* address, u32 rank);
u32 shared_rank_of(const void* address);
u64 map_window_rank(u64 address, u32 rank);

#ifdef SIMT_CHECK
void note_read(const void* address, u64 bytes);
void note_write(const void* address, u64 bytes);
// An atomic update is begin, compute, commit. Checking runs on one worker and never switches between the two.
u64 atomic_begin(const void* address, u32 bytes);
void atomic_commit(void* address, u32 bytes, u64 bits);
#endif

constexpr u64 shared_margin = 256;  // bytes on either side of a static __shared__ variable that nothing may touch
constexpr u64 largest_shared_alignment = 4096;

// --- launches beside each other
void wait_for_grids();  // griddepcontrol.wait

// --- launching
struct BufferRange {
  const char* name;
  char* start;
  u64 bytes;
  u32 writable;
  u32 initialised;
};

struct Report {
  u32 kind;           // Fault
  u32 line;           // source line, or 0: then `site` tells it
  u32 other_line;     // of the thread this one disagrees with, or 0
  u64 site;           // return address as an offset in the kernel's library, or 0 if unknown
  u64 other_site;     // of the earlier access of a race, or 0
  u64 fallback_site;  // if no line belongs to `site`, or 0
  u32 has_place;      // block and thread are known
  Index3 block;
  Index3 thread;
  char text[1024];
};

using Trampoline = void (*)(void* kernel, void** arguments);

// One launch. Filled in by kernel.py (class _Request there mirrors the layout), which also reads the report.
struct Request {
  Index3 grid;
  Index3 block;
  Index3 cluster;
  u64 shared_bytes;
  u64 shared_alignment;
  u64 seed;  // 0: round robin; otherwise the adversarial schedule of this seed
  double timeout_s;
  u32 workers;
  u32 warp;
  u32 clocked;  // the kernel has clusters or mbarriers: see runtime/checker_clocks.cpp
  void** arguments;
  const BufferRange* buffers;
  u64 buffer_count;
  Trampoline trampoline;
  void* kernel;
  u32* static_shared_end;  // of the kernel's library: how far its static __shared__ variables reach so far
  u64 first_block;         // the only ones that run, in the order of the grid; whole clusters
  u64 last_block;          // one past the last
  u64 block_step;          // of these every so many-th cluster, or block where there are none
  u32 registers;           // of a thread, at most, by its launch bounds; 0 if it has none
  u32 dependent;           // it may begin while launches before it run: griddepcontrol.wait waits for their end
  const BufferRange* unfinished;  // what these may still be reading or, where that is `writable`, writing
  u64 unfinished_count;
  Report report;
};

void launch(Request& request);

}  // namespace simt
#pragma GCC visibility pop
