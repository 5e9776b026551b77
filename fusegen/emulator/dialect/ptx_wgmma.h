// wgmma: matrix instructions of a warpgroup, which read shared memory and write accumulators some time before the wait.
//
// ptx.py makes a template's argument of the size in a name, gives the line first, and passes accumulators as they stand
// in the kernel, since they change after the statement, and registers of A with their places, since they are read then.
#pragma once

namespace simt {

// `scaled`: 1 where imm-scale-a and imm-scale-b follow, which whole numbers have none of, else 0. `turned`: 1 where
// imm-trans-a and imm-trans-b say how matrices of 16 bits lie in shared memory, else 0.
#define SIMT_PTX_WGMMA(name, a, b, scaled, turned)                                                                \
  template <u32 N, class... Operands>                                                                             \
  SIMT_INLINE void name(int line, Operands&&... operands) {                                                       \
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma has 8 to 256 columns, a multiple of 8");               \
    static_assert(!is_whole(a) || N % 16 == 0 || N <= 24, "wgmma of whole numbers has 8, 24, or 16 n columns");   \
    static_assert(sizeof...(Operands) == N / 2 + 3 + 2 * scaled + 2 * turned ||                                   \
                      sizeof...(Operands) == N / 2 + 6 + 2 * scaled + turned,                                     \
                  "wgmma wants its accumulators, A as a descriptor or four registers, a descriptor of B, p; of "  \
                  "floats imm-scale-a, imm-scale-b; of 16 bits imm-trans-a (not with registers), imm-trans-b");   \
    const WgmmaOperand all[] = {WgmmaOperand(operands)...};                                                       \
    wgmma(a, b, N, all, sizeof...(Operands), line);                                                               \
  }
SIMT_PTX_WGMMA(ptx_wgmma_mma_async_sync_aligned_m64nNk16_f32_f16_f16, Number::f16, Number::f16, 1, 1)
SIMT_PTX_WGMMA(ptx_wgmma_mma_async_sync_aligned_m64nNk16_f32_bf16_bf16, Number::bf16, Number::bf16, 1, 1)
SIMT_PTX_WGMMA(ptx_wgmma_mma_async_sync_aligned_m64nNk8_f32_tf32_tf32, Number::tf32, Number::tf32, 1, 0)
SIMT_PTX_WGMMA(ptx_wgmma_mma_async_sync_aligned_m64nNk32_f32_e4m3_e4m3, Number::e4m3, Number::e4m3, 1, 0)
SIMT_PTX_WGMMA(ptx_wgmma_mma_async_sync_aligned_m64nNk32_f32_e4m3_e5m2, Number::e4m3, Number::e5m2, 1, 0)
SIMT_PTX_WGMMA(ptx_wgmma_mma_async_sync_aligned_m64nNk32_f32_e5m2_e4m3, Number::e5m2, Number::e4m3, 1, 0)
SIMT_PTX_WGMMA(ptx_wgmma_mma_async_sync_aligned_m64nNk32_f32_e5m2_e5m2, Number::e5m2, Number::e5m2, 1, 0)
SIMT_PTX_WGMMA(ptx_wgmma_mma_async_sync_aligned_m64nNk32_s32_s8_s8, Number::s8, Number::s8, 0, 0)
SIMT_PTX_WGMMA(ptx_wgmma_mma_async_sync_aligned_m64nNk32_s32_u8_u8, Number::u8, Number::u8, 0, 0)

SIMT_INLINE void ptx_wgmma_fence_sync_aligned() { wgmma_fence(); }
SIMT_INLINE void ptx_wgmma_commit_group_sync_aligned() { wgmma_commit(); }
SIMT_INLINE void ptx_wgmma_wait_group_sync_aligned(u32 allowed) { wgmma_wait(allowed); }

}  // namespace simt
