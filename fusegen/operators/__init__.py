"""Chains as operators of array libraries: what torch's and JAX's have in common."""

from fusegen.operators.gradients import Gradients
from fusegen.operators.kernels import Kernels, sizes_of

__all__ = ["Gradients", "Kernels", "sizes_of"]
