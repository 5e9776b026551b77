// Barriers of part of a block, the lane that is elected, and what moves registers between warps or orders launches.
#pragma once

namespace simt {

// A warp counts as a whole, aligned or not.
#define SIMT_PTX_BARRIER(name)                                                   \
  SIMT_INLINE void name(u32 id, SIMT_LINE) { named_barrier(id, 0, true, line); } \
  SIMT_INLINE void name(u32 id, u32 threads, SIMT_LINE) { named_barrier(id, threads, true, line); }
#define SIMT_PTX_BARRIER_ARRIVE(name) \
  SIMT_INLINE void name(u32 id, u32 threads, SIMT_LINE) { named_barrier(id, threads, false, line); }
SIMT_PTX_BARRIER(ptx_bar_sync)
SIMT_PTX_BARRIER(ptx_bar_cta_sync)
SIMT_PTX_BARRIER(ptx_barrier_sync)
SIMT_PTX_BARRIER(ptx_barrier_sync_aligned)
SIMT_PTX_BARRIER(ptx_barrier_cta_sync)
SIMT_PTX_BARRIER(ptx_barrier_cta_sync_aligned)
SIMT_PTX_BARRIER_ARRIVE(ptx_bar_arrive)
SIMT_PTX_BARRIER_ARRIVE(ptx_bar_cta_arrive)
SIMT_PTX_BARRIER_ARRIVE(ptx_barrier_arrive)
SIMT_PTX_BARRIER_ARRIVE(ptx_barrier_arrive_aligned)
SIMT_PTX_BARRIER_ARRIVE(ptx_barrier_cta_arrive)
SIMT_PTX_BARRIER_ARRIVE(ptx_barrier_cta_arrive_aligned)

// Which lane the machine elects is its choice; the lowest one, here.
SIMT_INLINE bool elected(u32& lane, u32 mask, int line) {
  lane = static_cast<u32>(__builtin_ctzll(warp_ballot(lanes_of(mask, line), 1, line)));
  return lane == lane_index();
}
SIMT_INLINE void ptx_elect_sync(u32& d, bool& p, u32 mask, SIMT_LINE) { p = elected(d, mask, line); }
SIMT_INLINE void ptx_elect_sync(PtxNothing, bool& p, u32 mask, SIMT_LINE) {
  u32 lane;
  p = elected(lane, mask, line);
}

SIMT_INLINE void ptx_setmaxnreg_inc_sync_aligned_u32(u32 registers, SIMT_LINE) { set_registers(registers, true, line); }
SIMT_INLINE void ptx_setmaxnreg_dec_sync_aligned_u32(u32 registers, SIMT_LINE) { set_registers(registers, false, line); }

// Launches here come one after another; what comes too early of one is found by runtime/grids.cpp.
SIMT_INLINE void ptx_griddepcontrol_wait() { wait_for_grids(); }
SIMT_INLINE void ptx_griddepcontrol_launch_dependents() {}

}  // namespace simt
