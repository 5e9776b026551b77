// Blackwell's tensor memory: its allocation, tcgen05.mma into it by one thread, tcgen05.commit onto an mbarrier, and
// tcgen05.ld by a warp into registers.
//
// A product lands at once in the plain schedule. In an adversarial one it does, with what it reads of shared memory, when
// a commit behind it arrives, which is when no thread can run without; and a load reads when its warp waits for it,
// until which the registers are NaN.
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

static TensorMemory& tensor_memory_of(Block& block) {
  if (!block.tensor_memory) {
    Critical critical;
    block.tensor_memory = std::make_unique<TensorMemory>();
  }
  return *block.tensor_memory;
}

static Block& own_block() { return block_of(*current_fiber()); }

// --- allocation, by a whole warp

struct TensorAllocation {
  u64 place;  // of shared memory, where the address goes; or the address
  u32 columns;
  const void* site;
};

static void require_tensor_warp(u64 lanes, const char* what, const void* site) {
  if (lanes != 0xffffffffu || worker->launch->request.warp != 32) {
    fail_at(Fault::divergent_warp, site, 0, "%s by lanes %#llx of a warp; it takes all 32", what, lanes);
  }
}

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
  Block& block = own_block();
  TensorMemory& memory = tensor_memory_of(block);
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

void tensor_alloc(u64 place, u32 columns, int line) {
  TensorAllocation wanted{place, columns, __builtin_return_address(0)};
  warp_collect(0xffffffffu, &wanted, allocate_lanes, line);
}

static void deallocate_lanes(void** slots, u64 lanes) {
  const TensorAllocation given = agreed_allocation(slots, lanes, "tcgen05.dealloc");
  const u32 first = static_cast<u32>(given.place);
  TensorMemory& memory = tensor_memory_of(own_block());
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
    checker_tensor_write(column, given.site);
  }
  for (u32 column = first; column < first + given.columns; column += tensor_unit) {
    memory.owner[column / tensor_unit] = 0;
  }
}

void tensor_dealloc(u32 address, u32 columns, int line) {
  TensorAllocation given{address, columns, __builtin_return_address(0)};
  warp_collect(0xffffffffu, &given, deallocate_lanes, line);
}

void tensor_relinquish() {
  tensor_memory_of(own_block()).relinquished = true;
}

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
  Critical critical;
  block.tensor_memory.reset();
}

// --- fences

static void require_no_loads(const Fiber& fiber, const char* what) {
  if (!fiber.tensor.loads.empty()) {
    fail_at(Fault::race, fiber.tensor.load_site, 0, "%s while this tcgen05.ld may be under way: tcgen05.wait::ld must come first",
            what);
  }
}

void tensor_fence(bool after) {
  Fiber& fiber = *current_fiber();
  TensorMemory& memory = tensor_memory_of(block_of(fiber));
  if (!after) {
    require_no_loads(fiber, "the thread is at tcgen05.fence::before_thread_sync");
  }
  (after ? fiber.tensor.after : fiber.tensor.before) = ++memory.now;
}

