// mma.sync, MFMA, WMMA, ldmatrix and stmatrix: instructions that need every lane of the warp.
//
// The numbers. A product of two inputs is exact in double (at most 22 significant bits, 48 of f32); the products and the addend
// are summed in double and rounded to float once. The machines sum in an order of their own, in groups, and drop bits
// below the largest term (measured by Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores",
// 2021); PTX promises "at least single precision" for each step. So a machine's result lies within (k + 1) * 2^-23 of
// the sum of magnitudes, ours within 2^-24 of the exact sum: a kernel's tolerance has to cover the former. The matrix
// cores of gfx90a, not those of gfx942, take subnormal inputs of 16 bits for zeros; here they count.
//
// The layouts. mma and ldmatrix: PTX ISA, 9.7.14.5 "Matrix multiply-accumulate operation using mma instruction", the
// figures of m16n8k4, k8 and k16, and "ldmatrix". MFMA: "AMD Instinct MI300 Instruction Set Architecture" and "MI200",
// chapter 7; the deeper ones of gfx950 number lanes and values in the same way (LLVM's tests of gfx950 have the registers;
// that depths go by lane group, then by value, is assumed, and no kernel depends on it); f32 has one value a lane where halves have four. Checked against AMD's matrix instruction calculator (element A[0][4] of 16x16x16f16 is v0{16}.[15:0]) and
// against the layouts of IREE's dialect for AMD GPUs (32x32x8: C in 4 groups of 2 x 4 rows, lanes along the columns).
// WMMA: "RDNA3 Instruction Set Architecture" and "RDNA4 Instruction Set Architecture", "Wave Matrix Multiply Accumulate".
#include "matrices.h"

