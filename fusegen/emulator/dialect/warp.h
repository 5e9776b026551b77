// Barriers, shuffles, votes and warp-wide reductions, in CUDA's spelling (with a mask) and HIP's (without one).
#pragma once

#define SIMT_ALL_LANES (SIMT_WARP == 64 ? ~0ull : 0xffffffffull)

#if SIMT_WARP == 64
typedef unsigned long long simt_lane_mask;
#else
typedef unsigned simt_lane_mask;
#endif

namespace simt {

// The lanes of an explicit mask. On a 64-wide wave a 32-bit mask silently leaves out half of it: HIP refuses to
// compile that.
template <class Mask>
SIMT_INLINE u64 lanes_of(Mask mask, int line) {
  if (SIMT_WARP == 64 && sizeof(Mask) < 8) {
    fail(Fault::mask, line, "a mask of %d bits on a wave of 64 lanes", static_cast<int>(8 * sizeof(Mask)));
  }
  return named_lanes(static_cast<u64>(mask) & SIMT_ALL_LANES, line);
}

template <class T>
SIMT_INLINE T shuffle(u64 lanes, T value, u32 source, int line) {
  static_assert(!__is_class(T) || sizeof(T) <= 4,
                "a number or a 16-bit float type is wanted: no GPU shuffles a float2");
  return from_bits<T>(warp_shuffle(lanes, to_bits(value), source, line));
}

SIMT_INLINE u32 source_at(int lane, int width) {
  return (lane_index() & ~static_cast<u32>(width - 1)) | (static_cast<u32>(lane) & static_cast<u32>(width - 1));
}

SIMT_INLINE u32 source_xor(int lanes, int width) {
  u32 self = lane_index();
  u32 source = self ^ static_cast<u32>(lanes);
  u32 end_of_segment = (self + static_cast<u32>(width)) & ~static_cast<u32>(width - 1);
  return source >= end_of_segment ? self : source;
}

SIMT_INLINE u32 source_up(unsigned delta, int width) {
  u32 self = lane_index();
  u32 in_segment = self & static_cast<u32>(width - 1);
  return delta > in_segment ? self : self - delta;
}

SIMT_INLINE u32 source_down(unsigned delta, int width) {
  u32 self = lane_index();
  u32 in_segment = self & static_cast<u32>(width - 1);
  return in_segment + delta >= static_cast<u32>(width) ? self : self + delta;
}

// Reductions and matches gather the values of all lanes.
struct Gathered {
  u64 value;
  u64 result;
};

template <class Fold>
__attribute__((no_sanitize("thread"))) void fold_lanes(void** slots, u64 lanes) {
  bool first = true;
  u64 total = 0;
  for (u64 rest = lanes; rest; rest &= rest - 1) {
    u64 value = static_cast<Gathered*>(slots[__builtin_ctzll(rest)])->value;
    total = first ? value : Fold::apply(total, value);
    first = false;
  }
  for (u64 rest = lanes; rest; rest &= rest - 1) {
    static_cast<Gathered*>(slots[__builtin_ctzll(rest)])->result = total;
  }
}

__attribute__((no_sanitize("thread"), unused)) static void match_lanes(void** slots, u64 lanes) {
  for (u64 rest = lanes; rest; rest &= rest - 1) {
    Gathered* mine = static_cast<Gathered*>(slots[__builtin_ctzll(rest)]);
    mine->result = 0;
    for (u64 others = lanes; others; others &= others - 1) {
      int lane = __builtin_ctzll(others);
      if (static_cast<Gathered*>(slots[lane])->value == mine->value) {
        mine->result |= u64{1} << lane;
      }
    }
  }
}

SIMT_INLINE u64 gather(u64 lanes, u64 value, Combine combine, int line) {
  Gathered slot{value, 0};
  warp_collect(lanes, &slot, combine, line);
  return slot.result;
}

}  // namespace simt

// --- barriers
SIMT_INLINE void __syncthreads(SIMT_LINE) { simt::barrier(line); }
SIMT_INLINE int __syncthreads_or(int p, SIMT_LINE) { return simt::barrier_reduce(p, simt::Reduce::any, line); }
SIMT_INLINE int __syncthreads_and(int p, SIMT_LINE) { return simt::barrier_reduce(p, simt::Reduce::all, line); }
SIMT_INLINE int __syncthreads_count(int p, SIMT_LINE) { return simt::barrier_reduce(p, simt::Reduce::count, line); }
SIMT_INLINE void __syncwarp(SIMT_LINE) { simt::warp_sync(SIMT_ALL_LANES, line); }
template <class Mask>
SIMT_INLINE void __syncwarp(Mask mask, SIMT_LINE) {
  simt::warp_sync(simt::lanes_of(mask, line), line);
}
SIMT_INLINE void __builtin_amdgcn_s_barrier(SIMT_LINE) { simt::barrier(line); }
SIMT_INLINE void __builtin_amdgcn_wave_barrier(SIMT_LINE) { simt::warp_sync(simt::converged, line); }

