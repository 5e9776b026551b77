"""Chains as a library in C that needs neither Python nor fusegen at run time: sources, machine code, launcher, test.

    export([chain], ["sm_80", "sm_90a", "gfx942"], Path("out"))

What a launcher needs to know is taken from compiled kernels (`collecting`), and is written as tables in C beside the
code that reads them (`writing`, templates/export). It makes the same checks as a call from Python, and the same choice
among the variants of a kernel.
"""

from __future__ import annotations

from fusegen.exporting.making import export

__all__ = ["export"]
