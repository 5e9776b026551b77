// tcgen05: products into tensor memory by one thread, and loads from there by a warp (runtime/tensor_memory.cpp).
//
// ptx.py makes a template's argument of the size in a load's name, gives the line first, and passes the registers as they
// stand in the kernel, since they change after the statement.
#pragma once

namespace simt {

SIMT_INLINE void ptx_tcgen05_alloc_cta_group_1_sync_aligned_shared_cta_b32(u64 place, u32 columns, SIMT_LINE) {
  tensor_alloc(place, columns, line);
}
SIMT_INLINE void ptx_tcgen05_dealloc_cta_group_1_sync_aligned_b32(u32 address, u32 columns, SIMT_LINE) {
  tensor_dealloc(address, columns, line);
}
SIMT_INLINE void ptx_tcgen05_relinquish_alloc_permit_cta_group_1_sync_aligned() { tensor_relinquish(); }

SIMT_INLINE void ptx_tcgen05_fence_before_thread_sync() { tensor_fence(false); }
SIMT_INLINE void ptx_tcgen05_fence_after_thread_sync() { tensor_fence(true); }

#define SIMT_PTX_TENSOR_MMA(name, kind)                                                           \
  SIMT_INLINE void name(u32 to, u64 a, u64 b, u32 instruction, bool adds, SIMT_LINE) {            \
    tensor_mma(kind, to, a, b, instruction, adds, line);                                          \
  }
SIMT_PTX_TENSOR_MMA(ptx_tcgen05_mma_cta_group_1_kind_f16, TensorKind::f16)
SIMT_PTX_TENSOR_MMA(ptx_tcgen05_mma_cta_group_1_kind_tf32, TensorKind::tf32)
SIMT_PTX_TENSOR_MMA(ptx_tcgen05_mma_cta_group_1_kind_f8f6f4, TensorKind::f8f6f4)
SIMT_PTX_TENSOR_MMA(ptx_tcgen05_mma_cta_group_1_kind_i8, TensorKind::i8)

SIMT_INLINE void ptx_tcgen05_commit_cta_group_1_mbarrier_arrive_one_shared_cluster_b64(u64 mbarrier, SIMT_LINE) {
  tensor_commit(mbarrier, line);
}

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
