"""Chains as operators of torch: `add_rmsnorm = fusegen.torch.op(chain, "mylib::add_rmsnorm")`."""

from fusegen.torch.operators import op

__all__ = ["op"]
