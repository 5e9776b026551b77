"""Where fusegen keeps what it can make again: compiled kernels, and the emulator's libraries."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

FOLDER_VARIABLE = "FUSEGEN_CACHE_DIR"


def cache_root() -> Path:
    """The folder of all caches: the one that FUSEGEN_CACHE_DIR names, else fusegen's in the user's cache folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path(platformdirs.user_cache_dir("fusegen", appauthor=False))