// --- shuffles
template <class M, class T>
SIMT_INLINE T __shfl_sync(M mask, T value, int lane, int width = SIMT_WARP, SIMT_LINE) {
  return simt::shuffle(simt::lanes_of(mask, line), value, simt::source_at(lane, width), line);
}
template <class M, class T>
SIMT_INLINE T __shfl_xor_sync(M mask, T value, int lanes, int width = SIMT_WARP, SIMT_LINE) {
  return simt::shuffle(simt::lanes_of(mask, line), value, simt::source_xor(lanes, width), line);
}
template <class M, class T>
SIMT_INLINE T __shfl_up_sync(M mask, T value, unsigned delta, int width = SIMT_WARP, SIMT_LINE) {
  return simt::shuffle(simt::lanes_of(mask, line), value, simt::source_up(delta, width), line);
}
template <class M, class T>
SIMT_INLINE T __shfl_down_sync(M mask, T value, unsigned delta, int width = SIMT_WARP, SIMT_LINE) {
  return simt::shuffle(simt::lanes_of(mask, line), value, simt::source_down(delta, width), line);
}
template <class T>
SIMT_INLINE T __shfl(T value, int lane, int width = SIMT_WARP, SIMT_LINE) {
  return simt::shuffle(simt::converged, value, simt::source_at(lane, width), line);
}
template <class T>
SIMT_INLINE T __shfl_xor(T value, int lanes, int width = SIMT_WARP, SIMT_LINE) {
  return simt::shuffle(simt::converged, value, simt::source_xor(lanes, width), line);
}
template <class T>
SIMT_INLINE T __shfl_up(T value, unsigned delta, int width = SIMT_WARP, SIMT_LINE) {
  return simt::shuffle(simt::converged, value, simt::source_up(delta, width), line);
}
template <class T>
SIMT_INLINE T __shfl_down(T value, unsigned delta, int width = SIMT_WARP, SIMT_LINE) {
  return simt::shuffle(simt::converged, value, simt::source_down(delta, width), line);
}
SIMT_INLINE int __builtin_amdgcn_ds_bpermute(int byte_address, int value, SIMT_LINE) {
  return simt::shuffle(simt::converged, value, static_cast<unsigned>(byte_address >> 2) % SIMT_WARP, line);
}

// Data-parallel primitives, of those within rows of 16 lanes that stay in their row, with all rows and banks written:
// "AMD Instinct MI300 Instruction Set Architecture", "DPP"
SIMT_INLINE int __builtin_amdgcn_update_dpp(int, int value, int control, int rows, int banks, bool, SIMT_LINE) {
  const unsigned lane = simt::lane_index(), in_row = lane % 16;
  unsigned source = 16;
  if (control >= 0 && control <= 0xff) {  // quad_perm
    source = in_row / 4 * 4 + (control >> 2 * (in_row % 4) & 3);
  } else if (control > 0x120 && control <= 0x12f) {  // row_ror
    source = (in_row + 16 - (control & 15)) % 16;
  } else if (control == 0x140) {  // row_mirror
    source = 15 - in_row;
  } else if (control == 0x141) {  // row_half_mirror
    source = in_row ^ 7;
  }
  if (source > 15 || rows != 0xf || banks != 0xf) {
    simt::fail(simt::Fault::mask, line, "DPP of control %#x, rows %#x and banks %#x on a wave of %d is not modelled",
               static_cast<unsigned>(control), static_cast<unsigned>(rows), static_cast<unsigned>(banks), SIMT_WARP);
  }
  return simt::shuffle(simt::converged, value, lane / 16 * 16 + source, line);
}
// Of RDNA, whose waves have 32 lanes: from the lane of the other 16 that a digit of `low` names, and `high` for the last
// 8 lanes; with all lanes there: "RDNA3 Instruction Set Architecture", V_PERMLANEX16_B32
SIMT_INLINE int __builtin_amdgcn_permlanex16(int, int value, unsigned low, unsigned high, bool, bool, SIMT_LINE) {
  const unsigned lane = simt::lane_index(), in_row = lane % 16;
  if (SIMT_WARP != 32) {
    simt::fail(simt::Fault::mask, line, "v_permlanex16_b32 is of RDNA, whose waves have 32 lanes; this one has %d",
               SIMT_WARP);
  }
  const unsigned source = (in_row < 8 ? low : high) >> 4 * (in_row % 8) & 15;
  return simt::shuffle(simt::converged, value, (lane ^ 16) / 16 * 16 + source, line);
}
// Of its bit mask mode: five bits that are kept of a lane's number among 32, five that are set, five that are flipped
SIMT_INLINE int __builtin_amdgcn_ds_swizzle(int value, int pattern, SIMT_LINE) {
  if (pattern & ~0x7fff) {
    simt::fail(simt::Fault::mask, line, "ds_swizzle_b32 of pattern %#x is not modelled", static_cast<unsigned>(pattern));
  }
  const unsigned lane = simt::lane_index();
  const unsigned source = ((lane & pattern & 31) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31);
  return simt::shuffle(simt::converged, value, lane / 32 * 32 + source, line);
}
SIMT_INLINE int __builtin_amdgcn_readlane(int value, int lane, SIMT_LINE) {
  return simt::shuffle(simt::converged, value, static_cast<unsigned>(lane), line);
}

