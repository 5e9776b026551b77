"""Chains as operators of JAX: `add_rmsnorm = fusegen.jax.op(chain, backward)`."""

from fusegen.jax.operators import op

__all__ = ["op"]
