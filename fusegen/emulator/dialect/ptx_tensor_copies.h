// Tensor copies: boxes of a tensor that a CUtensorMap describes. `.tile` is what a name without it means; a hint at the
// caches changes no value. ptx.py makes a template's argument of the axes in a name, and gives the line first.
#pragma once

namespace simt {

// Behind the map come the coordinates, the mbarrier, the blocks of a multicast, and the policy of a hint. `pair`: the
// mbarrier may be the other block's of a pair (.cta_group::2).
#define SIMT_PTX_TENSOR_LOAD(name, multicast, hints) SIMT_PTX_TENSOR_LOAD_OF(name, multicast, hints, false)
#define SIMT_PTX_TENSOR_LOAD_OF(name, multicast, hints, pair)                                                  \
  template <u32 Axes, class... Operands>                                                                       \
  SIMT_INLINE void name(int line, u64 to, u64 map, Operands... operands) {                                     \
    static_assert(sizeof...(Operands) == Axes + 1 + multicast + hints,                                         \
                  "a tensor copy wants as many coordinates as its name says, and an mbarrier");                \
    const u64 all[] = {static_cast<u64>(operands)...};                                                         \
    tensor_load(to, map, all, Axes, all[Axes], multicast ? static_cast<u32>(all[Axes + multicast]) : 0, pair,  \
                line);                                                                                         \
  }
#define SIMT_PTX_TENSOR_STORE(name, hints)                                            \
  template <u32 Axes, class... Operands>                                              \
  SIMT_INLINE void name(int line, u64 map, Operands... operands) {                    \
    static_assert(sizeof...(Operands) == Axes + 1 + hints,                            \
                  "a tensor copy wants as many coordinates as its name says");        \
    const u64 all[] = {static_cast<u64>(operands)...};                                \
    tensor_store(map, all, Axes, all[Axes], line);                                    \
  }
SIMT_PTX_TENSOR_LOAD(ptx_cp_async_bulk_tensor_Nd_shared_cluster_global_tile_mbarrier_complete_tx_bytes, false, 0)
SIMT_PTX_TENSOR_LOAD(ptx_cp_async_bulk_tensor_Nd_shared_cluster_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint,
                     false, 1)
SIMT_PTX_TENSOR_LOAD(
    ptx_cp_async_bulk_tensor_Nd_shared_cluster_global_tile_mbarrier_complete_tx_bytes_multicast_cluster, true, 0)
SIMT_PTX_TENSOR_LOAD(
    ptx_cp_async_bulk_tensor_Nd_shared_cluster_global_tile_mbarrier_complete_tx_bytes_multicast_cluster_L2_cache_hint,
    true, 1)
SIMT_PTX_TENSOR_LOAD(ptx_cp_async_bulk_tensor_Nd_shared_cluster_global_mbarrier_complete_tx_bytes, false, 0)
SIMT_PTX_TENSOR_LOAD(ptx_cp_async_bulk_tensor_Nd_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint, false,
                     1)
SIMT_PTX_TENSOR_LOAD(ptx_cp_async_bulk_tensor_Nd_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster,
                     true, 0)
SIMT_PTX_TENSOR_LOAD(
    ptx_cp_async_bulk_tensor_Nd_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster_L2_cache_hint, true,
    1)
SIMT_PTX_TENSOR_LOAD(ptx_cp_async_bulk_tensor_Nd_shared_cta_global_tile_mbarrier_complete_tx_bytes, false, 0)
SIMT_PTX_TENSOR_LOAD(ptx_cp_async_bulk_tensor_Nd_shared_cta_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint, false,
                     1)
SIMT_PTX_TENSOR_LOAD(ptx_cp_async_bulk_tensor_Nd_shared_cta_global_mbarrier_complete_tx_bytes, false, 0)
SIMT_PTX_TENSOR_LOAD(ptx_cp_async_bulk_tensor_Nd_shared_cta_global_mbarrier_complete_tx_bytes_L2_cache_hint, false, 1)
SIMT_PTX_TENSOR_LOAD_OF(ptx_cp_async_bulk_tensor_Nd_shared_cluster_global_mbarrier_complete_tx_bytes_cta_group_2, false,
                        0, true)
SIMT_PTX_TENSOR_LOAD_OF(ptx_cp_async_bulk_tensor_Nd_shared_cluster_global_tile_mbarrier_complete_tx_bytes_cta_group_2,
                        false, 0, true)
SIMT_PTX_TENSOR_STORE(ptx_cp_async_bulk_tensor_Nd_global_shared_cta_tile_bulk_group, 0)
SIMT_PTX_TENSOR_STORE(ptx_cp_async_bulk_tensor_Nd_global_shared_cta_tile_bulk_group_L2_cache_hint, 1)
SIMT_PTX_TENSOR_STORE(ptx_cp_async_bulk_tensor_Nd_global_shared_cta_bulk_group, 0)
SIMT_PTX_TENSOR_STORE(ptx_cp_async_bulk_tensor_Nd_global_shared_cta_bulk_group_L2_cache_hint, 1)

SIMT_INLINE void ptx_prefetch_tensormap(u64) {}

}  // namespace simt
