// mma.sync, ldmatrix and stmatrix, which a whole warp executes together; runtime/matrices.cpp has their layouts.
#pragma once

namespace simt {

// `Sum`: float, or u32 for s32.
#define SIMT_PTX_MMA_OF(name, left, right, k, Sum)                                                                  \
  SIMT_INLINE void name(Sum& d0, Sum& d1, Sum& d2, Sum& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, Sum c0, \
                        Sum c1, Sum c2, Sum c3, SIMT_LINE) {                                                        \
    const u32 a[] = {a0, a1, a2, a3};                                                                               \
    const u32 b[] = {b0, b1};                                                                                       \
    Sum d[] = {c0, c1, c2, c3};                                                                                     \
    mma(left, right, k, a, b, d, line);                                                                             \
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                                                     \
  }
#define SIMT_PTX_MMA(name, number, k) SIMT_PTX_MMA_OF(name, number, number, k, float)
// Half as deep: half as many registers of A and B.
#define SIMT_PTX_SHORT_MMA(name, number, k)                                                                     \
  SIMT_INLINE void name(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 b0, float c0, float c1, \
                        float c2, float c3, SIMT_LINE) {                                                        \
    const u32 a[] = {a0, a1};                                                                                   \
    float d[] = {c0, c1, c2, c3};                                                                               \
    mma(number, number, k, a, &b0, d, line);                                                                            \
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                                                 \
  }
SIMT_PTX_MMA(ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, Number::f16, 16)
SIMT_PTX_MMA(ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, Number::bf16, 16)
SIMT_PTX_MMA(ptx_mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32, Number::tf32, 8)
SIMT_PTX_MMA(ptx_mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e4m3_f32, Number::e4m3, 32)
SIMT_PTX_MMA(ptx_mma_sync_aligned_m16n8k32_row_col_f32_e5m2_e5m2_f32, Number::e5m2, 32)
SIMT_PTX_MMA_OF(ptx_mma_sync_aligned_m16n8k32_row_col_f32_e4m3_e5m2_f32, Number::e4m3, Number::e5m2, 32, float)
SIMT_PTX_MMA_OF(ptx_mma_sync_aligned_m16n8k32_row_col_f32_e5m2_e4m3_f32, Number::e5m2, Number::e4m3, 32, float)
SIMT_PTX_MMA_OF(ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32, Number::s8, Number::s8, 32, u32)
SIMT_PTX_MMA_OF(ptx_mma_sync_aligned_m16n8k32_row_col_s32_u8_u8_s32, Number::u8, Number::u8, 32, u32)
SIMT_PTX_SHORT_MMA(ptx_mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32, Number::f16, 8)
SIMT_PTX_SHORT_MMA(ptx_mma_sync_aligned_m16n8k8_row_col_f32_bf16_bf16_f32, Number::bf16, 8)
SIMT_PTX_SHORT_MMA(ptx_mma_sync_aligned_m16n8k4_row_col_f32_tf32_tf32_f32, Number::tf32, 4)

#define SIMT_PTX_LDMATRIX(name, transposed)                                           \
  SIMT_INLINE void name(u32& d0, u64 address, SIMT_LINE) {                            \
    u32 d[1];                                                                         \
    load_matrices(1, transposed, address, d, line);                                   \
    d0 = d[0];                                                                        \
  }                                                                                   \
  SIMT_INLINE void name(u32& d0, u32& d1, u64 address, SIMT_LINE) {                   \
    u32 d[2];                                                                         \
    load_matrices(2, transposed, address, d, line);                                   \
    d0 = d[0], d1 = d[1];                                                             \
  }                                                                                   \
  SIMT_INLINE void name(u32& d0, u32& d1, u32& d2, u32& d3, u64 address, SIMT_LINE) { \
    u32 d[4];                                                                         \
    load_matrices(4, transposed, address, d, line);                                   \
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                       \
  }
// How many registers follow says how many matrices: a literal of another number is refused by the GPU's compiler.
SIMT_PTX_LDMATRIX(ptx_ldmatrix_sync_aligned_m8n8_x1_shared_b16, false)
SIMT_PTX_LDMATRIX(ptx_ldmatrix_sync_aligned_m8n8_x2_shared_b16, false)
SIMT_PTX_LDMATRIX(ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16, false)
SIMT_PTX_LDMATRIX(ptx_ldmatrix_sync_aligned_m8n8_x1_shared_cta_b16, false)
SIMT_PTX_LDMATRIX(ptx_ldmatrix_sync_aligned_m8n8_x2_shared_cta_b16, false)
SIMT_PTX_LDMATRIX(ptx_ldmatrix_sync_aligned_m8n8_x4_shared_cta_b16, false)
SIMT_PTX_LDMATRIX(ptx_ldmatrix_sync_aligned_m8n8_x1_trans_shared_b16, true)
SIMT_PTX_LDMATRIX(ptx_ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16, true)
SIMT_PTX_LDMATRIX(ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16, true)
SIMT_PTX_LDMATRIX(ptx_ldmatrix_sync_aligned_m8n8_x1_trans_shared_cta_b16, true)
SIMT_PTX_LDMATRIX(ptx_ldmatrix_sync_aligned_m8n8_x2_trans_shared_cta_b16, true)
SIMT_PTX_LDMATRIX(ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_cta_b16, true)

#define SIMT_PTX_STMATRIX(name)                                                   \
  SIMT_INLINE void name(u64 address, u32 d0, SIMT_LINE) {                         \
    const u32 d[] = {d0};                                                         \
    store_matrices(1, address, d, line);                                          \
  }                                                                               \
  SIMT_INLINE void name(u64 address, u32 d0, u32 d1, SIMT_LINE) {                 \
    const u32 d[] = {d0, d1};                                                     \
    store_matrices(2, address, d, line);                                          \
  }                                                                               \
  SIMT_INLINE void name(u64 address, u32 d0, u32 d1, u32 d2, u32 d3, SIMT_LINE) { \
    const u32 d[] = {d0, d1, d2, d3};                                             \
    store_matrices(4, address, d, line);                                          \
  }
SIMT_PTX_STMATRIX(ptx_stmatrix_sync_aligned_m8n8_x1_shared_b16)
SIMT_PTX_STMATRIX(ptx_stmatrix_sync_aligned_m8n8_x2_shared_b16)
SIMT_PTX_STMATRIX(ptx_stmatrix_sync_aligned_m8n8_x4_shared_b16)
SIMT_PTX_STMATRIX(ptx_stmatrix_sync_aligned_m8n8_x1_shared_cta_b16)
SIMT_PTX_STMATRIX(ptx_stmatrix_sync_aligned_m8n8_x2_shared_cta_b16)
SIMT_PTX_STMATRIX(ptx_stmatrix_sync_aligned_m8n8_x4_shared_cta_b16)

}  // namespace simt