// What others had of a column must lie before this thread's latest fence, and before one of theirs.
static void require_fences(const TensorMemory& memory, const Fiber& fiber, u32 column, bool writes, const char* what,
                           const void* site) {
  const TensorColumn& found = memory.columns[column];
  if (found.product && !found.under_way && !(writes && found.writer == fiber.linear) && found.landed_at > fiber.tensor.after) {
    fail_at(Fault::race, site, 0,
            "%s column %u, which a tcgen05.mma has written: tcgen05.fence::after_thread_sync must come behind the wait "
            "for that",
            what, column);
  }
  for (u32 quarter = 0; writes && quarter < tensor_quarters; ++quarter) {
    for (const TensorReader& reader : found.readers[quarter]) {
      const Fiber& other = block_of(fiber).fibers[reader.thread];
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

static TensorProduct tensor_product(TensorKind kind, u32 to, u64 a, u64 b, u32 instruction, bool adds, const void* site) {
  const u32 m = static_cast<u32>(bits_of(instruction, 24, 5)) << 4, n = static_cast<u32>(bits_of(instruction, 17, 6)) << 3;
  const bool whole = kind == TensorKind::i8;
  if (instruction & (0xfu | 1u << 6 | 3u << 13 | 1u << 23 | 7u << 29) || bits_of(instruction, 4, 2) != (whole ? 2 : 1)) {
    fail_at(Fault::tensor, site, 0,
            "the instruction descriptor %#x asks for what the emulator does not model: sums of f32 or s32, dense, with no "
            "sign changed, are",
            instruction);
  }
  if (m != tensor_lanes || n < 16 || n > 256 || n % 16) {
    fail_at(Fault::tensor, site, 0,
            "the instruction descriptor %#x asks for %u x %u; 128 rows, and 16 to 256 columns by 16, are modelled",
            instruction, m, n);
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
  return {to, n, {tensor_layout(a, site), m, left, turned[0]}, {tensor_layout(b, site), n, right, turned[1]}, adds, whole, site,
          current_fiber()->linear};
}

static void land(TensorMemory& memory, const TensorProduct& product) {
  const u32 n = product.n, depth = 2 * product.a.chunk();
  MatrixSpace& space = worker->matrices;
  {
    Critical critical;
    space.a.resize(tensor_lanes * depth);
    space.b.resize(depth * n);
    space.sums.assign(tensor_lanes * n, 0.0);
  }
  read_shared_matrix(product.a, product.site, space.a.data(), depth, 1);
  read_shared_matrix(product.b, product.site, space.b.data(), 1, n);
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

void tensor_mma(TensorKind kind, u32 to, u64 a, u64 b, u32 instruction, bool adds, int line) {
  const void* site = __builtin_return_address(0);
  Fiber& fiber = *current_fiber();
  Block& block = block_of(fiber);
  fiber.line = line;
  TensorMemory& memory = tensor_memory_of(block);
  const TensorProduct product = tensor_product(kind, to, a, b, instruction, adds, site);
  const u64 number = ++memory.issued;
  for (u32 column = to; column < to + product.n; ++column) {
    require_allocated(memory, column, "tcgen05.mma writes", site);
    TensorColumn& found = memory.columns[column];
    if (found.under_way && found.writer != fiber.linear) {
      fail_at(Fault::race, site, 0, "tcgen05.mma writes column %u, which another thread's may still be writing", column);
    }
    if (adds && !found.product) {
      fail_at(Fault::uninitialised, site, 0, "tcgen05.mma adds to column %u of tensor memory, which nothing has written",
              column);
    }
    require_fences(memory, fiber, column, true, "tcgen05.mma writes", site);
    checker_tensor_write(column, site);
    found.product = number;
    found.under_way = true;
    found.writer = fiber.linear;
    for (std::vector<TensorReader>& readers : found.readers) {
      readers.clear();
    }
  }
  for (const SharedMatrix* matrix : {&product.a, &product.b}) {
    for_each_chunk(*matrix, site, [&](const char* place, u32, u32) { checker_begin_read(place, "tcgen05.mma", site); });
  }
  if (!worker->adversarial) {
    land(memory, product);
  }
  Critical critical;
  memory.products.push_back(product);
}

// --- commits

static void land_first_commit(Block& block) {
  TensorMemory& memory = *block.tensor_memory;
  const TensorCommit commit = memory.commits.front();
  {
    Critical critical;
    memory.commits.pop_front();
  }
  ActingAs issuer(block.fibers[commit.issuer]);
  const u32 phase = checker_next_phase(&memory);
  ++memory.now;
  while (memory.issued - memory.products.size() < commit.last) {
    const TensorProduct product = memory.products.front();
    if (worker->adversarial) {
      land(memory, product);
    }
    for (const SharedMatrix* matrix : {&product.a, &product.b}) {
      for_each_chunk(*matrix, product.site, [&](const char* place, u32, u32) {
        checker_end_read(place, &memory, product.site, phase, 1);
      });
    }
    Critical critical;
    memory.products.pop_front();
  }
  for (u32 column = 0; column < tensor_columns; ++column) {
    TensorColumn& found = memory.columns[column];
    if (found.under_way && found.product <= commit.last) {
      found.under_way = false;
      found.landed_at = memory.now;
      checker_tensor_landed(column, &memory, phase);
    }
  }
  checker_tell(commit.mbarrier, &memory, phase);
  arrive_once(commit.mbarrier, commit.site);
}

void tensor_commit(u64 mbarrier, int line) {
  const void* site = __builtin_return_address(0);
  Fiber& fiber = *current_fiber();
  Block& block = block_of(fiber);
  fiber.line = line;
  TensorMemory& memory = tensor_memory_of(block);
  for (const TensorProduct& product : memory.products) {
    if (product.issuer != fiber.linear) {
      fail_at(Fault::tensor, site, product.site ? worker->launch->image.site(product.site) : 0,
              "tcgen05.commit while another thread's tcgen05.mma is under way: the emulator models one thread that issues "
              "them");
    }
  }
  const TensorCommit commit{memory.issued, fiber.linear, mbarrier_at(mbarrier, true, site), site};
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
  Block& block = own_block();
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
    found.readers[quarter].push_back({warp.first_thread, memory.now + 1});
  }
  FOR_EACH_LANE(lane, lanes) {
    Fiber& fiber = block.fibers[warp.first_thread + lane];
    const TensorLoad& own = *static_cast<TensorLoad*>(slots[lane]);
    if (own.address != first.address) {
      fail_at(Fault::divergent_warp, first.site, 0, "the lanes of a warp give tcgen05.ld different addresses");
    }
    ActingAs acting(fiber);
    for (u32 column = column0; column < column0 + 8 * first.count; ++column) {
      require_fences(memory, fiber, column, false, "tcgen05.ld reads", first.site);
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
  ++memory.now;
}

void tensor_load_registers(u32 count, u32 address, void** registers, int line) {
  TensorLoad load{address, count, registers, __builtin_return_address(0)};
  warp_collect(0xffffffffu, &load, tensor_load_lanes, line);
}

static void tensor_wait_lanes(void**, u64 lanes) {
  require_tensor_warp(lanes, "tcgen05.wait::ld", nullptr);
  Block& block = own_block();
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
