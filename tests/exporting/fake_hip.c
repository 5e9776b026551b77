/* A runtime of HIP's that is none: as fake_cuda.c, of AMD's calls. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  const char *image;
  char entry[256];
} function;

typedef int (*launched)(const char *image, const char *entry, const unsigned *grid, unsigned threads, unsigned shared,
                        int dependent, void **arguments);

static launched on_launch;
static char arch[64];

void fake_set(launched function, const char *its_arch) {
  on_launch = function;
  strncpy(arch, its_arch, sizeof arch - 1);
}

const char *hipGetErrorName(int status) { return status == 209 ? "hipErrorNoBinaryForGpu" : "hipError"; }
int hipGetDevice(int *device) { return *device = 0; }
int hipDeviceGetAttribute(int *value, int which, int device) { return *value = which == 63 ? 304 : 0, device; }
int hipModuleLoadData(void **module, const void *image) {
  if (strncmp(image, arch, strlen(arch)) || ((const char *)image)[strlen(arch)] != ' ') return 209;
  return *module = (void *)image, 0;
}
int hipModuleGetFunction(void **found, void *module, const char *entry) {
  function *made = calloc(1, sizeof *made);
  made->image = module;
  strncpy(made->entry, entry, sizeof made->entry - 1);
  return *found = made, 0;
}
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *found, int threads, size_t shared) {
  return (void)found, (void)threads, (void)shared, *blocks = 2, 0;
}
int hipModuleLaunchKernel(void *found, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                          unsigned threads_z, unsigned shared, void *stream, void **arguments, void **extra) {
  const function *own = found;
  const unsigned grid[] = {x, y, z};
  (void)stream;
  if (extra || threads_y != 1 || threads_z != 1) return 1;
  return on_launch(own->image, own->entry, grid, threads, shared, 0, arguments);
}
