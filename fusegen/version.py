"""Which fusegen this is: its version, and the folder that it lies in."""

from __future__ import annotations

import os
from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(os.path.abspath(__file__)).parent