// --- votes
template <class M>
SIMT_INLINE simt_lane_mask __ballot_sync(M mask, int p, SIMT_LINE) {
  return static_cast<simt_lane_mask>(simt::warp_ballot(simt::lanes_of(mask, line), p, line));
}
template <class M>
SIMT_INLINE int __any_sync(M mask, int p, SIMT_LINE) {
  return simt::warp_ballot(simt::lanes_of(mask, line), p, line) != 0;
}
template <class M>
SIMT_INLINE int __all_sync(M mask, int p, SIMT_LINE) {
  return simt::warp_ballot(simt::lanes_of(mask, line), !p, line) == 0;
}
SIMT_INLINE unsigned long long __ballot(int p, SIMT_LINE) { return simt::warp_ballot(simt::converged, p, line); }
SIMT_INLINE int __any(int p, SIMT_LINE) { return simt::warp_ballot(simt::converged, p, line) != 0; }
SIMT_INLINE int __all(int p, SIMT_LINE) { return simt::warp_ballot(simt::converged, !p, line) == 0; }
SIMT_INLINE simt_lane_mask __activemask(SIMT_LINE) {
  return static_cast<simt_lane_mask>(simt::warp_ballot(simt::converged, 1, line));
}
SIMT_INLINE int __builtin_amdgcn_readfirstlane(int value, SIMT_LINE) {
  unsigned first = static_cast<unsigned>(__builtin_ctzll(simt::warp_ballot(simt::converged, 1, line)));
  return simt::shuffle(simt::converged, value, first, line);
}
SIMT_INLINE unsigned __lane_id() { return simt::lane_index(); }

// --- reductions and matches
#define SIMT_WARP_REDUCE(name, type, expression)                                                     \
  namespace simt {                                                                                   \
  struct Fold_##name##_##type {                                                                      \
    __attribute__((no_sanitize("thread"))) static u64 apply(u64 left, u64 right) {                   \
      type a = static_cast<type>(left);                                                              \
      type b = static_cast<type>(right);                                                             \
      return static_cast<u64>(expression);                                                           \
    }                                                                                                \
  };                                                                                                 \
  }                                                                                                  \
  template <class M>                                                                                 \
  SIMT_INLINE type name(M mask, type value, SIMT_LINE) {                                             \
    return static_cast<type>(simt::gather(simt::lanes_of(mask, line), static_cast<simt::u64>(value), \
                                          simt::fold_lanes<simt::Fold_##name##_##type>, line));      \
  }
SIMT_WARP_REDUCE(__reduce_add_sync, int, static_cast<unsigned>(a) + static_cast<unsigned>(b))
SIMT_WARP_REDUCE(__reduce_add_sync, unsigned, a + b)
SIMT_WARP_REDUCE(__reduce_min_sync, int, a < b ? a : b)
SIMT_WARP_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
SIMT_WARP_REDUCE(__reduce_max_sync, int, a > b ? a : b)
SIMT_WARP_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
SIMT_WARP_REDUCE(__reduce_and_sync, unsigned, a& b)
SIMT_WARP_REDUCE(__reduce_or_sync, unsigned, a | b)
SIMT_WARP_REDUCE(__reduce_xor_sync, unsigned, a ^ b)

template <class M, class T>
SIMT_INLINE simt_lane_mask __match_any_sync(M mask, T value, SIMT_LINE) {
  return static_cast<simt_lane_mask>(
      simt::gather(simt::lanes_of(mask, line), simt::to_bits(value), simt::match_lanes, line));
}
template <class M, class T>
SIMT_INLINE simt_lane_mask __match_all_sync(M mask, T value, int* agree, SIMT_LINE) {
  simt::u64 lanes = simt::lanes_of(mask, line);
  simt::u64 same = simt::gather(lanes, simt::to_bits(value), simt::match_lanes, line);
  simt::u64 taking_part = simt::warp_ballot(lanes, 1, line);
  *agree = same == taking_part;
  return *agree ? static_cast<simt_lane_mask>(same) : 0;
}
