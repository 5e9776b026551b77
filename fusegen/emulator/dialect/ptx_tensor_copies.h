// Tensor copies: boxes of a tensor that a CUtensorMap describes. `.tile` is what a name without it means; a hint at the
// caches changes no value.
#pragma once

namespace simt {

#define SIMT_PTX_LOAD_2D(name)                                                    \
  SIMT_INLINE void name(u64 to, u64 map, u32 x, u32 y, u64 mbarrier, SIMT_LINE) { \
    const u32 place[] = {x, y};                                                   \
    tensor_load(to, map, place, 2, mbarrier, 0, line);                            \
  }
#define SIMT_PTX_LOAD_2D_HINT(name)                                                    \
  SIMT_INLINE void name(u64 to, u64 map, u32 x, u32 y, u64 mbarrier, u64, SIMT_LINE) { \
    const u32 place[] = {x, y};                                                        \
    tensor_load(to, map, place, 2, mbarrier, 0, line);                                 \
  }
#define SIMT_PTX_LOAD_2D_MULTICAST(name)                                                      \
  SIMT_INLINE void name(u64 to, u64 map, u32 x, u32 y, u64 mbarrier, u32 blocks, SIMT_LINE) { \
    const u32 place[] = {x, y};                                                               \
    tensor_load(to, map, place, 2, mbarrier, blocks, line);                                   \
  }
#define SIMT_PTX_LOAD_2D_MULTICAST_HINT(name)                                                      \
  SIMT_INLINE void name(u64 to, u64 map, u32 x, u32 y, u64 mbarrier, u32 blocks, u64, SIMT_LINE) { \
    const u32 place[] = {x, y};                                                                    \
    tensor_load(to, map, place, 2, mbarrier, blocks, line);                                        \
  }
#define SIMT_PTX_STORE_2D(name)                                       \
  SIMT_INLINE void name(u64 map, u32 x, u32 y, u64 from, SIMT_LINE) { \
    const u32 place[] = {x, y};                                       \
    tensor_store(map, place, 2, from, line);                          \
  }
#define SIMT_PTX_LOAD_3D(name)                                                           \
  SIMT_INLINE void name(u64 to, u64 map, u32 x, u32 y, u32 z, u64 mbarrier, SIMT_LINE) { \
    const u32 place[] = {x, y, z};                                                       \
    tensor_load(to, map, place, 3, mbarrier, 0, line);                                   \
  }
#define SIMT_PTX_LOAD_3D_HINT(name)                                                           \
  SIMT_INLINE void name(u64 to, u64 map, u32 x, u32 y, u32 z, u64 mbarrier, u64, SIMT_LINE) { \
    const u32 place[] = {x, y, z};                                                            \
    tensor_load(to, map, place, 3, mbarrier, 0, line);                                        \
  }
#define SIMT_PTX_LOAD_3D_MULTICAST(name)                                                             \
  SIMT_INLINE void name(u64 to, u64 map, u32 x, u32 y, u32 z, u64 mbarrier, u32 blocks, SIMT_LINE) { \
    const u32 place[] = {x, y, z};                                                                   \
    tensor_load(to, map, place, 3, mbarrier, blocks, line);                                          \
  }
#define SIMT_PTX_LOAD_3D_MULTICAST_HINT(name)                                                             \
  SIMT_INLINE void name(u64 to, u64 map, u32 x, u32 y, u32 z, u64 mbarrier, u32 blocks, u64, SIMT_LINE) { \
    const u32 place[] = {x, y, z};                                                                        \
    tensor_load(to, map, place, 3, mbarrier, blocks, line);                                               \
  }
#define SIMT_PTX_STORE_3D(name)                                              \
  SIMT_INLINE void name(u64 map, u32 x, u32 y, u32 z, u64 from, SIMT_LINE) { \
    const u32 place[] = {x, y, z};                                           \
    tensor_store(map, place, 3, from, line);                                 \
  }

SIMT_PTX_LOAD_2D(ptx_cp_async_bulk_tensor_2d_shared_cluster_global_tile_mbarrier_complete_tx_bytes)
SIMT_PTX_LOAD_2D_HINT(ptx_cp_async_bulk_tensor_2d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint)
SIMT_PTX_LOAD_2D_MULTICAST(
    ptx_cp_async_bulk_tensor_2d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_multicast_cluster)
SIMT_PTX_LOAD_2D_MULTICAST_HINT(
    ptx_cp_async_bulk_tensor_2d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_multicast_cluster_L2_cache_hint)
SIMT_PTX_LOAD_2D(ptx_cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes)
SIMT_PTX_LOAD_2D_HINT(ptx_cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint)
SIMT_PTX_LOAD_2D_MULTICAST(
    ptx_cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster)
SIMT_PTX_LOAD_2D_MULTICAST_HINT(
    ptx_cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster_L2_cache_hint)
SIMT_PTX_LOAD_2D(ptx_cp_async_bulk_tensor_2d_shared_cta_global_tile_mbarrier_complete_tx_bytes)
SIMT_PTX_LOAD_2D_HINT(ptx_cp_async_bulk_tensor_2d_shared_cta_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint)
SIMT_PTX_LOAD_2D(ptx_cp_async_bulk_tensor_2d_shared_cta_global_mbarrier_complete_tx_bytes)
SIMT_PTX_LOAD_2D_HINT(ptx_cp_async_bulk_tensor_2d_shared_cta_global_mbarrier_complete_tx_bytes_L2_cache_hint)
SIMT_PTX_STORE_2D(ptx_cp_async_bulk_tensor_2d_global_shared_cta_tile_bulk_group)
SIMT_PTX_STORE_2D(ptx_cp_async_bulk_tensor_2d_global_shared_cta_bulk_group)
SIMT_PTX_LOAD_3D(ptx_cp_async_bulk_tensor_3d_shared_cluster_global_tile_mbarrier_complete_tx_bytes)
SIMT_PTX_LOAD_3D_HINT(ptx_cp_async_bulk_tensor_3d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint)
SIMT_PTX_LOAD_3D_MULTICAST(
    ptx_cp_async_bulk_tensor_3d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_multicast_cluster)
SIMT_PTX_LOAD_3D_MULTICAST_HINT(
    ptx_cp_async_bulk_tensor_3d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_multicast_cluster_L2_cache_hint)
SIMT_PTX_LOAD_3D(ptx_cp_async_bulk_tensor_3d_shared_cluster_global_mbarrier_complete_tx_bytes)
SIMT_PTX_LOAD_3D_HINT(ptx_cp_async_bulk_tensor_3d_shared_cluster_global_mbarrier_complete_tx_bytes_L2_cache_hint)
SIMT_PTX_LOAD_3D_MULTICAST(
    ptx_cp_async_bulk_tensor_3d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster)
SIMT_PTX_LOAD_3D_MULTICAST_HINT(
    ptx_cp_async_bulk_tensor_3d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster_L2_cache_hint)
SIMT_PTX_LOAD_3D(ptx_cp_async_bulk_tensor_3d_shared_cta_global_tile_mbarrier_complete_tx_bytes)
SIMT_PTX_LOAD_3D_HINT(ptx_cp_async_bulk_tensor_3d_shared_cta_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint)
SIMT_PTX_LOAD_3D(ptx_cp_async_bulk_tensor_3d_shared_cta_global_mbarrier_complete_tx_bytes)
SIMT_PTX_LOAD_3D_HINT(ptx_cp_async_bulk_tensor_3d_shared_cta_global_mbarrier_complete_tx_bytes_L2_cache_hint)
SIMT_PTX_STORE_3D(ptx_cp_async_bulk_tensor_3d_global_shared_cta_tile_bulk_group)
SIMT_PTX_STORE_3D(ptx_cp_async_bulk_tensor_3d_global_shared_cta_bulk_group)

SIMT_INLINE void ptx_prefetch_tensormap(u64) {}

}  // namespace simt
