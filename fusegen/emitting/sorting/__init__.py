"""The words of kernels that sort slots by their groups."""
