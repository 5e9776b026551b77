// mbarriers, bulk copies, and the fences between them. What waits takes the line of its statement.
//
// A form for shared::cluster takes addresses of other blocks (mapa); one for shared::cta those of its own. A fence of
// the asynchronous proxy counts where shared memory is read after it, and it or fence.mbarrier_init where a copy is
// counted by an mbarrier; see runtime/checker_copies.cpp.
#pragma once

namespace simt {

SIMT_INLINE void ptx_mbarrier_init_shared_cta_b64(u64 address, u32 count, SIMT_LINE) {
  mbarrier_init(address, count, line);
}
SIMT_INLINE void ptx_mbarrier_init_shared_b64(u64 address, u32 count, SIMT_LINE) {
  mbarrier_init(address, count, line);
}
SIMT_INLINE void ptx_mbarrier_inval_shared_cta_b64(u64 address, SIMT_LINE) { mbarrier_invalidate(address, line); }
SIMT_INLINE void ptx_mbarrier_inval_shared_b64(u64 address, SIMT_LINE) { mbarrier_invalidate(address, line); }

// The state goes to a register or nowhere.
SIMT_INLINE void ptx_keep(u64& state, u64 value) { state = value; }
SIMT_INLINE void ptx_keep(PtxNothing, u64) {}

#define SIMT_PTX_ARRIVE(name)                                               \
  template <class State>                                                    \
  SIMT_INLINE void name(State&& state, u64 address, SIMT_LINE) {            \
    ptx_keep(state, mbarrier_arrive(address, 1, 0, line));                  \
  }                                                                         \
  template <class State>                                                    \
  SIMT_INLINE void name(State&& state, u64 address, u32 count, SIMT_LINE) { \
    ptx_keep(state, mbarrier_arrive(address, count, 0, line));              \
  }
#define SIMT_PTX_ARRIVE_EXPECT(name)                                        \
  template <class State>                                                    \
  SIMT_INLINE void name(State&& state, u64 address, u32 bytes, SIMT_LINE) { \
    ptx_keep(state, mbarrier_arrive(address, 1, bytes, line));              \
  }
#define SIMT_PTX_EXPECT(name) \
  SIMT_INLINE void name(u64 address, u32 bytes, SIMT_LINE) { mbarrier_expect(address, bytes, line); }
#define SIMT_PTX_WAIT(name, function)                                               \
  template <class Parity>                                                           \
  SIMT_INLINE void name(bool& done, u64 address, Parity parity, SIMT_LINE) {        \
    done = function(address, static_cast<u32>(parity), line);                       \
  }                                                                                 \
  template <class Parity, class Limit>                                              \
  SIMT_INLINE void name(bool& done, u64 address, Parity parity, Limit, SIMT_LINE) { \
    done = function(address, static_cast<u32>(parity), line);                       \
  }

SIMT_PTX_ARRIVE(ptx_mbarrier_arrive_shared_b64)
SIMT_PTX_ARRIVE(ptx_mbarrier_arrive_shared_cta_b64)
SIMT_PTX_ARRIVE(ptx_mbarrier_arrive_release_cta_shared_cta_b64)
SIMT_PTX_ARRIVE(ptx_mbarrier_arrive_shared_cluster_b64)
SIMT_PTX_ARRIVE(ptx_mbarrier_arrive_release_cluster_shared_cluster_b64)
SIMT_PTX_ARRIVE_EXPECT(ptx_mbarrier_arrive_expect_tx_shared_b64)
SIMT_PTX_ARRIVE_EXPECT(ptx_mbarrier_arrive_expect_tx_shared_cta_b64)
SIMT_PTX_ARRIVE_EXPECT(ptx_mbarrier_arrive_expect_tx_release_cta_shared_cta_b64)
SIMT_PTX_ARRIVE_EXPECT(ptx_mbarrier_arrive_expect_tx_shared_cluster_b64)
SIMT_PTX_ARRIVE_EXPECT(ptx_mbarrier_arrive_expect_tx_release_cluster_shared_cluster_b64)
SIMT_PTX_EXPECT(ptx_mbarrier_expect_tx_relaxed_cta_shared_cta_b64)
SIMT_PTX_EXPECT(ptx_mbarrier_expect_tx_relaxed_cluster_shared_cluster_b64)
SIMT_PTX_WAIT(ptx_mbarrier_try_wait_parity_shared_b64, mbarrier_wait)
SIMT_PTX_WAIT(ptx_mbarrier_try_wait_parity_shared_cta_b64, mbarrier_wait)
SIMT_PTX_WAIT(ptx_mbarrier_try_wait_parity_acquire_cta_shared_cta_b64, mbarrier_wait)
SIMT_PTX_WAIT(ptx_mbarrier_try_wait_parity_acquire_cluster_shared_cta_b64, mbarrier_wait)
SIMT_PTX_WAIT(ptx_mbarrier_test_wait_parity_shared_b64, mbarrier_test)
SIMT_PTX_WAIT(ptx_mbarrier_test_wait_parity_shared_cta_b64, mbarrier_test)
SIMT_PTX_WAIT(ptx_mbarrier_test_wait_parity_acquire_cta_shared_cta_b64, mbarrier_test)
SIMT_PTX_WAIT(ptx_mbarrier_test_wait_parity_acquire_cluster_shared_cta_b64, mbarrier_test)

SIMT_INLINE void ptx_fence_mbarrier_init_release_cluster() { fence_mbarriers(); }
SIMT_INLINE void ptx_fence_proxy_async() { fence_proxy(); }
SIMT_INLINE void ptx_fence_proxy_async_shared_cta() { fence_proxy(); }
SIMT_INLINE void ptx_fence_proxy_async_global() {}

SIMT_INLINE void ptx_cp_async_mbarrier_arrive_noinc_shared_b64(u64 address, SIMT_LINE) {
  arrive_with_copies(address, line);
}
SIMT_INLINE void ptx_cp_async_mbarrier_arrive_noinc_shared_cta_b64(u64 address, SIMT_LINE) {
  arrive_with_copies(address, line);
}

// --- bulk copies
#define SIMT_PTX_BULK_LOAD(name)                                                \
  SIMT_INLINE void name(u64 to, u64 from, u32 bytes, u64 mbarrier, SIMT_LINE) { \
    bulk_load(to, ptx_global(from), bytes, mbarrier, line);                     \
  }
SIMT_PTX_BULK_LOAD(ptx_cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes)
SIMT_PTX_BULK_LOAD(ptx_cp_async_bulk_shared_cta_global_mbarrier_complete_tx_bytes)
SIMT_INLINE void ptx_cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    u64 to, u64 from, u32 bytes, u64 mbarrier, u32 blocks, SIMT_LINE) {
  for (u32 rank = 0; blocks >> rank; ++rank) {
    if (blocks >> rank & 1) {
      bulk_load(map_window_rank(to, rank), ptx_global(from), bytes, map_window_rank(mbarrier, rank), line);
    }
  }
}
SIMT_INLINE void ptx_cp_async_bulk_global_shared_cta_bulk_group(u64 to, u64 from, u32 bytes, SIMT_LINE) {
  bulk_store(reinterpret_cast<void*>(to), from, bytes, line);
}
SIMT_INLINE void ptx_cp_async_bulk_prefetch_L2_global(u64 from, u32 bytes, SIMT_LINE) {
  bulk_prefetch(ptx_global(from), bytes, line);
}
SIMT_INLINE void ptx_cp_async_bulk_commit_group() { commit_bulk_stores(); }
SIMT_INLINE void ptx_cp_async_bulk_wait_group(u32 allowed) { wait_bulk_stores(allowed, false); }
SIMT_INLINE void ptx_cp_async_bulk_wait_group_read(u32 allowed) { wait_bulk_stores(allowed, true); }

