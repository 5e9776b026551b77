"""What fusegen keeps on disk because it can make it again: compiled kernels, the emulator's libraries, sources.

    folders    where it lies, how much of it there may be, what a file's name says
    bounds     all files together: counted, listed, evicted, cleared
    entries    one file: named by the hash of everything that it depends on, written whole, checked when read
    libraries  entries that a compiler makes, in a process of its own

Any number of processes may share a folder, on a network file system too, because nothing relies on a lock:

- A file appears whole, under its name, by a rename; one that is damaged nevertheless is a miss, and is replaced.
- A reader takes all bytes at once and works on those, so whoever removes a file fails nobody: at worst, somebody makes
  it again.
- What is kept is run, so folders and files must belong to the user or root, and nobody else may write them: others are
  not used, after one warning.
- The cache is a help and no need: where it can't be written, everything is made anew, after one warning.

cuda.core has a cache of its own, for what NVRTC made: bytes as they are, without a checksum. Here the compiler may be
another vendor's, a kernel's resources and its verdict are kept with it, and what is read must be what was written.
"""

from fusegen.storage.bounds import Cleared, Usage, clear, make_room, survey
from fusegen.storage.entries import Damaged, Key, Store
from fusegen.storage.folders import (
    DEFAULT_BOUND,
    FOLDER_VARIABLE,
    KINDS,
    SIZE_VARIABLE,
    cache_bound,
    cache_root,
    distrusted,
    make_folder,
)

__all__ = [
    "DEFAULT_BOUND",
    "FOLDER_VARIABLE",
    "KINDS",
    "SIZE_VARIABLE",
    "Cleared",
    "Damaged",
    "Key",
    "Store",
    "Usage",
    "cache_bound",
    "cache_root",
    "clear",
    "distrusted",
    "make_folder",
    "make_room",
    "survey",
]
