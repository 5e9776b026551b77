"""Chains as operators of array libraries: what torch's and JAX's have in common."""

from fusegen.operators.gradients import Gradients, chain_of_gradients
from fusegen.operators.kernels import Kernels, sizes_of

__all__ = ["Gradients", "Kernels", "chain_of_gradients", "sizes_of"]
