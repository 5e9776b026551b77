// cp.async and its groups; the addresses of shared memory that such instructions take; loads that hint at the caches.
#pragma once

SIMT_INLINE size_t __cvta_generic_to_shared(const void* address) { return simt::shared_window(address); }
SIMT_INLINE size_t __cvta_generic_to_global(const void* address) { return reinterpret_cast<size_t>(address); }

namespace simt {

SIMT_INLINE const void* ptx_global(u64 address) { return reinterpret_cast<const void*>(address); }

// The sizes an instruction takes; a literal of another one is refused where the kernel is compiled for a GPU.
SIMT_INLINE void ptx_cp_async_ca_shared_global(u64 to, u64 from, u32 bytes, u32 filled) {
  copy_async(to, ptx_global(from), bytes, filled);
}
SIMT_INLINE void ptx_cp_async_ca_shared_global(u64 to, u64 from, u32 bytes) {
  copy_async(to, ptx_global(from), bytes, bytes);
}
#define SIMT_PTX_COPY(name)                                 \
  template <class... Sizes>                                 \
  SIMT_INLINE void name(u64 to, u64 from, Sizes... sizes) { \
    ptx_cp_async_ca_shared_global(to, from, sizes...);      \
  }
SIMT_PTX_COPY(ptx_cp_async_cg_shared_global)
SIMT_PTX_COPY(ptx_cp_async_ca_shared_cta_global)
SIMT_PTX_COPY(ptx_cp_async_cg_shared_cta_global)
SIMT_PTX_COPY(ptx_cp_async_ca_shared_global_L2_64B)
SIMT_PTX_COPY(ptx_cp_async_ca_shared_global_L2_128B)
SIMT_PTX_COPY(ptx_cp_async_ca_shared_global_L2_256B)
SIMT_PTX_COPY(ptx_cp_async_cg_shared_global_L2_64B)
SIMT_PTX_COPY(ptx_cp_async_cg_shared_global_L2_128B)
SIMT_PTX_COPY(ptx_cp_async_cg_shared_global_L2_256B)

// A hint changes no value, so a policy is nothing; the load is one access of 16 bytes.
SIMT_INLINE void ptx_createpolicy_fractional_L2_evict_first_b64(u64& policy) { policy = 0; }
SIMT_INLINE void ptx_ld_global_L1_no_allocate_L2_cache_hint_v4_u32(u32& x, u32& y, u32& z, u32& w, u64 from, u64) {
  const uint4 bits = *static_cast<const uint4*>(ptx_global(from));
  x = bits.x;
  y = bits.y;
  z = bits.z;
  w = bits.w;
}
SIMT_INLINE void ptx_cp_async_cg_shared_global_L2_cache_hint(u64 to, u64 from, u32 bytes, u32 filled, u64) {
  copy_async(to, ptx_global(from), bytes, filled);
}

SIMT_INLINE void ptx_st_global_v4_u32(u64 to, u32 x, u32 y, u32 z, u32 w) {
  *reinterpret_cast<uint4*>(to) = uint4{x, y, z, w};
}

SIMT_INLINE void ptx_ld_shared_u32(u32& d, u64 from) { d = *static_cast<const u32*>(from_shared(from)); }

SIMT_INLINE void ptx_cp_async_commit_group() { commit_copies(); }
SIMT_INLINE void ptx_cp_async_wait_group(u32 allowed) { wait_copies(allowed); }
SIMT_INLINE void ptx_cp_async_wait_all() { wait_all_copies(); }

}  // namespace simt
