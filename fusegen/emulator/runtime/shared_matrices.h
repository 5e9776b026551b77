// Factors of matrix instructions as they lie in shared memory: Hopper's wgmma and Blackwell's tcgen05.mma read them alike.
//
// Layouts: PTX ISA, "Register Fragments and Shared Memory Matrix Layouts" of wgmma with the table of canonical layouts
// there, and "Canonical Layouts" of tcgen05, which are the same; CUTLASS says so as well (cute/atom/mma_traits_sm90_gmma.hpp,
// cute/atom/mma_traits_sm100.hpp). Only the bits of the two families' descriptors differ.
#pragma once

#include "matrices.h"

namespace simt {

inline u64 bits_of(u64 descriptor, u32 low, u32 bits) { return descriptor >> low & ((u64{1} << bits) - 1); }

// `visit`: a piece of 16 bytes, and the row and the depth of its first element.
template <class Visit>
void for_each_chunk(const SharedMatrix& matrix, const void* site, Visit visit) {
  const MatrixLayout& layout = matrix.layout;
  auto visit_at = [&](u64 offset, u32 row, u32 depth) {
    u64 address = layout.start + offset;
    address ^= (address >> 7 & layout.permute) << 4;
    const u64 in_window = window_base(matrix.block) | (address & 0x3ffff);
    visit(from_shared_window(in_window, site), row, depth);
  };
  const u32 chunks = layout.span / 16;
  if (matrix.transposed) {
    for (u32 depth = 0; depth < 16; ++depth) {
      for (u32 chunk = 0; chunk < matrix.rows / 8; ++chunk) {
        const u64 along =
            layout.permute ? chunk % chunks * 16 + chunk / chunks * layout.leading : chunk * layout.stride;
        const u64 down = depth % 8 * layout.span + depth / 8 * (layout.permute ? layout.stride : layout.leading);
        visit_at(along + down, chunk * 8, depth);
      }
    }
    return;
  }
  for (u32 row = 0; row < matrix.rows; ++row) {
    for (u32 chunk = 0; chunk < 2; ++chunk) {
      const u64 along = chunk * (layout.permute ? 16 : layout.leading);
      visit_at(along + row % 8 * layout.span + row / 8 * layout.stride, row, chunk * matrix.chunk());
    }
  }
}

// As floats, at row * per_row + depth * per_depth.
inline void read_shared_matrix(const SharedMatrix& matrix, const void* site, float* to, u32 per_row, u32 per_depth) {
  for_each_chunk(matrix, site, [&](const char* place, u32 row, u32 depth) {
    if (matrix.number == Number::tf32) {
      u32 values[4];
      std::memcpy(values, place, sizeof values);
      for (u32 i = 0; i < 4; ++i) {
        to[row * per_row + (depth + i) * per_depth] = tf32_value(values[i]);
      }
      return;
    }
    if (of_8_bits(matrix.number)) {
      for (u32 i = 0; i < 16; ++i) {
        const auto bits = static_cast<unsigned char>(place[i]);
        to[row * per_row + (depth + i) * per_depth] = narrow_value(matrix.number, bits);
      }
      return;
    }
    u16 values[8];
    std::memcpy(values, place, sizeof values);
    for (u32 i = 0; i < 8; ++i) {
      const u32 at =
          matrix.transposed ? (row + i) * per_row + depth * per_depth : row * per_row + (depth + i) * per_depth;
      to[at] = value_of(matrix.number, values[i]);
    }
  });
}

}  // namespace simt
