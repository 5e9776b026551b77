// moe_routing_ends  i32[K_times_T] -> i32[E], i32[K_times_T], i32[K_times_T]  at K_times_T=256 E=64
// ends, order, places of moe_routing.
//
// target   hip gfx942, facts of mi300x: warp 64, 304 SMs, 5.3 TB/s
// views    experts_part is experts as [K * T]
// tile     counting sort of 256 slots by 64 groups in one block of 4 warps, 64 slots each
// traffic  3328 B moved, 3328 B ideal, 3328 B unfused in 1 launch
// floor    0.0 us at 5.3 TB/s; instruction-bound at 0.00 flop/B
// needs    rows of 256 elements, next to each other

constexpr int groups = 64;
constexpr int no_group = groups;  // of a slot whose id is none of theirs
constexpr int no_slot = groups + 1;  // of a lane without one
constexpr int threads = 256;
constexpr int warps = 4;

// one bit a lane, the lowest for the first
typedef unsigned long long Lanes;

// the lanes of the warp that say so
__device__ __forceinline__ Lanes vote(bool says) {
  return __ballot(says);
}

__device__ __forceinline__ int count(Lanes lanes) {
  return __popcll(lanes);
}

// the lanes of the warp whose slots are of this lane's group: those whose numbers have the same bits
__device__ __forceinline__ Lanes of_same(int group) {
  Lanes same = ~Lanes(0);
  #pragma unroll
  for (int bit = 0; bit < 7; ++bit) {
    const bool set = group & 1 << bit;
    const Lanes says = vote(set);
    same &= set ? says : ~says;
  }
  return same;
}

// v of the lane so many before this one
__device__ __forceinline__ int from_before(int v, int step) {
  return __shfl_up(v, step);
}

__device__ __forceinline__ int group_of(const int* experts_part_ptr, int slot) {
  const int id = experts_part_ptr[slot];
  return 0 <= id && id < groups ? id : no_group;
}

extern "C" __global__ void __launch_bounds__(256)
moe_routing_ends(
    const int* __restrict__ experts_part_ptr,
    int* __restrict__ ends_ptr,
    int* __restrict__ order_ptr,
    int* __restrict__ places_ptr)
{
  extern __shared__ __align__(16) unsigned char shared[];
  // of each warp: first how many of its slots are of each group, then where the next of them goes, from the group's begin
  int (*const counted)[groups + 1] = reinterpret_cast<int (*)[groups + 1]>(shared);
  int* const begin = counted[warps];
  const int lane = threadIdx.x % 64;
  const int warp = threadIdx.x / 64;
  const Lanes lanes_below = (Lanes(1) << lane) - 1;
  const int slot = threadIdx.x;

  for (int at = threadIdx.x; at < warps * (groups + 1); at += threads) (&counted[0][0])[at] = 0;
  __syncthreads();

  // pass 1: each warp counts its own slots of each group; the first lane of those with one group adds for all of them
  const int named = group_of(experts_part_ptr, slot);
  const Lanes same = of_same(named);
  if (named != no_slot && (same & lanes_below) == 0) counted[warp][named] += count(same);
  __syncthreads();

  // of each group, the slots of the warps before
  for (int group = threadIdx.x; group <= groups; group += threads) {
    int total = 0;
    #pragma unroll 4
    for (int w = 0; w < warps; ++w) {
      const int own = counted[w][group];
      counted[w][group] = total;
      total += own;
    }
    begin[group] = total;
  }
  __syncthreads();

  // where each group begins, and behind which slot it ends: the first warp adds up the groups before it
  if (warp == 0) {
    int before = 0;
    for (int first = 0; first <= groups; first += 64) {
      const int group = first + lane;
      const int own = group <= groups ? begin[group] : 0;
      int sum = own;
      #pragma unroll
      for (int step = 1; step < 64; step *= 2) {
        const int other = from_before(sum, step);
        if (lane >= step) sum += other;
      }
      if (group <= groups) begin[group] = before + sum - own;
      if (group < groups) ends_ptr[group] = before + sum;
      before += __shfl(sum, 63, 64);
    }
  }
  __syncthreads();

  // pass 2: a slot's place is behind those of its group in warps before, in turns before, and in lanes before
  if (named != no_slot) {
    const int place = begin[named] + counted[warp][named] + count(same & lanes_below);
    places_ptr[slot] = place;
    order_ptr[place] = slot;
  }
}
