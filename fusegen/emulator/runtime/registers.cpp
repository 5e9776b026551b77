// setmaxnreg: registers that warps give to the pool of their block, and take from it.
//
// A warp begins with what the launch bounds leave each thread: ptxas gives a kernel with setmaxnreg as many, and no
// more are the block's. `.dec` gives some back; `.inc` waits until the pool has enough. The lanes of a warp execute it
// together, and the four warps of a warpgroup the same one (PTX ISA, setmaxnreg).
#include "worker.h"

namespace simt {

struct RegisterRequest {
  u32 registers;
  bool takes;
  int line;
};

constexpr u32 warps_of_group = warpgroup_threads / 32;

void begin_registers(Block& block) {
  block.free_registers = 0;
  for (Warp& warp : block.warps) {
    warp.registers = warp.wanted = worker->launch->request.registers;
    warp.register_changes = 0;
  }
}

static bool take_registers(Warp& warp) {
  u32& free = warp.block->free_registers;
  const u32 lacking = warp.wanted - warp.registers;
  if (lacking > free) {
    return false;
  }
  free -= lacking;
  warp.registers = warp.wanted;
  return true;
}

static void serve_waiting(Block& block) {
  for (Warp& warp : block.warps) {
    if (warp.wanted == warp.registers || !take_registers(warp)) {
      continue;
    }
    auto waits = [&](const Fiber& fiber) { return fiber.wants_registers && &warp_of(fiber) == &warp; };
    for (Fiber* fiber : take_blocked(waits)) {
      fiber->wants_registers = false;
      make_ready(warp, bit(fiber->lane));
    }
  }
}

// For the whole warp, whose lanes have met.
static void change_registers(void** slots, u64 lanes) {
  const RegisterRequest& request = *static_cast<const RegisterRequest*>(slots[lowest_lane(lanes)]);
  Warp& warp = warp_of(*current_fiber());
  Block& block = *warp.block;
  if (lanes != warp.members) {
    fail(Fault::registers, request.line, "setmaxnreg by lanes %#llx of a warp; all of them must execute it", lanes);
  }
  if (request.takes ? request.registers < warp.registers : request.registers > warp.registers) {
    fail(Fault::registers, request.line, "setmaxnreg.%s to %u registers of a warp that has %u",
         request.takes ? "inc" : "dec", request.registers, warp.registers);
  }
  ++warp.register_changes;
  warp.register_line = request.line;
  warp.wanted = request.registers;
  if (!request.takes) {
    block.free_registers += warp.registers - warp.wanted;
    warp.registers = warp.wanted;
    serve_waiting(block);
  }
}

void set_registers(u32 registers, bool takes, int line) {
  Fiber& fiber = *current_fiber();
  Warp& warp = warp_of(fiber);
  fiber.line = line;
  if (registers < 24 || registers > 256 || registers % 8) {
    fail(Fault::registers, line, "setmaxnreg to %u registers; a multiple of 8 from 24 to 256 is wanted", registers);
  }
  if (worker->launch->request.registers == 0) {
    fail(Fault::registers, line,
         "setmaxnreg in a kernel without __launch_bounds__: how many registers it starts with is not known");
  }
  RegisterRequest request{registers, takes, line};
  warp_collect(warp.members, &request, change_registers, line);
  if (warp.registers != warp.wanted && !take_registers(warp)) {
    fiber.wants_registers = true;
    block_current();
  }
}

static void require_whole_groups(const Block& block) {
  for (u32 i = 0; i < block.warps.size(); ++i) {
    const Warp& warp = block.warps[i];
    const Warp& first = block.warps[i / warps_of_group * warps_of_group];
    if (warp.register_changes != first.register_changes || warp.wanted != first.wanted) {
      const Warp& more = warp.register_changes > first.register_changes ? warp : first;
      fail(Fault::registers, more.register_line,
           "warp %u has executed setmaxnreg %u times and has %u registers, warp %u of its warpgroup %u times and has "
           "%u: all warps of a warpgroup must execute the same",
           first.first_thread / 32, first.register_changes, first.wanted, i, warp.register_changes, warp.wanted);
    }
  }
}

void end_registers(const Block& block) { require_whole_groups(block); }

void tell_of_registers(const Block& block) {
  for (const Fiber* fiber : worker->blocked) {
    if (!fiber->wants_registers || &block_of(*fiber) != &block) {
      continue;
    }
    require_whole_groups(block);
    const Warp& warp = warp_of(*fiber);
    fail_for(*fiber, 0, Fault::deadlock,
             "no thread can run: this thread waits for %u registers and has %u, and the block's pool has %u more for "
             "each lane of one warp: setmaxnreg.dec by other warps must give back what setmaxnreg.inc takes",
             warp.wanted, warp.registers, block.free_registers);
  }
}

}  // namespace simt
