"""The words of kernels with matrix products."""
