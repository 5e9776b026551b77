// AMD's matrix instructions by their compiler builtins. rewrite.py makes vector_size of ext_vector_type, so a source's
// own vector types are these; their elements are reached by [i], on the device too.
#pragma once

#ifdef __FLT16_MAX__
namespace simt {

typedef _Float16 F16x4 __attribute__((vector_size(8)));
typedef short I16x4 __attribute__((vector_size(8)));
typedef _Float16 F16x8 __attribute__((vector_size(16)));
typedef short I16x8 __attribute__((vector_size(16)));
typedef float F32;
typedef float F32x2 __attribute__((vector_size(8)));
typedef float F32x4 __attribute__((vector_size(16)));
typedef float F32x16 __attribute__((vector_size(64)));
typedef int I32;
typedef long I64;
typedef int I32x4 __attribute__((vector_size(16)));
typedef int I32x16 __attribute__((vector_size(64)));

}  // namespace simt

// The last three arguments broadcast blocks of A and permute lanes of B; only zeros are modelled.
#define SIMT_MFMA_OF(name, left, right, size, values, input, output)                                        \
  SIMT_INLINE simt::output name(simt::input a, simt::input b, simt::output d, int cbsz, int abid, int blgp, \
                                SIMT_LINE) {                                                                \
    simt::mfma(left, right, size, values, &a, &b, &d, cbsz | abid | blgp, line);                            \
    return d;                                                                                               \
  }
#define SIMT_MFMA(name, number, size, input, output) \
  SIMT_MFMA_OF(name, number, number, size, number == simt::Number::f32 ? 1 : 4, input, output)
// 8 values a lane: "AMD Instinct MI300 Instruction Set Architecture", chapter 7
#define SIMT_NARROW_MFMA(kind, sums, left, right)                                                                     \
  SIMT_MFMA_OF(__builtin_amdgcn_mfma_##sums##_32x32x16_##kind, left, right, 32, 8, I64, SIMT_SUMS_##sums##_16)         \
  SIMT_MFMA_OF(__builtin_amdgcn_mfma_##sums##_16x16x32_##kind, left, right, 16, 8, I64, SIMT_SUMS_##sums##_4)
// The same instructions multiply OCP's types on gfx950: LLVM's AMDGPU usage guide
#ifdef __gfx950__
#define SIMT_FP8 simt::Number::e4m3
#define SIMT_BF8 simt::Number::e5m2
#else
#define SIMT_FP8 simt::Number::e4m3fnuz
#define SIMT_BF8 simt::Number::e5m2fnuz
#endif
#define SIMT_SUMS_f32_16 F32x16
#define SIMT_SUMS_f32_4 F32x4
#define SIMT_SUMS_i32_16 I32x16
#define SIMT_SUMS_i32_4 I32x4
SIMT_MFMA(__builtin_amdgcn_mfma_f32_32x32x8f16, simt::Number::f16, 32, F16x4, F32x16)
SIMT_MFMA(__builtin_amdgcn_mfma_f32_16x16x16f16, simt::Number::f16, 16, F16x4, F32x4)
SIMT_MFMA(__builtin_amdgcn_mfma_f32_32x32x8bf16_1k, simt::Number::bf16, 32, I16x4, F32x16)
SIMT_MFMA(__builtin_amdgcn_mfma_f32_16x16x16bf16_1k, simt::Number::bf16, 16, I16x4, F32x4)
SIMT_MFMA(__builtin_amdgcn_mfma_f32_32x32x2f32, simt::Number::f32, 32, F32, F32x16)
SIMT_MFMA(__builtin_amdgcn_mfma_f32_16x16x4f32, simt::Number::f32, 16, F32, F32x4)
// gfx942's alone: "AMD Instinct MI300 Instruction Set Architecture", V_MFMA_F32_32X32X4_XF32
SIMT_MFMA_OF(__builtin_amdgcn_mfma_f32_32x32x4_xf32, simt::Number::tf32, simt::Number::tf32, 32, 2, F32x2, F32x16)
SIMT_MFMA_OF(__builtin_amdgcn_mfma_f32_16x16x8_xf32, simt::Number::tf32, simt::Number::tf32, 16, 2, F32x2, F32x4)
SIMT_NARROW_MFMA(fp8_fp8, f32, SIMT_FP8, SIMT_FP8)
SIMT_NARROW_MFMA(fp8_bf8, f32, SIMT_FP8, SIMT_BF8)
SIMT_NARROW_MFMA(bf8_fp8, f32, SIMT_BF8, SIMT_FP8)
SIMT_NARROW_MFMA(bf8_bf8, f32, SIMT_BF8, SIMT_BF8)
SIMT_NARROW_MFMA(i8, i32, simt::Number::s8, simt::Number::s8)
SIMT_MFMA_OF(__builtin_amdgcn_mfma_i32_32x32x8i8, simt::Number::s8, simt::Number::s8, 32, 4, I32, I32x16)
SIMT_MFMA_OF(__builtin_amdgcn_mfma_i32_16x16x16i8, simt::Number::s8, simt::Number::s8, 16, 4, I32, I32x4)
// gfx950's, twice as deep: "AMD Instinct CDNA 4 Instruction Set Architecture"
SIMT_MFMA_OF(__builtin_amdgcn_mfma_f32_32x32x16_f16, simt::Number::f16, simt::Number::f16, 32, 8, F16x8, F32x16)
SIMT_MFMA_OF(__builtin_amdgcn_mfma_f32_16x16x32_f16, simt::Number::f16, simt::Number::f16, 16, 8, F16x8, F32x4)
SIMT_MFMA_OF(__builtin_amdgcn_mfma_f32_32x32x16_bf16, simt::Number::bf16, simt::Number::bf16, 32, 8, I16x8, F32x16)
SIMT_MFMA_OF(__builtin_amdgcn_mfma_f32_16x16x32_bf16, simt::Number::bf16, simt::Number::bf16, 16, 8, I16x8, F32x4)
SIMT_MFMA_OF(__builtin_amdgcn_mfma_i32_32x32x32_i8, simt::Number::s8, simt::Number::s8, 32, 16, I32x4, I32x16)
SIMT_MFMA_OF(__builtin_amdgcn_mfma_i32_16x16x64_i8, simt::Number::s8, simt::Number::s8, 16, 16, I32x4, I32x4)
#endif
