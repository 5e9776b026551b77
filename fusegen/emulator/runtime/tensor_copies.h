// Boxes of a tensor in global memory, as tensor copies move them.
#pragma once

#include "../dialect/simt.h"

namespace simt {

// What a CUtensorMap holds here; class _TensorMap in kernel.py mirrors it. The contiguous axis comes first.
struct TensorMap {
  u64 magic;
  u64 base;
  u64 shape[5];
  u64 strides[4];  // bytes
  u32 box[5];
  u32 rank;
  u32 element_bytes;
  u32 swizzle;  // bytes
  u32 to_tf32;  // f32 becomes the nearest tf32, ties to even, when it is loaded
  u32 unused;
};
static_assert(sizeof(TensorMap) == 128, "a CUtensorMap has 128 bytes");
constexpr u64 tensor_map_magic = 0x70616D2D726F736Eull;

struct Tile {
  TensorMap map;
  i64 origin[5];

  u32 bytes() const {
    u32 total = map.element_bytes;
    for (u32 axis = 0; axis < map.rank; ++axis) {
      total *= map.box[axis];
    }
    return total;
  }

  // Calls `visit(global memory, byte of the box, bytes)` for what of each line of the box lies in the tensor.
  template <class Visit>
  void for_each_line(Visit visit) const {
    const u32 line_bytes = map.box[0] * map.element_bytes;
    const i64 begin = origin[0] < 0 ? 0 : origin[0];
    const i64 end = origin[0] + map.box[0] < static_cast<i64>(map.shape[0]) ? origin[0] + map.box[0]
                                                                            : static_cast<i64>(map.shape[0]);
    if (begin >= end) {
      return;
    }
    const u64 bytes = static_cast<u64>(end - begin) * map.element_bytes;
    u32 lines = bytes ? this->bytes() / line_bytes : 0;
    for (u32 line = 0; line < lines; ++line) {
      u64 address = map.base + static_cast<u64>(begin) * map.element_bytes;
      bool inside = true;
      u32 rest = line;
      for (u32 axis = 1; axis < map.rank; ++axis) {
        const i64 place = origin[axis] + rest % map.box[axis];
        rest /= map.box[axis];
        inside = inside && place >= 0 && place < static_cast<i64>(map.shape[axis]);
        address += static_cast<u64>(place) * map.strides[axis - 1];
      }
      if (inside) {
        visit(reinterpret_cast<char*>(address),
              u64{line} * line_bytes + static_cast<u64>(begin - origin[0]) * map.element_bytes, bytes);
      }
    }
  }

  // Calls `visit(global memory, shared memory, bytes)` for pieces that a swizzle leaves whole.
  template <class Visit>
  void for_each_piece(char* shared, Visit visit) const {
    const u64 permute = map.swizzle ? map.swizzle / 16 - 1 : 0;
    for_each_line([&](char* global, u64 offset, u64 bytes) {
      for (u64 done = 0; done < bytes;) {
        const u64 left = 16 - (offset + done) % 16;
        const u64 piece = left < bytes - done ? left : bytes - done;
        u64 place = reinterpret_cast<u64>(shared) + offset + done;
        place ^= (place >> 7 & permute) << 4;  // a window begins at a multiple of 8192
        visit(global + done, reinterpret_cast<char*>(place), piece);
        done += piece;
      }
    });
  }
};

}  // namespace simt
