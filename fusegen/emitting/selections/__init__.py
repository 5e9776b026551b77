"""The words of kernels that choose columns."""