namespace simt {

void multiply_add(double* d, const float* a, const float* b, u32 m, u32 n, u32 k) {
  for (u32 row = 0; row < m; ++row) {
    double* __restrict sums = d + row * n;
    const float* left = a + row * k;
    u32 depth = 0;
    for (; depth + 4 <= k; depth += 4) {  // four at a time, one behind the other: the sums stay in registers
      const double l0 = left[depth], l1 = left[depth + 1], l2 = left[depth + 2], l3 = left[depth + 3];
      const float *r0 = b + depth * n, *r1 = r0 + n, *r2 = r1 + n, *r3 = r2 + n;
      for (u32 column = 0; column < n; ++column) {
        double sum = sums[column];
        sum += l0 * r0[column];
        sum += l1 * r1[column];
        sum += l2 * r2[column];
        sum += l3 * r3[column];
        sums[column] = sum;
      }
    }
    for (; depth < k; ++depth) {
      const double l0 = left[depth];
      const float* r0 = b + depth * n;
      for (u32 column = 0; column < n; ++column) {
        sums[column] += l0 * r0[column];
      }
    }
  }
}

// Products are exact; they and the addend are aligned to the largest of them, and lose what lies more than 13 bits below
// its first one; the sum loses what is more than 13 bits below its own (Khattak & Mikaitis, "Accurate Models of NVIDIA
// Tensor Cores", 2025: FP8 on H100, all 32 products of an instruction together). The exponent is that of the product,
// where the machine may take the sum of both factors': what is lost here is as much or more.
constexpr int narrow_bits = 13;

static double cut_off(double value, int exponent) {
  return __builtin_ldexp(__builtin_trunc(__builtin_ldexp(value, narrow_bits - exponent)), exponent - narrow_bits);
}

// The sum and `k` products, which are added at once.
static double add_narrow(double sum, const float* left, const float* right, u32 k) {
  float largest = static_cast<float>(__builtin_fabs(sum));
  bool finite = __builtin_isfinite(largest);
  for (u32 depth = 0; depth < k; ++depth) {
    const float size = __builtin_fabsf(left[depth] * right[depth]);
    largest = size > largest ? size : largest;
    finite = finite && size <= 0x1p100f;
  }
  if (!finite) {  // an infinity or NaN decides
    for (u32 depth = 0; depth < k; ++depth) sum += static_cast<double>(left[depth]) * right[depth];
    return sum;
  }
  if (largest == 0.0f) return sum;
  const int exponent = static_cast<int>(__builtin_bit_cast(u32, largest) >> 23) - 127;
  const float scale = __builtin_bit_cast(float, static_cast<u32>(127 + narrow_bits - exponent) << 23);
  int units = static_cast<int>(static_cast<float>(sum) * scale);
  for (u32 depth = 0; depth < k; ++depth) units += static_cast<int>(left[depth] * right[depth] * scale);
  sum = static_cast<double>(units) / scale;
  return units ? cut_off(sum, __builtin_ilogb(sum)) : sum;
}

void multiply_add_narrow(double* d, const float* a, const float* b, u32 m, u32 n, u32 k, u32 at_once) {
  for (u32 row = 0; row < m; ++row) {
    for (u32 column = 0; column < n; ++column) {
      for (u32 depth = 0; depth < k; depth += at_once) {
        double& sum = d[row * n + column];
        sum = add_narrow(sum, a + row * k + depth, b + column * k + depth, at_once);
      }
    }
  }
}

float rounded(double sum) {
  return __builtin_isnan(sum) ? __builtin_bit_cast(float, 0x7fffffffu) : static_cast<float>(sum);
}

static Fiber& fiber_of(Warp& warp, u64 lane) { return warp.block->fibers[warp.first_thread + lane]; }

// Runs where the last lane arrives, or where the last lane that others wait for ends.
static Warp& require_whole_warp(u64 lanes, const char* what) {
  Warp& warp = warp_of(*current_fiber());
  const u64 all = ~u64{0} >> (64 - worker->launch->request.warp);
  if (lanes != all) {
    u32 missing = lowest_lane(all & ~lanes);
    fail_for(fiber_of(warp, lowest_lane(lanes)), 0, Fault::divergent_warp,
             "%s is executed by lanes %#llx; it needs all %u of the warp, and lane %u %s", what, lanes,
             worker->launch->request.warp, missing, warp.members & bit(missing) ? "has ended" : "does not exist");
  }
  return warp;
}

static void require_warp_of(u32 lanes, const char* what, int line) {
  if (worker->launch->request.warp != lanes) {
    fail(Fault::divergent_warp, line, "%s belongs to warps of %u lanes, and this one has %u", what, lanes,
         worker->launch->request.warp);
  }
}

// --- mma.sync

struct MmaLane {
  Number left;
  Number right;
  u32 k;
  const u32* a;
  const u32* b;
  void* d;
};

static float value_in(Number number, u32 bits, u32 i) {  // of a register
  if (of_8_bits(number)) return narrow_value(number, static_cast<unsigned char>(bits >> 8 * i));
  return number == Number::tf32 ? tf32_value(bits) : value_of(number, static_cast<u16>(bits >> 16 * i));
}

static void multiply_lanes(void** slots, u64 lanes) {
  require_whole_warp(lanes, "mma.sync");
  const MmaLane& first = *static_cast<MmaLane*>(slots[0]);
  const u32 k = first.k;
  const bool whole = is_whole(first.left), narrow = of_8_bits(first.left) && !whole;
  const u32 values = of_8_bits(first.left) ? 4 : first.left == Number::tf32 ? 1 : 2;  // of a register
  float a[16 * 32], b[32 * 8];
  double d[16 * 8];
  for (u32 lane = 0; lane < 32; ++lane) {
    const MmaLane& mine = *static_cast<MmaLane*>(slots[lane]);
    const u32 group = lane / 4, in_group = lane % 4;
    if (mine.left != first.left || mine.right != first.right || mine.k != k) {
      fail_for(fiber_of(warp_of(*current_fiber()), lane), 0, Fault::divergent_warp,
               "lane %u executes another mma.sync than lane 0", lane);
    }
    for (u32 i = 0; i < k / 4; ++i) {  // of this lane's values of B; for each, two rows of A
      const u32 part = i % values, step = i / values;
      const u32 depth = values * (4 * step + in_group) + part;
      a[group * k + depth] = value_in(first.left, mine.a[2 * step], part);
      a[(group + 8) * k + depth] = value_in(first.left, mine.a[2 * step + 1], part);
      b[narrow ? group * k + depth : depth * 8 + group] = value_in(first.right, mine.b[step], part);
    }
    for (u32 i = 0; i < 4; ++i) {
      const double held = whole ? double{static_cast<const int*>(mine.d)[i]} : static_cast<const float*>(mine.d)[i];
      d[(group + i / 2 * 8) * 8 + 2 * in_group + i % 2] = held;
    }
  }
  if (narrow) {
    multiply_add_narrow(d, a, b, 16, 8, k, 16);  // at once: Khattak & Mikaitis, as above, of Ada
  } else {
    multiply_add(d, a, b, 16, 8, k);
  }
  for (u32 lane = 0; lane < 32; ++lane) {
    void* out = static_cast<MmaLane*>(slots[lane])->d;
    for (u32 i = 0; i < 4; ++i) {
      const double sum = d[(lane / 4 + i / 2 * 8) * 8 + 2 * (lane % 4) + i % 2];
      if (whole) {
        static_cast<u32*>(out)[i] = static_cast<u32>(static_cast<i64>(sum));  // modulo 2^32
      } else {
        static_cast<float*>(out)[i] = rounded(sum);
      }
    }
  }
}

void mma(Number left, Number right, u32 k, const u32* a, const u32* b, void* d, int line) {
  require_warp_of(32, "mma.sync", line);
  MmaLane lane{left, right, k, a, b, d};
  warp_collect(0xffffffffu, &lane, multiply_lanes, line);
}

// --- MFMA: size x size results; of A and of B a lane has four or eight values, one of f32, two of xf32, of 8 bits up to 16.
// xf32 has tf32's bits, and of an f32 the others are cut off here: what the instruction makes of them isn't written down.

struct MfmaLane {
  Number left;
  Number right;
  u32 size;
  u32 values;
  const void* a;
  const void* b;
  void* d;
};

static float value_at(Number number, const void* of, u32 i) {
  if (number == Number::f32) return static_cast<const float*>(of)[i];
  if (number == Number::tf32) return tf32_value(static_cast<const u32*>(of)[i]);
  if (of_8_bits(number)) return narrow_value(number, static_cast<const unsigned char*>(of)[i]);
  return value_of(number, static_cast<const u16*>(of)[i]);
}

// Row of element i in this lane; its column is the lane's number modulo the size.
static u32 mfma_row(u32 size, u32 lane, u32 i) {
  const u32 groups = 64 / size;  // of lanes
  return i / 4 * 4 * groups + lane / size * 4 + i % 4;
}

static void multiply_wave(void** slots, u64 lanes) {
  require_whole_warp(lanes, "a matrix instruction");
  const MfmaLane& first = *static_cast<MfmaLane*>(slots[0]);
  const u32 size = first.size, values = first.values, k = 64 / size * values, results = size * size / 64;
  const bool whole = is_whole(first.left);
  float a[32 * 32], b[32 * 32];
  double d[32 * 32];
  for (u32 lane = 0; lane < 64; ++lane) {
    const MfmaLane& mine = *static_cast<MfmaLane*>(slots[lane]);
    if (mine.left != first.left || mine.right != first.right || mine.size != size) {
      fail_for(fiber_of(warp_of(*current_fiber()), lane), 0, Fault::divergent_warp,
               "lane %u executes another matrix instruction than lane 0", lane);
    }
    const u32 place = lane % size;
    for (u32 i = 0; i < values; ++i) {
      const u32 depth = lane / size * values + i;
      a[place * k + depth] = value_at(first.left, mine.a, i);
      b[depth * size + place] = value_at(first.right, mine.b, i);
    }
    for (u32 i = 0; i < results; ++i) {
      const double held = whole ? double{static_cast<const int*>(mine.d)[i]} : static_cast<const float*>(mine.d)[i];
      d[mfma_row(size, lane, i) * size + place] = held;
    }
  }
  multiply_add(d, a, b, size, size, k);
  for (u32 lane = 0; lane < 64; ++lane) {
    void* out = static_cast<MfmaLane*>(slots[lane])->d;
    for (u32 i = 0; i < results; ++i) {
      const double sum = d[mfma_row(size, lane, i) * size + lane % size];
      if (whole) {
        static_cast<u32*>(out)[i] = static_cast<u32>(static_cast<i64>(sum));  // modulo 2^32
      } else {
        static_cast<float*>(out)[i] = rounded(sum);
      }
    }
  }
}

void mfma(Number left, Number right, u32 size, u32 values, const void* a, const void* b, void* d, int modifiers,
          int line) {
  require_warp_of(64, "this matrix instruction", line);
  if (modifiers != 0) {
    fail(Fault::trap, line, "the emulator has no model of a matrix instruction with cbsz, abid or blgp; give zeros");
  }
  MfmaLane lane{left, right, size, values, a, b, d};
  warp_collect(~u64{0}, &lane, multiply_wave, line);
}

// --- WMMA: of A and B lanes `place` and `place` + 16 have row or column `place`: all 16 elements each on gfx11, which the
// instruction asks for, and 8 on gfx12, the lower lane those of lower depth. Of D both have column `place`: on gfx11 the
// lower one the even rows, on gfx12 the first 8.

struct WmmaLane {
  Number left;
  Number right;
  bool halved;
  const void* a;
  const void* b;
  void* d;
};

static u32 bytes_of(Number number) { return of_8_bits(number) ? 1 : 2; }

static void multiply_short_wave(void** slots, u64 lanes) {
  Warp& warp = require_whole_warp(lanes, "WMMA");
  const WmmaLane& first = *static_cast<WmmaLane*>(slots[0]);
  const bool whole = is_whole(first.left), halved = first.halved;
  const u32 values = halved ? 8 : 16;
  float a[16 * 16], b[16 * 16];
  double d[16 * 16];
  const auto row_of = [halved](u32 lane, u32 i) { return halved ? lane / 16 * 8 + i : 2 * i + lane / 16; };
  for (u32 lane = 0; lane < 32; ++lane) {
    const WmmaLane& mine = *static_cast<WmmaLane*>(slots[lane]);
    if (mine.left != first.left || mine.right != first.right || mine.halved != halved) {
      fail_for(fiber_of(warp, lane), 0, Fault::divergent_warp, "lane %u executes another WMMA than lane 0", lane);
    }
    const u32 place = lane % 16;
    if (!halved && lane >= 16) {
      const WmmaLane& twin = *static_cast<WmmaLane*>(slots[place]);
      if (std::memcmp(mine.a, twin.a, 16 * bytes_of(mine.left)) || std::memcmp(mine.b, twin.b, 16 * bytes_of(mine.right))) {
        fail_for(fiber_of(warp, lane), 0, Fault::trap,
                 "lanes %u and %u have one row of WMMA's factors, and other numbers of it: gfx11 wants them alike", place,
                 lane);
      }
    }
    for (u32 i = 0; i < values; ++i) {
      const u32 depth = halved ? lane / 16 * 8 + i : i;
      a[place * 16 + depth] = value_at(first.left, mine.a, i);
      b[depth * 16 + place] = value_at(first.right, mine.b, i);
    }
    for (u32 i = 0; i < 8; ++i) {
      const double held = whole ? double{static_cast<const int*>(mine.d)[i]} : static_cast<const float*>(mine.d)[i];
      d[row_of(lane, i) * 16 + place] = held;
    }
  }
  multiply_add(d, a, b, 16, 16, 16);
  for (u32 lane = 0; lane < 32; ++lane) {
    void* out = static_cast<WmmaLane*>(slots[lane])->d;
    for (u32 i = 0; i < 8; ++i) {
      const double sum = d[row_of(lane, i) * 16 + lane % 16];
      if (whole) {
        static_cast<u32*>(out)[i] = static_cast<u32>(static_cast<i64>(sum));  // modulo 2^32
      } else {
        static_cast<float*>(out)[i] = rounded(sum);
      }
    }
  }
}

void wmma(Number left, Number right, bool halved, const void* a, const void* b, void* d, int line) {
  require_warp_of(32, "WMMA", line);
  WmmaLane lane{left, right, halved, a, b, d};
  warp_collect(0xffffffffu, &lane, multiply_short_wave, line);
}

// --- ldmatrix and stmatrix: lane 8 m + r gives the address of row r of matrix m

struct RowsLane {
  u32 count;
  bool transposed;
  u64 address;
  u32* fragments;
  const void* site;
};

// The lanes that receive a part of the row are those that read it.
static void check_row(Warp& warp, const char* row, u32 r, bool transposed, const void* site) {
  for (u32 i = 0; i < (transposed ? 8 : 4); ++i) {
    ActingAs lane(fiber_of(warp, transposed ? 4 * i + r / 2 : 4 * r + i));
    checker_read(row, 16, site);
  }
}

static void load_lanes(void** slots, u64 lanes) {
  Warp& warp = require_whole_warp(lanes, "ldmatrix");
  const RowsLane first = *static_cast<RowsLane*>(slots[0]);
  for (u32 matrix = 0; matrix < first.count; ++matrix) {
    u16 values[8][8];
    for (u32 r = 0; r < 8; ++r) {
      const u32 lane = 8 * matrix + r;
      const RowsLane& giver = *static_cast<RowsLane*>(slots[lane]);
      ActingAs acting(fiber_of(warp, lane));
      if (giver.address % 16) {
        fail_at(Fault::misaligned, giver.site, 0, "ldmatrix of a row at %#llx, which is no multiple of 16",
                giver.address);
      }
      const char* row = from_shared_window(giver.address, giver.site);
      check_row(warp, row, r, first.transposed, giver.site);
      std::memcpy(values[r], row, 16);
    }
    for (u32 lane = 0; lane < 32; ++lane) {
      const u32 r = lane / 4, c = lane % 4 * 2;
      const u16 low = first.transposed ? values[c][r] : values[r][c];
      const u16 high = first.transposed ? values[c + 1][r] : values[r][c + 1];
      static_cast<RowsLane*>(slots[lane])->fragments[matrix] = low | static_cast<u32>(high) << 16;
    }
  }
}

// A lane writes its own pair of each matrix.
static void store_lanes(void** slots, u64 lanes) {
  Warp& warp = require_whole_warp(lanes, "stmatrix");
  const RowsLane first = *static_cast<RowsLane*>(slots[0]);
  for (u32 matrix = 0; matrix < first.count; ++matrix) {
    for (u32 lane = 0; lane < 32; ++lane) {
      const u32 giving = 8 * matrix + lane / 4;
      const RowsLane& giver = *static_cast<RowsLane*>(slots[giving]);
      char* row;
      {
        ActingAs acting(fiber_of(warp, giving));
        if (giver.address % 16) {
          fail_at(Fault::misaligned, giver.site, 0, "stmatrix of a row at %#llx, which is no multiple of 16",
                  giver.address);
        }
        row = from_shared_window(giver.address, giver.site);
      }
      ActingAs acting(fiber_of(warp, lane));
      checker_write(row + lane % 4 * 4, 4, giver.site);
      std::memcpy(row + lane % 4 * 4, static_cast<RowsLane*>(slots[lane])->fragments + matrix, 4);
    }
  }
}

void store_matrices(u32 count, u64 address, const u32* fragments, int line) {
  require_warp_of(32, "stmatrix", line);
  RowsLane lane{count, false, address, const_cast<u32*>(fragments), __builtin_return_address(0)};
  warp_collect(0xffffffffu, &lane, store_lanes, line);
}

void load_matrices(u32 count, bool transposed, u64 address, u32* fragments, int line) {
  require_warp_of(32, "ldmatrix", line);
  RowsLane lane{count, transposed, address, fragments, __builtin_return_address(0)};
  warp_collect(0xffffffffu, &lane, load_lanes, line);
}

}  // namespace simt
