"""Running kernels: arrays in, a launch, arrays out.

arrays       any library's array as one plain value
libraries    what a kernel asks of an array library
arguments    a chain's operands against the arrays of one call
devices      what runs a kernel: nvidia and amd (both on gpu), emulated
kernel       a compiled kernel as a Python callable (calls, signatures, shortcuts, guards, native, background,
             copied: its parts; called: what it shares with a program)
program      several kernels, launched one after another, as one callable
cache        compiled kernels on disk
"""

from fusegen.runtime.arrays import ArrayView, view
from fusegen.runtime.cache import KernelCache, compiled
from fusegen.runtime.calls import Prepared
from fusegen.runtime.devices import Device, Gpu, Memory
from fusegen.runtime.finding import Present, find, matching, present, target_of
from fusegen.runtime.kernel import Kernel
from fusegen.runtime.program import Program

__all__ = [
    "ArrayView",
    "Device",
    "Gpu",
    "Kernel",
    "KernelCache",
    "Memory",
    "Prepared",
    "Present",
    "Program",
    "compiled",
    "find",
    "matching",
    "present",
    "target_of",
    "view",
]
