"""The words of kernels that take whole rows."""
