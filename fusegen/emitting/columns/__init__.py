"""The words of kernels that reduce columns."""
