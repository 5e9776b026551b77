// tcgen05: products into tensor memory by one thread, and loads from there by a warp (runtime/tensor_memory.cpp).
//
// ptx.py makes a template's argument of the size in a load's name, gives the line first, and passes the registers as they
// stand in the kernel, since they change after the statement.
#pragma once

namespace simt {

SIMT_INLINE void ptx_tcgen05_alloc_cta_group_1_sync_aligned_shared_cta_b32(u64 place, u32 columns, SIMT_LINE) {
  tensor_alloc(false, place, columns, line);
}
SIMT_INLINE void ptx_tcgen05_dealloc_cta_group_1_sync_aligned_b32(u32 address, u32 columns, SIMT_LINE) {
  tensor_dealloc(false, address, columns, line);
}
SIMT_INLINE void ptx_tcgen05_relinquish_alloc_permit_cta_group_1_sync_aligned() { tensor_relinquish(false); }
SIMT_INLINE void ptx_tcgen05_alloc_cta_group_2_sync_aligned_shared_cta_b32(u64 place, u32 columns, SIMT_LINE) {
  tensor_alloc(true, place, columns, line);
}
SIMT_INLINE void ptx_tcgen05_dealloc_cta_group_2_sync_aligned_b32(u32 address, u32 columns, SIMT_LINE) {
  tensor_dealloc(true, address, columns, line);
}
SIMT_INLINE void ptx_tcgen05_relinquish_alloc_permit_cta_group_2_sync_aligned() { tensor_relinquish(true); }

SIMT_INLINE void ptx_tcgen05_fence_before_thread_sync() { tensor_fence(false); }
SIMT_INLINE void ptx_tcgen05_fence_after_thread_sync() { tensor_fence(true); }

#define SIMT_PTX_TENSOR_MMA(name, pair, kind)                                                     \
  SIMT_INLINE void name(u32 to, u64 a, u64 b, u32 instruction, bool adds, SIMT_LINE) {            \
    tensor_mma(pair, kind, to, a, b, instruction, adds, line);                                    \
  }
SIMT_PTX_TENSOR_MMA(ptx_tcgen05_mma_cta_group_1_kind_f16, false, TensorKind::f16)
SIMT_PTX_TENSOR_MMA(ptx_tcgen05_mma_cta_group_1_kind_tf32, false, TensorKind::tf32)
SIMT_PTX_TENSOR_MMA(ptx_tcgen05_mma_cta_group_1_kind_f8f6f4, false, TensorKind::f8f6f4)
SIMT_PTX_TENSOR_MMA(ptx_tcgen05_mma_cta_group_1_kind_i8, false, TensorKind::i8)
SIMT_PTX_TENSOR_MMA(ptx_tcgen05_mma_cta_group_2_kind_f16, true, TensorKind::f16)
SIMT_PTX_TENSOR_MMA(ptx_tcgen05_mma_cta_group_2_kind_tf32, true, TensorKind::tf32)
SIMT_PTX_TENSOR_MMA(ptx_tcgen05_mma_cta_group_2_kind_f8f6f4, true, TensorKind::f8f6f4)
SIMT_PTX_TENSOR_MMA(ptx_tcgen05_mma_cta_group_2_kind_i8, true, TensorKind::i8)

// Behind work of a pair it arrives at an mbarrier of either block, or by a multicast at the same place of several.
#define SIMT_PTX_TENSOR_COMMIT(name, pair) \
  SIMT_INLINE void name(u64 mbarrier, SIMT_LINE) { tensor_commit(pair, mbarrier, 0, line); }
#define SIMT_PTX_TENSOR_COMMIT_TO_ALL(name, pair) \
  SIMT_INLINE void name(u64 mbarrier, u16 blocks, SIMT_LINE) { tensor_commit(pair, mbarrier, blocks, line); }
SIMT_PTX_TENSOR_COMMIT(ptx_tcgen05_commit_cta_group_1_mbarrier_arrive_one_shared_cluster_b64, false)
SIMT_PTX_TENSOR_COMMIT_TO_ALL(
    ptx_tcgen05_commit_cta_group_1_mbarrier_arrive_one_shared_cluster_multicast_cluster_b64, false)
SIMT_PTX_TENSOR_COMMIT(ptx_tcgen05_commit_cta_group_2_mbarrier_arrive_one_shared_cluster_b64, true)
SIMT_PTX_TENSOR_COMMIT_TO_ALL(
    ptx_tcgen05_commit_cta_group_2_mbarrier_arrive_one_shared_cluster_multicast_cluster_b64, true)

template <u32 N, class... Operands>
SIMT_INLINE void ptx_tcgen05_ld_sync_aligned_16x256b_xN_b32(int line, Operands&&... operands) {
  static_assert(N <= 32 && (N & (N - 1)) == 0, "tcgen05.ld.16x256b repeats 1 to 32 times, a power of 2");
  static_assert(sizeof...(Operands) == 4 * N + 1, "tcgen05.ld.16x256b wants four registers for each 8 columns");
  const WgmmaOperand all[] = {WgmmaOperand(operands)...};
  void* registers[4 * N];
  for (u32 i = 0; i < 4 * N; ++i) {
    registers[i] = reinterpret_cast<void*>(all[i].bits);
  }
  tensor_load_registers(N, static_cast<u32>(all[4 * N].bits), registers, line);
}
SIMT_INLINE void ptx_tcgen05_wait_ld_sync_aligned(SIMT_LINE) { tensor_wait_loads(line); }

}  // namespace simt
