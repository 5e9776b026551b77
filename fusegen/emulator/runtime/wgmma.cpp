// wgmma.mma_async: 64 x n += 64 x 16 times 16 x n (of tf32 8 deep, of 8 bits 32) by the 128 threads of a warpgroup, some
// time before they wait for it.
//
// When it reads and writes is open until then. So it does at once in the plain schedule; in an adversarial one the
// accumulators are NaN until the wait, and the shared memory and the registers of A are read then. All threads of the warpgroup meet where they
// issue one; the first that waits for it ends its reads for all of them, since a pipeline's stage is commonly given
// back by one thread of a warpgroup.
//
// Layouts: PTX ISA, 9.7.15.5.1 "Register Fragments and Shared Memory Matrix Layouts", Figures 148 and 149, the table of
// canonical layouts there, and the matrix descriptor of 9.7.15.5.1.2.2. A swizzle exchanges bits 4 to 6 of an address
// in shared memory with their exclusive or with bits 7 to 9 (two bits of each for 64 bytes, one for 32), which is what
// a tensor copy does too. The numbers are those of matrices.cpp.
#include "shared_matrices.h"

namespace simt {

struct WgmmaIssue {
  Number number;  // of A,
  Number other;   // and of B
  u32 n;
  const WgmmaOperand* operands;
  u32 count;
  const void* site;
};

// --- matrices in shared memory

static MatrixLayout layout_of(u64 descriptor, const void* site) {
  constexpr u64 unused = 3ull << 14 | 3ull << 30 | 7ull << 46 | 0x3ffull << 52;
  if (descriptor & unused) {
    fail_at(Fault::tensor, site, 0, "%#llx is no matrix descriptor of wgmma: bits are set that must be zero",
            descriptor);
  }
  if (bits_of(descriptor, 49, 3)) {
    fail_at(Fault::tensor, site, 0,
            "the matrix descriptor %#llx has a base offset, which the emulator does not model: align the tile to the "
            "repetition of its swizzle",
            descriptor);
  }
  constexpr u32 spans[] = {16, 128, 64, 32};  // no swizzle, 128, 64 and 32 bytes
  constexpr u32 masks[] = {0, 7, 3, 1};
  const u64 swizzle = bits_of(descriptor, 62, 2);
  return {bits_of(descriptor, 0, 14) << 4, bits_of(descriptor, 16, 14) << 4, bits_of(descriptor, 32, 14) << 4, spans[swizzle],
          masks[swizzle]};
}

template <class Visit>
static void for_each_matrix(const Wgmma& operation, Visit visit) {
  if (!operation.a_in_registers) {
    visit(operation.a);
  }
  visit(operation.b);
}

// As floats, by rows for A and by depths for B.
static void read_matrix(const Wgmma& operation, const SharedMatrix& matrix, float* to, u32 per_row, u32 per_depth) {
  read_shared_matrix(matrix, operation.site, to, per_row, per_depth);
}

static u32 fragment_bits(const WgmmaOperand& fragment) {
  return fragment.place ? *fragment.place : static_cast<u32>(fragment.bits);
}

static void read_fragments(const Wgmma& operation, float* a) {
  if (of_8_bits(operation.number)) {
    for (u32 i = 0; i < 16 * warpgroup_threads; ++i) {
      const u32 thread = i / 16, part = i % 16 / 4, byte = i % 4, lane = thread % 32;
      const u32 row = thread / 32 * 16 + lane / 4 + part % 2 * 8, depth = lane % 4 * 4 + byte + part / 2 * 16;
      const u32 bits = fragment_bits(operation.fragments[thread * 4 + part]);
      a[row * 32 + depth] = narrow_value(operation.number, static_cast<unsigned char>(bits >> 8 * byte));
    }
    return;
  }
  if (operation.number == Number::tf32) {
    for (u32 i = 0; i < 4 * warpgroup_threads; ++i) {
      const u32 thread = i / 4, part = i % 4, lane = thread % 32;
      const u32 row = thread / 32 * 16 + lane / 4 + part % 2 * 8, depth = lane % 4 + part / 2 * 4;
      a[row * 8 + depth] = tf32_value(fragment_bits(operation.fragments[i]));
    }
    return;
  }
  for (u32 i = 0; i < 8 * warpgroup_threads; ++i) {
    const u32 thread = i / 8, part = i % 8 / 2, half = i % 2, lane = thread % 32;
    const u32 row = thread / 32 * 16 + lane / 4 + part % 2 * 8, depth = lane % 4 * 2 + half + part / 2 * 8;
    const u32 bits = fragment_bits(operation.fragments[thread * 4 + part]);
    a[row * 16 + depth] = value_of(operation.number, static_cast<u16>(bits >> 16 * half));
  }
}

// --- the product

static u32 place_of(u32 thread, u32 i, u32 n) {
  const u32 lane = thread % 32;
  const u32 row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
  return row * n + i / 4 * 8 + lane % 4 * 2 + i % 2;
}

static void land(Wgmma& operation) {
  const u32 n = operation.n, each = n / 2, depth = operation.depth();
  MatrixSpace& space = worker->matrices;
  {
    Critical critical;
    space.a.resize(64 * depth);
    space.b.resize(depth * n);
    space.sums.assign(64 * n, 0.0);
  }
  if (operation.a_in_registers) {
    read_fragments(operation, space.a.data());
  } else {
    read_matrix(operation, operation.a, space.a.data(), depth, 1);
  }
  const bool whole = is_whole(operation.number), narrow = of_8_bits(operation.number) && !whole;
  read_matrix(operation, operation.b, space.b.data(), narrow ? depth : 1, narrow ? 1 : n);
  for (float& value : space.a) {
    value *= operation.sign;
  }
  for (u32 i = 0; operation.adds && i < warpgroup_threads * each; ++i) {
    const float* addend = operation.addends.empty() ? operation.sums[i] : &operation.addends[i];
    int bits;
    std::memcpy(&bits, addend, sizeof bits);
    space.sums[place_of(i / each, i % each, n)] = whole ? bits : static_cast<double>(*addend);
  }
  if (narrow) {
    multiply_add_narrow(space.sums.data(), space.a.data(), space.b.data(), 64, n, depth, depth);
  } else {
    multiply_add(space.sums.data(), space.a.data(), space.b.data(), 64, n, depth);
  }
  for (u32 i = 0; i < warpgroup_threads * each; ++i) {
    const double sum = space.sums[place_of(i / each, i % each, n)];
    if (whole) {  // modulo 2^32
      const u32 bits = static_cast<u32>(static_cast<i64>(sum));
      std::memcpy(operation.sums[i], &bits, sizeof bits);
    } else {
      *operation.sums[i] = rounded(sum);
    }
  }
  operation.landed = true;
}

// --- issuing

static Warpgroup& warpgroup_of(const Fiber& fiber) {
  return block_of(fiber).warpgroups[fiber.linear / warpgroup_threads];
}

static bool told_how_they_lie(Number number) { return number == Number::f16 || number == Number::bf16; }

static bool takes_descriptor(const WgmmaIssue& issue) {
  const u32 scales = is_whole(issue.number) ? 0 : 2, turns = told_how_they_lie(issue.number) ? 2 : 0;
  return issue.count == issue.n / 2 + 3 + scales + turns;
}

static void require_agreement(const Warpgroup& group) {
  const Block& block = block_of(*current_fiber());
  const WgmmaIssue& first = *group.issues[0];
  const u32 uniform = first.n / 2 + (takes_descriptor(first) ? 0 : 4);
  for (u32 thread = 1; thread < warpgroup_threads; ++thread) {
    const WgmmaIssue& other = *group.issues[thread];
    const Fiber& fiber = block.fibers[group.first_thread + thread];
    bool same = other.number == first.number && other.other == first.other && other.n == first.n &&
                other.count == first.count;
    for (u32 i = uniform; same && i < first.count; ++i) {
      same = other.operands[i].bits == first.operands[i].bits;
    }
    if (!same) {
      fail_for(fiber, 0, Fault::divergent_warp,
               "this thread gives wgmma.mma_async another descriptor, predicate or immediate than the first thread of "
               "its warpgroup");
    }
    if (fiber.wgmma.group != block.fibers[group.first_thread].wgmma.group) {
      fail_for(fiber, 0, Fault::divergent_warp,
               "this thread has committed %u groups of wgmma, and the first thread of its warpgroup %u",
               fiber.wgmma.group, block.fibers[group.first_thread].wgmma.group);
    }
  }
}

static Wgmma operation_of(const Warpgroup& group) {
  const WgmmaIssue& first = *group.issues[0];
  const u32 each = first.n / 2;
  Wgmma operation{};
  operation.number = first.number;
  operation.n = first.n;
  operation.group = current_fiber()->wgmma.group;
  operation.site = first.site;
  operation.a_in_registers = !takes_descriptor(first);
  const WgmmaOperand* rest = first.operands + each;
  const bool told = told_how_they_lie(first.number);
  const u32 rank = block_of(*current_fiber()).rank;
  if (operation.a_in_registers) {
    rest += 4;
  } else {
    operation.a = {layout_of(rest->bits, first.site), 64, first.number, told && rest[5].bits != 0, rank};
    ++rest;
  }
  operation.b = {layout_of(rest[0].bits, first.site), first.n, first.other,
                 told && rest[operation.a_in_registers ? 4 : 5].bits != 0, rank};
  operation.adds = rest[1].bits != 0;
  const bool scaled = !is_whole(first.number);
  for (u32 i = 2; scaled && i < 4; ++i) {
    const int scale = static_cast<int>(rest[i].bits);
    if (scale != 1 && scale != -1) {
      fail_at(Fault::tensor, first.site, 0, "a scale of %d for wgmma.mma_async; 1 and -1 are possible", scale);
    }
  }
  const int sign = scaled ? static_cast<int>(rest[2].bits) * static_cast<int>(rest[3].bits) : 1;
  operation.sign = static_cast<float>(sign);
  operation.sums.reserve(warpgroup_threads * each);
  operation.fragments.reserve(operation.a_in_registers ? warpgroup_threads * 4 : 0);
  for (u32 thread = 0; thread < warpgroup_threads; ++thread) {
    const WgmmaOperand* mine = group.issues[thread]->operands;
    for (u32 i = 0; i < each; ++i) {
      operation.sums.push_back(reinterpret_cast<float*>(mine[i].bits));
      operation.spans[thread].include(operation.sums.back());
    }
    for (u32 i = 0; operation.a_in_registers && i < 4; ++i) {
      operation.fragments.push_back(mine[each + i]);
    }
  }
  return operation;
}

// Accumulators may be those of an instruction under way if all of them are, in the same places. Whether they will be
// written before this one reads them.
static bool continues_another(const Warpgroup& group, const Wgmma& operation) {
  bool continues = false;
  for (const Wgmma& earlier : group.pending) {
    if (earlier.sums == operation.sums) {
      continues = continues || !earlier.landed;
      continue;
    }
    for (u32 i = 0; i < operation.n / 2; ++i) {
      for (u32 k = 0; k < earlier.n / 2; ++k) {
        if (operation.sums[i] == earlier.sums[k]) {
          fail_at(Fault::race, operation.site, 0,
                  "a wgmma.mma_async that is under way has some of these accumulators in another order or shape: wait "
                  "for it first");
        }
      }
    }
  }
  return continues;
}

static void begin_reads(const Warpgroup& group, const Wgmma& operation) {
  for_each_matrix(operation, [&](const SharedMatrix& matrix) {
    for_each_chunk(matrix, operation.site, [&](const char* place, u32, u32) {
      for (u32 warp = 0; warp < 4; ++warp) {  // a warp as a whole: one of its lanes stands for it
        ActingAs lane(block_of(*current_fiber()).fibers[group.first_thread + warp * 32]);
        checker_begin_read(place, "wgmma.mma_async", operation.site);
      }
    });
  });
}

static void start(Warpgroup& group) {
  require_agreement(group);
  Critical critical;
  Wgmma operation = operation_of(group);
  const bool continues = continues_another(group, operation);
  begin_reads(group, operation);
  if (!worker->adversarial) {
    land(operation);
  } else if (!continues) {  // otherwise it adds to what the earlier one will leave
    operation.addends.reserve(operation.sums.size());
    for (float* sum : operation.sums) {
      operation.addends.push_back(*sum);
      *sum = __builtin_nanf("");
    }
  }
  Block& block = block_of(*current_fiber());
  const u32 each = operation.n / 2;
  for (u32 thread = 0; thread < warpgroup_threads; ++thread) {
    WgmmaOrder& order = block.fibers[group.first_thread + thread].wgmma;
    const auto* first = reinterpret_cast<const char*>(operation.sums[thread * each]);
    const auto* last = reinterpret_cast<const char*>(operation.sums[thread * each + each - 1]);
    const bool one_array = last - first == static_cast<i64>((each - 1) * sizeof(float));
    if (order.pending == 0) {
      order.under_way = {};
    }
    order.under_way.include(operation.spans[thread]);
    for (u32 i = 4 * thread; operation.a_in_registers && i < 4 * thread + 4; ++i) {
      if (operation.fragments[i].place) {
        order.under_way.include(reinterpret_cast<const float*>(operation.fragments[i].place));
      }
    }
    ++order.pending;
    order.low = one_array ? first : nullptr;
    order.high = one_array ? last + sizeof(float) : nullptr;
  }
  group.pending.push_back(std::move(operation));
}

void wgmma(Number a, Number b, u32 n, const WgmmaOperand* operands, u32 count, int line) {
  Fiber& fiber = *current_fiber();
  Block& block = block_of(fiber);
  fiber.line = line;
  Warpgroup& group = warpgroup_of(fiber);
  if (worker->launch->request.warp != 32 || group.first_thread + warpgroup_threads > block.fibers.size()) {
    fail(Fault::divergent_warp, line, "wgmma needs warpgroups of four warps of 32 lanes, and this thread is in none");
  }
  if (!fiber.wgmma.fenced) {
    fail(Fault::race, line,
         "wgmma.mma_async on accumulators that this thread may just have used: wgmma.fence must come between");
  }
  if (group.arrived == 0) {
    group.line = line;
  } else if (line != group.line) {
    fail(Fault::divergent_warp, line,
         "this thread is at wgmma.mma_async on line %d while others of its warpgroup are at the one on line %d", line,
         group.line);
  }
  WgmmaIssue issue{a, b, n, operands, count, __builtin_return_address(0)};
  group.issues[fiber.linear - group.first_thread] = &issue;
  fiber.wgmma.arrived = true;
  if (++group.arrived < warpgroup_threads) {
    switch_to(next_ready());
    return;
  }
  start(group);
  group.arrived = 0;
  worker->idle_polls = 0;
  for (u32 thread = 0; thread < warpgroup_threads; ++thread) {
    Fiber& other = block.fibers[group.first_thread + thread];
    other.wgmma.arrived = false;
    if (&other != &fiber) {
      make_ready(warp_of(other), bit(other.lane));
    }
  }
}

void wgmma_fence() { current_fiber()->wgmma.fenced = true; }

void wgmma_commit() { ++current_fiber()->wgmma.group; }

// --- waiting

static void finish(Warpgroup& group, Wgmma& operation) {
  if (!operation.landed) {
    land(operation);
  }
  for_each_matrix(operation, [&](const SharedMatrix& matrix) {
    for_each_chunk(matrix, operation.site, [&](const char* place, u32, u32) {
      checker_end_read(place, &group, operation.site, operation.phase, 4);  // warps
    });
  });
  operation.finished = true;
}

void wgmma_wait(u32 allowed) {
  Fiber& fiber = *current_fiber();
  if (fiber.wgmma.pending == 0 || fiber.wgmma.group <= allowed) {
    return;
  }
  Warpgroup& group = warpgroup_of(fiber);
  const u32 thread = fiber.linear - group.first_thread, last = fiber.wgmma.group - allowed - 1;
  Critical critical;
  for (Wgmma& operation : group.pending) {
    if (operation.group > last || operation.waited[thread]) {
      continue;
    }
    if (!operation.finished) {
      operation.phase = checker_next_phase(&group);
      finish(group, operation);
    }
    checker_acquire_reads(fiber, &group, operation.phase);
    operation.waited[thread] = true;
    ++operation.waits;
    --fiber.wgmma.pending;
  }
  while (!group.pending.empty() && group.pending.front().waits == warpgroup_threads) {
    group.pending.pop_front();
  }
}

void end_wgmma(const Fiber& fiber) {
  if (fiber.wgmma.pending == 0) {
    return;
  }
  const Warpgroup& group = warpgroup_of(fiber);
  for (const Wgmma& operation : group.pending) {
    if (!operation.waited[fiber.linear - group.first_thread]) {
      fail_at(Fault::race, operation.site, 0,
              "the thread ends while this wgmma.mma_async may be under way: it has not waited for its group");
    }
  }
}

// A thread touches its own local memory: not while that is an accumulator, and not without a fence afterwards; and it
// does not write what is still read as a register of A.
void touch_registers(Fiber& fiber, const char* place, u64 bytes, const char* verb, bool writes, const void* site) {
  WgmmaOrder& order = fiber.wgmma;
  if (order.pending && order.under_way.meets(place, bytes)) {
    const Warpgroup& group = warpgroup_of(fiber);
    const u32 thread = fiber.linear - group.first_thread;
    for (const Wgmma& operation : group.pending) {
      if (operation.waited[thread]) {
        continue;
      }
      const u32 each = operation.spans[thread].meets(place, bytes) ? operation.n / 2 : 0;
      for (u32 i = thread * each; i < (thread + 1) * each; ++i) {
        const auto* sum = reinterpret_cast<const char*>(operation.sums[i]);
        if (sum < place + bytes && place < sum + sizeof(float)) {
          fail_at(Fault::race, site, worker->launch->image.site(operation.site),
                  "%s of an accumulator of a wgmma.mma_async that this thread has not waited for", verb);
        }
      }
      if (!writes || !operation.a_in_registers) {
        continue;
      }
      for (u32 i = 4 * thread; i < 4 * thread + 4; ++i) {
        const auto* fragment = reinterpret_cast<const char*>(operation.fragments[i].place);
        if (fragment && fragment < place + bytes && place < fragment + sizeof(u32)) {
          fail_at(Fault::race, site, worker->launch->image.site(operation.site),
                  "%s of a register of A while a wgmma.mma_async that this thread has not waited for may still be "
                  "reading it",
                  verb);
        }
      }
    }
  }
  if (place < order.high && order.low < place + bytes) {
    order.fenced = false;
  }
}

void tell_of_warpgroup(Block& block) {
  for (Warpgroup& group : block.warpgroups) {
    for (u32 i = 0; group.arrived && i < warpgroup_threads; ++i) {
      const Fiber& missing = block.fibers[group.first_thread + i];
      if (missing.wgmma.arrived) {
        continue;
      }
      u32 waiting = 0;
      while (!block.fibers[group.first_thread + waiting].wgmma.arrived) {
        ++waiting;
      }
      const bool live = block.warps[missing.warp].live & bit(missing.lane);
      fail_for(block.fibers[group.first_thread + waiting], live ? missing.line : 0, Fault::deadlock,
               "no thread can run: this thread waits at wgmma.mma_async on line %d for thread (%u, %u, %u) of its "
               "warpgroup, which %s",
               group.line, missing.index.x, missing.index.y, missing.index.z, live ? "waits elsewhere" : "has ended");
    }
  }
}

}  // namespace simt
