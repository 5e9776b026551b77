// cp.async and its groups; the addresses of shared memory that such instructions take.
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

SIMT_INLINE void ptx_cp_async_commit_group() { commit_copies(); }
SIMT_INLINE void ptx_cp_async_wait_group(u32 allowed) { wait_copies(allowed); }
SIMT_INLINE void ptx_cp_async_wait_all() { wait_all_copies(); }

}  // namespace simt
