// Thread-block clusters: the built-in functions that NVRTC offers without a header.
#pragma once

SIMT_INLINE void __cluster_barrier_arrive(SIMT_LINE) { simt::cluster_arrive(true, line); }
SIMT_INLINE void __cluster_barrier_arrive_relaxed(SIMT_LINE) { simt::cluster_arrive(false, line); }
SIMT_INLINE void __cluster_barrier_wait(SIMT_LINE) { simt::cluster_wait(line); }
SIMT_INLINE unsigned __clusterRelativeBlockRank() { return simt::cluster_rank(); }
SIMT_INLINE unsigned __clusterSizeInBlocks() {
  simt::Index3 size = simt::cluster_size();
  return size.x * size.y * size.z;
}
SIMT_INLINE dim3 __clusterDim() { return simt::cluster_size(); }
SIMT_INLINE dim3 __clusterRelativeBlockIdx() {
  simt::Index3 size = simt::cluster_size();
  return dim3(blockIdx.x % size.x, blockIdx.y % size.y, blockIdx.z % size.z);
}
SIMT_INLINE dim3 __clusterIdx() {
  simt::Index3 size = simt::cluster_size();
  return dim3(blockIdx.x / size.x, blockIdx.y / size.y, blockIdx.z / size.z);
}
SIMT_INLINE dim3 __clusterGridDimInClusters() {
  simt::Index3 size = simt::cluster_size();
  return dim3(gridDim.x / size.x, gridDim.y / size.y, gridDim.z / size.z);
}
SIMT_INLINE void* __cluster_map_shared_rank(const void* address, unsigned rank) {
  return simt::map_shared_rank(address, rank);
}
SIMT_INLINE unsigned __cluster_query_shared_rank(const void* address) { return simt::shared_rank_of(address); }
