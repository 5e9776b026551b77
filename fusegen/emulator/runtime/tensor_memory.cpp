// Blackwell's tensor memory: tcgen05.mma into it by one thread, tcgen05.commit onto mbarriers, and tcgen05.ld by a warp
// into registers. How it is allocated is tensor_allocation.cpp's.
//
// A product of a pair (.cta_group::2) is one thread's of the even block, and reads and writes both blocks' memory.
//
// A product lands at once in the plain schedule. In an adversarial one it does, with what it reads of shared memory, when
// a commit behind it arrives, which is when no thread can run without; and a load reads when its warp waits for it,
// until which the registers are NaN. A commit's arrivals in other blocks are there later still, in any order.
//
// What must be ordered is held to in both builds as far as fences say (tcgen05.fence::before_thread_sync behind a load,
// ::after_thread_sync before a thread's instructions on what others had), and by clocks in the checking build
// (checker_tensor.cpp).
//
// PTX ISA 9, "TensorCore 5th Generation Family Instructions": addresses (lane << 16 | column), "Shared memory
// descriptor", "Instruction descriptor", "Layout D" (row i of 128 is lane i), "Matrix fragments for shape .16x256b",
// "Access restrictions" and "Memory Consistency Model". The bits are the same in CUTLASS (cute/arch/mma_sm100_desc.hpp),
// and so are the fragments (cute/atom/copy_traits_sm100.hpp, SM100_TMEM_LOAD_16dp256b1x).
#include "shared_matrices.h"

