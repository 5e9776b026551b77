// AMD's matrix instructions by their compiler builtins. rewrite.py makes vector_size of ext_vector_type, so a source's
// own vector types are these; their elements are reached by [i], on the device too.
#pragma once

#ifdef __FLT16_MAX__
namespace simt {

typedef _Float16 F16x4 __attribute__((vector_size(8)));
typedef short I16x4 __attribute__((vector_size(8)));
typedef float F32;
typedef float F32x4 __attribute__((vector_size(16)));
typedef float F32x16 __attribute__((vector_size(64)));

}  // namespace simt

// The last three arguments broadcast blocks of A and permute lanes of B; only zeros are modelled.
#define SIMT_MFMA(name, number, size, input, output)                                                        \
  SIMT_INLINE simt::output name(simt::input a, simt::input b, simt::output d, int cbsz, int abid, int blgp, \
                                SIMT_LINE) {                                                                \
    simt::mfma(number, size, &a, &b, reinterpret_cast<float*>(&d), cbsz | abid | blgp, line);               \
    return d;                                                                                               \
  }
SIMT_MFMA(__builtin_amdgcn_mfma_f32_32x32x8f16, simt::Number::f16, 32, F16x4, F32x16)
SIMT_MFMA(__builtin_amdgcn_mfma_f32_16x16x16f16, simt::Number::f16, 16, F16x4, F32x4)
SIMT_MFMA(__builtin_amdgcn_mfma_f32_32x32x8bf16_1k, simt::Number::bf16, 32, I16x4, F32x16)
SIMT_MFMA(__builtin_amdgcn_mfma_f32_16x16x16bf16_1k, simt::Number::bf16, 16, I16x4, F32x4)
SIMT_MFMA(__builtin_amdgcn_mfma_f32_32x32x2f32, simt::Number::f32, 32, F32, F32x16)
SIMT_MFMA(__builtin_amdgcn_mfma_f32_16x16x4f32, simt::Number::f32, 16, F32, F32x4)
#endif