// --- clusters
SIMT_INLINE void ptx_mapa_shared_cluster_u32(u32& d, u32 address, u32 rank) {
  d = static_cast<u32>(map_window_rank(address, rank));
}
#define SIMT_PTX_CLUSTER(name, call) \
  SIMT_INLINE void name(SIMT_LINE) { call; }
SIMT_PTX_CLUSTER(ptx_barrier_cluster_arrive, cluster_arrive(true, line))
SIMT_PTX_CLUSTER(ptx_barrier_cluster_arrive_aligned, cluster_arrive(true, line))
SIMT_PTX_CLUSTER(ptx_barrier_cluster_arrive_release, cluster_arrive(true, line))
SIMT_PTX_CLUSTER(ptx_barrier_cluster_arrive_release_aligned, cluster_arrive(true, line))
SIMT_PTX_CLUSTER(ptx_barrier_cluster_arrive_relaxed, cluster_arrive(false, line))
SIMT_PTX_CLUSTER(ptx_barrier_cluster_arrive_relaxed_aligned, cluster_arrive(false, line))
SIMT_PTX_CLUSTER(ptx_barrier_cluster_wait, cluster_wait(line))
SIMT_PTX_CLUSTER(ptx_barrier_cluster_wait_aligned, cluster_wait(line))
SIMT_PTX_CLUSTER(ptx_barrier_cluster_wait_acquire, cluster_wait(line))
SIMT_PTX_CLUSTER(ptx_barrier_cluster_wait_acquire_aligned, cluster_wait(line))

}  // namespace simt