namespace simt {

TensorMemory& tensor_memory_of(Block& block) {
  if (!block.tensor_memory) {
    Critical critical;
    block.tensor_memory = std::make_unique<TensorMemory>();
  }
  return *block.tensor_memory;
}

Block& peer_of(Block& block, const char* what, const void* site) {
  const u32 peer = block.rank ^ 1;
  if (peer >= worker->blocks.size()) {
    fail_at(Fault::tensor, site, 0, "%s of a pair of blocks, in a launch whose clusters have no other block for this one",
            what);
  }
  return worker->blocks[peer];
}

void require_group(Block& block, bool pair, const char* what, const void* site) {
  u32& group = tensor_memory_of(block).group;
  const u32 wanted = pair ? 2 : 1;
  if (group && group != wanted) {
    fail_at(Fault::tensor, site, 0, "%s with .cta_group::%u, behind instructions with .cta_group::%u: a kernel has one", what,
            wanted, group);
  }
  group = wanted;
}

void require_tensor_warp(u64 lanes, const char* what, const void* site) {
  if (lanes != 0xffffffffu || worker->launch->request.warp != 32) {
    fail_at(Fault::divergent_warp, site, 0, "%s by lanes %#llx of a warp; it takes all 32", what, lanes);
  }
}

static u32 thread_of(const Fiber& fiber) { return block_of(fiber).rank * worker->launch->threads + fiber.linear; }

// --- fences

static void require_no_loads(const Fiber& fiber, const char* what) {
  if (!fiber.tensor.loads.empty()) {
    fail_at(Fault::race, fiber.tensor.load_site, 0, "%s while this tcgen05.ld may be under way: tcgen05.wait::ld must come first",
            what);
  }
}

void tensor_fence(bool after) {
  Fiber& fiber = *current_fiber();
  if (!after) {
    require_no_loads(fiber, "the thread is at tcgen05.fence::before_thread_sync");
  }
  (after ? fiber.tensor.after : fiber.tensor.before) = ++worker->tensor_now;
}

// What others had of a column must lie before this thread's latest fence, and before one of theirs.
static void require_fences(const Block& block, const Fiber& fiber, u32 column, bool writes, const char* what,
                           const void* site) {
  const TensorColumn& found = block.tensor_memory->columns[column];
  const bool own = writes && found.writer == thread_of(fiber);
  if (found.product && !found.under_way && !own && found.landed_at > fiber.tensor.after) {
    fail_at(Fault::race, site, 0,
            "%s column %u, which a tcgen05.mma has written: tcgen05.fence::after_thread_sync must come behind the wait "
            "for that",
            what, column);
  }
  for (u32 quarter = 0; writes && quarter < tensor_quarters; ++quarter) {
    for (const TensorReader& reader : found.readers[quarter]) {
      const Fiber& other = block.fibers[reader.thread];
      if (&other == &fiber) {
        continue;
      }
      if (reader.at > other.tensor.before) {
        fail_at(Fault::race, site, 0,
                "%s column %u, which warp %u has read: tcgen05.fence::before_thread_sync must come behind its "
                "tcgen05.wait::ld",
                what, column, other.warp);
      }
      if (reader.at > fiber.tensor.after) {
        fail_at(Fault::race, site, 0,
                "%s column %u, which warp %u has read: tcgen05.fence::after_thread_sync must come behind the wait for "
                "that",
                what, column, other.warp);
      }
    }
  }
}

static void require_allocated(const TensorMemory& memory, u32 column, const char* what, const void* site) {
  if (column >= tensor_columns || !memory.allocated(column)) {
    fail_at(Fault::out_of_bounds, site, 0, "%s column %u of tensor memory, which is not allocated", what, column);
  }
}

// --- products

static MatrixLayout tensor_layout(u64 descriptor, const void* site) {
  constexpr u64 fixed = 3ull << 14 | 3ull << 30 | 7ull << 46 | 0xffull << 53;
  if ((descriptor & fixed) != 1ull << 46) {
    fail_at(Fault::tensor, site, 0,
            "%#llx is no shared memory descriptor of tcgen05: bits 46 to 48 must be 0b001, bits 14, 15, 30, 31 and 53 to "
            "60 zero",
            descriptor);
  }
  if (bits_of(descriptor, 49, 4)) {
    fail_at(Fault::tensor, site, 0,
            "the shared memory descriptor %#llx has a base offset or an absolute address, which the emulator does not "
            "model",
            descriptor);
  }
  u32 span = 16, permute = 0;
  switch (bits_of(descriptor, 61, 3)) {
    case 0: break;
    case 2: span = 128, permute = 7; break;
    case 4: span = 64, permute = 3; break;
    case 6: span = 32, permute = 1; break;
    default:
      fail_at(Fault::tensor, site, 0,
              "the shared memory descriptor %#llx has swizzle mode %llu; 0 (none), 2 (128 bytes), 4 (64) and 6 (32) are "
              "modelled",
              descriptor, bits_of(descriptor, 61, 3));
  }
  return {bits_of(descriptor, 0, 14) << 4, bits_of(descriptor, 16, 14) << 4, bits_of(descriptor, 32, 14) << 4, span,
          permute};
}

static Number tensor_number(TensorKind kind, u64 format, u32 instruction, const void* site) {
  if (kind == TensorKind::f16 && format < 2) return format ? Number::bf16 : Number::f16;
  if (kind == TensorKind::tf32 && format == 2) return Number::tf32;
  if (kind == TensorKind::f8f6f4 && format < 2) return format ? Number::e5m2 : Number::e4m3;
  if (kind == TensorKind::i8 && format < 2) return format ? Number::s8 : Number::u8;
  fail_at(Fault::tensor, site, 0, "the instruction descriptor %#x names a type that its kind has not, or that the emulator "
          "does not model: %llu", instruction, format);
}

static TensorProduct tensor_product(bool pair, TensorKind kind, u32 to, u64 a, u64 b, u32 instruction, bool adds,
                                    const void* site) {
  const u32 m = static_cast<u32>(bits_of(instruction, 24, 5)) << 4, n = static_cast<u32>(bits_of(instruction, 17, 6)) << 3;
  const u32 blocks = pair ? 2 : 1, step = 16 * blocks;
  const bool whole = kind == TensorKind::i8;
  if (instruction & (0xfu | 1u << 6 | 3u << 13 | 1u << 23 | 7u << 29) || bits_of(instruction, 4, 2) != (whole ? 2 : 1)) {
    fail_at(Fault::tensor, site, 0,
            "the instruction descriptor %#x asks for what the emulator does not model: sums of f32 or s32, dense, with no "
            "sign changed, are",
            instruction);
  }
  if (m != blocks * tensor_lanes || n < step || n > 256 || n % step) {
    fail_at(Fault::tensor, site, 0,
            "the instruction descriptor %#x asks for %u x %u; %u rows, and %u to 256 columns by %u, are modelled%s",
            instruction, m, n, blocks * tensor_lanes, step, step, pair ? " of a pair" : "");
  }
  const Number left = tensor_number(kind, bits_of(instruction, 7, 3), instruction, site);
  const Number right = tensor_number(kind, bits_of(instruction, 10, 3), instruction, site);
  const bool turned[] = {bits_of(instruction, 15, 1) != 0, bits_of(instruction, 16, 1) != 0};
  if ((turned[0] || turned[1]) && kind != TensorKind::f16) {
    fail_at(Fault::tensor, site, 0,
            "the instruction descriptor %#x has a factor across K, which the emulator models for 16 bits alone",
            instruction);
  }
  if (to >> 16) {
    fail_at(Fault::tensor, site, 0, "tcgen05.mma of 128 rows into tensor memory at %#x: they begin at lane 0", to);
  }
  const Fiber& fiber = *current_fiber();
  const u32 rank = block_of(fiber).rank;
  const MatrixLayout a_lies = tensor_layout(a, site), b_lies = tensor_layout(b, site);
  TensorProduct product{to, n, blocks, {}, {}, adds, whole, site, fiber.linear};
  for (u32 i = 0; i < blocks; ++i) {  // at the same place in both blocks
    product.a[i] = {a_lies, tensor_lanes, left, turned[0], rank + i};
    product.b[i] = {b_lies, n / blocks, right, turned[1], rank + i};
  }
  return product;
}

template <class Visit>
static void for_each_factor(const TensorProduct& product, Visit visit) {
  for (u32 i = 0; i < product.blocks; ++i) {
    visit(product.a[i]);
    visit(product.b[i]);
  }
}

// The sums of `block`, which multiplies its rows by all columns.
static void land(Block& block, const TensorProduct& product) {
  TensorMemory& memory = *block.tensor_memory;
  const u32 n = product.n, depth = 2 * product.a[0].chunk();
  MatrixSpace& space = worker->matrices;
  {
    Critical critical;
    space.a.resize(tensor_lanes * depth);
    space.b.resize(depth * n);
    space.sums.assign(tensor_lanes * n, 0.0);
  }
  for (u32 i = 0; i < product.blocks; ++i) {
    if (product.a[i].block == block.rank) {
      read_shared_matrix(product.a[i], product.site, space.a.data(), depth, 1);
    }
    read_shared_matrix(product.b[i], product.site, space.b.data() + i * (n / product.blocks), 1, n);
  }
  for (u32 i = 0; product.adds && i < tensor_lanes * n; ++i) {
    const u32 bits = memory.cell(i / n, product.column + i % n);
    space.sums[i] = product.whole ? static_cast<int>(bits) : static_cast<double>(__builtin_bit_cast(float, bits));
  }
  multiply_add(space.sums.data(), space.a.data(), space.b.data(), tensor_lanes, n, depth);
  for (u32 i = 0; i < tensor_lanes * n; ++i) {
    const double sum = space.sums[i];
    memory.cell(i / n, product.column + i % n) =
        product.whole ? static_cast<u32>(static_cast<i64>(sum)) : __builtin_bit_cast(u32, rounded(sum));
  }
}

static void land_all(Block& block, const TensorProduct& product) {
  for (u32 i = 0; i < product.blocks; ++i) {
    land(worker->blocks[block.rank + i], product);
  }
}

// The product writes its columns of that block.
static void begin_writing(Block& block, const Fiber& fiber, const TensorProduct& product, u64 number) {
  const void* site = product.site;
  TensorMemory& memory = tensor_memory_of(block);
  for (u32 column = product.column; column < product.column + product.n; ++column) {
    require_allocated(memory, column, "tcgen05.mma writes", site);
    TensorColumn& found = memory.columns[column];
    if (found.under_way && found.writer != thread_of(fiber)) {
      fail_at(Fault::race, site, 0, "tcgen05.mma writes column %u, which another thread's may still be writing", column);
    }
    if (product.adds && !found.product) {
      fail_at(Fault::uninitialised, site, 0, "tcgen05.mma adds to column %u of tensor memory, which nothing has written",
              column);
    }
    require_fences(block, fiber, column, true, "tcgen05.mma writes", site);
    checker_tensor_write(block.rank, column, site);
    found.product = number;
    found.under_way = true;
    found.writer = thread_of(fiber);
    for (std::vector<TensorReader>& readers : found.readers) {
      readers.clear();
    }
  }
}

void tensor_mma(bool pair, TensorKind kind, u32 to, u64 a, u64 b, u32 instruction, bool adds, int line) {
  const void* site = __builtin_return_address(0);
  Fiber& fiber = *current_fiber();
  Block& block = block_of(fiber);
  fiber.line = line;
  require_group(block, pair, "tcgen05.mma", site);
  if (pair) {
    peer_of(block, "tcgen05.mma", site);
    if (block.rank % 2) {
      fail_at(Fault::tensor, site, 0,
              "tcgen05.mma by the second block of a pair; the emulator models pairs whose first block multiplies");
    }
  }
  TensorMemory& memory = tensor_memory_of(block);
  const TensorProduct product = tensor_product(pair, kind, to, a, b, instruction, adds, site);
  const u64 number = ++memory.issued;
  for (u32 i = 0; i < product.blocks; ++i) {
    begin_writing(worker->blocks[block.rank + i], fiber, product, number);
  }
  for_each_factor(product, [&](const SharedMatrix& matrix) {
    for_each_chunk(matrix, site, [&](const char* place, u32, u32) { checker_begin_read(place, "tcgen05.mma", site); });
  });
  if (!worker->adversarial) {
    land_all(block, product);
  }
  Critical critical;
  memory.products.push_back(product);
}

// --- commits

// Of the columns of `memory` that products up to `last` of this block have written.
static void end_writing(Block& block, const TensorMemory& issuing, u64 last, u32 writer, u32 phase) {
  for (u32 column = 0; column < tensor_columns; ++column) {
    TensorColumn& found = block.tensor_memory->columns[column];
    if (found.under_way && found.writer == writer && found.product <= last) {
      found.under_way = false;
      found.landed_at = worker->tensor_now;
      checker_tensor_landed(block.rank, column, &issuing, phase);
    }
  }
}

void arrive_of_commit(u64* mbarrier, const void* site) {
  for (const Block& block : worker->blocks) {
    if (block.live == 0 && shared_memory_holds(block, mbarrier)) {
      fail_at(Fault::mbarrier, site, 0, "this tcgen05.commit arrives at an mbarrier of block (%u, %u, %u), which has ended",
              block.index.x, block.index.y, block.index.z);
    }
  }
  checker_told(mbarrier);
  arrive_once(mbarrier, site);
}

static void land_first_commit(Block& block) {
  TensorMemory& memory = *block.tensor_memory;
  const TensorCommit commit = memory.commits.front();
  {
    Critical critical;
    memory.commits.pop_front();
  }
  Fiber& fiber = block.fibers[commit.issuer];
  ActingAs issuer(fiber);
  const u32 phase = checker_next_phase(&memory);
  ++worker->tensor_now;
  while (memory.issued - memory.products.size() < commit.last) {
    const TensorProduct product = memory.products.front();
    if (worker->adversarial) {
      land_all(block, product);
    }
    for_each_factor(product, [&](const SharedMatrix& matrix) {
      for_each_chunk(matrix, product.site, [&](const char* place, u32, u32) {
        checker_end_read(place, &memory, product.site, phase, 1);
      });
    });
    Critical critical;
    memory.products.pop_front();
  }
  for (Block& each : worker->blocks) {
    if (each.tensor_memory) {
      end_writing(each, memory, commit.last, thread_of(fiber), phase);
    }
  }
  for (u64* mbarrier : commit.mbarriers) {
    checker_tell(mbarrier, &memory, phase, mbarrier == commit.mbarriers.back());
    if (!worker->adversarial || shared_memory_holds(block, mbarrier)) {
      arrive_of_commit(mbarrier, commit.site);
      continue;
    }
    BulkLoad arrival{};  // in another block some time later
    arrival.copy.site = commit.site;
    arrival.mbarrier = mbarrier;
    arrival.arrives = arrival.of_commit = true;
    issue_load(arrival);
  }
}

void tensor_commit(bool pair, u64 mbarrier, u32 blocks, int line) {
  const void* site = __builtin_return_address(0);
  Fiber& fiber = *current_fiber();
  Block& block = block_of(fiber);
  fiber.line = line;
  require_group(block, pair, "tcgen05.commit", site);
  TensorMemory& memory = tensor_memory_of(block);
  for (const TensorProduct& product : memory.products) {
    if (product.issuer != fiber.linear) {
      fail_at(Fault::tensor, site, product.site ? worker->launch->image.site(product.site) : 0,
              "tcgen05.commit while another thread's tcgen05.mma is under way: the emulator models one thread that issues "
              "them");
    }
  }
  TensorCommit commit{memory.issued, fiber.linear, {}, site};
  {
    Critical critical;
    commit.mbarriers.reserve(worker->blocks.size());
  }
  if (blocks == 0) {
    commit.mbarriers.push_back(mbarrier_at(mbarrier, true, site));
  }
  FOR_EACH_LANE(rank, blocks) {
    commit.mbarriers.push_back(mbarrier_at(map_window_rank(mbarrier, static_cast<u32>(rank)), true, site));
  }
  memory.committed = memory.issued;
  checker_commit(fiber, &memory);
  {
    Critical critical;
    memory.commits.push_back(commit);
  }
  if (!worker->adversarial) {
    land_first_commit(block);
  }
}

u32 tensor_commits() {
  u32 count = 0;
  for (const Block& block : worker->blocks) {
    count += block.tensor_memory && !block.tensor_memory->commits.empty();
  }
  return count;
}

void land_commit(u32 which) {
  for (Block& block : worker->blocks) {
    if (block.tensor_memory && !block.tensor_memory->commits.empty() && which-- == 0) {
      land_first_commit(block);
      return;
    }
  }
}

// --- loads, by a whole warp: lane l has columns l % 4 * 2 and 1 more of each 8, of lanes l / 4 and 8 more

struct TensorLoad {
  u32 address;
  u32 count;  // of 8 columns
  void** registers;
  const void* site;
};

static void tensor_load_lanes(void** slots, u64 lanes) {
  const TensorLoad first = *static_cast<TensorLoad*>(slots[lowest_lane(lanes)]);
  require_tensor_warp(lanes, "tcgen05.ld", first.site);
  Block& block = block_of(*current_fiber());
  Warp& warp = warp_of(*current_fiber());
  TensorMemory& memory = tensor_memory_of(block);
  const u32 lane0 = first.address >> 16, column0 = first.address & 0xffff;
  const u32 number = warp.first_thread / 32, quarter = number % tensor_quarters;
  if (lane0 != quarter * 32 && lane0 != quarter * 32 + 16) {
    fail_at(Fault::out_of_bounds, first.site, 0,
            "tcgen05.ld of 16 lanes from lane %u on by warp %u, which reaches lanes %u to %u: .16x256b takes the first or "
            "the last 16 of them",
            lane0, number, quarter * 32, quarter * 32 + 31);
  }
  for (u32 column = column0; column < column0 + 8 * first.count; ++column) {
    require_allocated(memory, column, "tcgen05.ld reads", first.site);
    TensorColumn& found = memory.columns[column];
    if (!found.product) {
      fail_at(Fault::uninitialised, first.site, 0,
              "tcgen05.ld reads column %u of tensor memory, which no tcgen05.mma has written", column);
    }
    if (found.under_way) {
      fail_at(Fault::race, first.site, 0,
              "tcgen05.ld reads column %u of tensor memory, which a tcgen05.mma that no mbarrier has told of may still be "
              "writing",
              column);
    }
    Critical critical;
    found.readers[quarter].push_back({warp.first_thread, worker->tensor_now + 1});
  }
  FOR_EACH_LANE(lane, lanes) {
    Fiber& fiber = block.fibers[warp.first_thread + lane];
    const TensorLoad& own = *static_cast<TensorLoad*>(slots[lane]);
    if (own.address != first.address) {
      fail_at(Fault::divergent_warp, first.site, 0, "the lanes of a warp give tcgen05.ld different addresses");
    }
    ActingAs acting(fiber);
    for (u32 column = column0; column < column0 + 8 * first.count; ++column) {
      require_fences(block, fiber, column, false, "tcgen05.ld reads", first.site);
      checker_tensor_read(column, quarter, lane == 0, first.site);
    }
    Critical critical;
    fiber.tensor.load_site = first.site;
    for (u32 i = 0; i < 4 * first.count; ++i) {
      const u32 l = static_cast<u32>(lane);
      auto* to = static_cast<float*>(own.registers[i]);
      *to = __builtin_nanf("");
      fiber.tensor.loads.push_back({to, lane0 + l / 4 + i / 2 % 2 * 8, column0 + i / 4 * 8 + l % 4 * 2 + i % 2});
    }
  }
  ++worker->tensor_now;
}

void tensor_load_registers(u32 count, u32 address, void** registers, int line) {
  TensorLoad load{address, count, registers, __builtin_return_address(0)};
  warp_collect(0xffffffffu, &load, tensor_load_lanes, line);
}

static void tensor_wait_lanes(void**, u64 lanes) {
  require_tensor_warp(lanes, "tcgen05.wait::ld", nullptr);
  Block& block = block_of(*current_fiber());
  Warp& warp = warp_of(*current_fiber());
  TensorMemory& memory = tensor_memory_of(block);
  FOR_EACH_LANE(lane, lanes) {
    TensorOrder& order = block.fibers[warp.first_thread + lane].tensor;
    for (const TensorOrder::Load& load : order.loads) {
      std::memcpy(load.to, &memory.cell(load.lane, load.column), sizeof(u32));
    }
    order.loads.clear();
  }
}

void tensor_wait_loads(int line) { warp_collect(0xffffffffu, nullptr, tensor_wait_lanes, line); }

// --- the end of a thread

void end_tensor_work(const Fiber& fiber) {
  const Block& block = block_of(fiber);
  if (!block.tensor_memory) {
    return;
  }
  require_no_loads(fiber, "the thread ends");
  const TensorMemory& memory = *block.tensor_memory;
  for (u64 i = 0; i < memory.products.size(); ++i) {
    const u64 number = memory.issued - memory.products.size() + 1 + i;
    const TensorProduct& product = memory.products[i];
    if (product.issuer == fiber.linear && number > memory.committed) {
      fail_at(Fault::race, product.site, 0,
              "the thread ends while this tcgen05.mma may be under way: no tcgen05.commit has come behind it");
    }
  }
}

}  // namespace simt
