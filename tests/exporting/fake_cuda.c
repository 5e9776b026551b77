/* A driver that is none: memory is the host's, and launches go to a function that the test gives. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void *stream;
  const int *attributes;
  unsigned attribute_count;
} config;

typedef struct {
  const char *image;
  char entry[256];
} function;

/* What a tensor map holds here: 128 bytes. */
typedef struct {
  uint64_t address, sizes[5], strides[4];
  int32_t type, rank, swizzle;
  uint32_t box[5];
} map;

typedef int (*launched)(const char *image, const char *entry, const unsigned *grid, unsigned threads, unsigned shared,
                        int dependent, void **arguments);

static launched on_launch;
static int major = 9, minor = 0, multiprocessors = 132, resident = 2, context = 1;
static int loads;

void fake_set(launched function, int its_major, int its_minor, int has_context) {
  on_launch = function, major = its_major, minor = its_minor, context = has_context;
}
int fake_loads(void) { return loads; }

int cuInit(unsigned flags) { return (int)flags; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuGetErrorName(int status, const char **name) { return *name = status == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR", 0; }
int cuCtxGetCurrent(void **found) { return *found = context ? &context : NULL, 0; }
int cuCtxGetDevice(int *device) { return *device = 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
  *value = which == 75 ? major : which == 76 ? minor : which == 16 ? multiprocessors : 0;
  return device;
}
int cuModuleLoadData(void **module, const void *image) { return ++loads, *module = (void *)image, 0; }
int cuModuleGetFunction(void **found, void *module, const char *entry) {
  function *made = calloc(1, sizeof *made);
  made->image = module;
  strncpy(made->entry, entry, sizeof made->entry - 1);
  return *found = made, 0;
}
int cuFuncSetAttribute(void *found, int which, int value) { return (void)found, which == 8 && value > 227 * 1024; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *found, int threads, size_t shared) {
  return (void)found, (void)threads, (void)shared, *blocks = resident, 0;
}
int cuTensorMapEncodeTiled(map *made, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
  (void)steps, (void)interleave, (void)promotion, (void)fill;
  if ((uintptr_t)made % 64 || (uintptr_t)address % 16) return 1;
  *made = (map){.address = (uint64_t)(uintptr_t)address, .type = type, .rank = (int32_t)rank, .swizzle = swizzle};
  for (uint32_t axis = 0; axis < rank; ++axis) {
    made->sizes[axis] = sizes[axis], made->box[axis] = box[axis];
    if (axis + 1 < rank) {
      if (strides[axis] % 16) return 1;
      made->strides[axis] = strides[axis];
    }
  }
  return 0;
}
int cuLaunchKernelEx(const config *how, void *found, void **arguments, void **extra) {
  const function *own = found;
  if (extra || !on_launch) return 1;
  return on_launch(own->image, own->entry, how->grid, how->block[0], how->shared_bytes, how->attribute_count > 0, arguments);
}

/* for programs that bring their own memory */
int cuDeviceGet(int *device, int place) { return *device = place; }
int cuDevicePrimaryCtxRetain(void **found, int device) { return *found = &context, device; }
int cuCtxSetCurrent(void *chosen) { return chosen == NULL; }
static struct {
  uint64_t start, end;
} allocated[64];
static int allocations;

int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
  void *made = aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (made == NULL || allocations == 64) return 2;
  *address = (unsigned long long)(uintptr_t)made;
  allocated[allocations].start = *address;
  allocated[allocations++].end = *address + bytes;
  return 0;
}
/* One past the last byte of the allocation that the address is in; the address itself where there is none. */
uint64_t fake_end(uint64_t address) {
  for (int place = 0; place < allocations; ++place)
    if (allocated[place].start <= address && address < allocated[place].end) return allocated[place].end;
  return address;
}
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes) { return memcpy((void *)(uintptr_t)to, from, bytes), 0; }
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes) { return memcpy(to, (void *)(uintptr_t)from, bytes), 0; }
int cuCtxSynchronize(void) { return 0; }
