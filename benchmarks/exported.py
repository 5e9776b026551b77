"""Exports on a GPU: every shipped spec built and run by its own test in C, and the host's time of a call.

    python benchmarks/exported.py [SPEC...]

Prints for each spec whether its test passes, and for rmsnorm of 8 rows what a call takes the host, from C and from
torch. Needs an NVIDIA GPU, a C compiler and make.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fusegen.errors import FusegenError
from fusegen.exporting import export
from fusegen.language.spec import Chain
from fusegen.pipeline import choose_target
from tests.specs import FEW, SHIPPED

CALLS = 20000
TIMED = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>
#include "timed.h"

int main(void) {
  int (*init)(unsigned), (*retain)(void **, int), (*use)(void *), (*wait)(void);
  int (*allocate)(unsigned long long *, size_t);
  void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
  *(void **)&init = dlsym(driver, "cuInit");
  *(void **)&retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
  *(void **)&use = dlsym(driver, "cuCtxSetCurrent");
  *(void **)&allocate = dlsym(driver, "cuMemAlloc_v2");
  *(void **)&wait = dlsym(driver, "cuCtxSynchronize");
  unsigned long long room;
  if (init(0) || retain(&context, 0) || use(context) || allocate(&room, 1 << 20)) return 2;
  int64_t sizes[] = {8, 4096};
  fusegen_array x = {(void *)(uintptr_t)room, FUSEGEN_BF16, 2, sizes, NULL}, out = x;
  fusegen_array gain = {(void *)(uintptr_t)(room + (1 << 19)), FUSEGEN_BF16, 1, sizes + 1, NULL};
  out.data = (void *)(uintptr_t)(room + (1 << 18));
  struct timespec start, end;
  for (int turn = 0; turn < 5; ++turn) {
    wait();
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int call = 0; call < COUNT; ++call)
      if (rmsnorm(&x, &gain, &out, NULL)) return puts(fusegen_message()), 1;
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("%.3f ", ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / COUNT / 1e3);
    wait();
  }
  return 0;
}
"""


def small(chain: Chain) -> Chain:
    """At sizes that take seconds: products of 256s, programs as in tests."""
    if chain.name in FEW:
        return chain.at(**FEW[chain.name])
    if chain.graph.products:
        return chain.at(**{name: min(s, 256) if s % 256 == 0 else s for name, s in chain.graph.sizes.items()})
    return chain


def tested(chain: Chain, folder: Path) -> str:
    """Exported, built and run."""
    started = time.perf_counter()
    try:
        made = export([chain], [choose_target(None)], folder / chain.name, validate=False)
    except FusegenError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    done = subprocess.run(["make", "-s", "-C", str(made.folder), "test"], capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip().splitlines() or ["no recorded launch"]
    notes = f"; {len(made.notes)} layouts without a kernel" if made.notes else ""
    verdict = "right" if done.returncode == 0 else f"WRONG, status {done.returncode}"
    return f"{verdict}, {time.perf_counter() - started:.1f} s: {said[-1]}{notes}"


def timed(folder: Path) -> None:
    import torch

    import fusegen

    export([SHIPPED["rmsnorm"]], [choose_target(None)], folder / "timed", validate=False, test=False)
    (folder / "timed.c").write_text(TIMED.replace("COUNT", str(CALLS)), encoding="utf-8")
    subprocess.run(["make", "-s", "-C", str(folder / "timed")], check=True)
    library = folder / "timed" / "build" / "cuda" / "libtimed.a"
    words = ["cc", "-O2", f"-I{folder}/timed/include", f"{folder}/timed.c", str(library), "-ldl", "-lpthread"]
    subprocess.run([*words, "-o", str(folder / "timed.out")], check=True)
    print(f"host time of a call, us, from C: {subprocess.check_output([str(folder / 'timed.out')], text=True)}")
    kernel = fusegen.compile(SHIPPED["rmsnorm"], validate=False)
    x, gain = torch.zeros(8, 4096, device="cuda").bfloat16(), torch.zeros(4096, device="cuda").bfloat16()
    out = torch.empty_like(x)
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            kernel(x, gain, out=out)
        found.append((time.perf_counter() - start) / CALLS * 1e6)
        torch.cuda.synchronize()
    print(f"host time of a call, us, from torch with out=: {' '.join(f'{us:.3f}' for us in found)}")


def main() -> int:
    names = sys.argv[1:] or list(SHIPPED)
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timed(folder)
        for chain in (small(SHIPPED[name]) for name in names):
            said = tested(chain, folder)
            wrong += not said.startswith("right")
            print(f"{chain.name:30} {said}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
