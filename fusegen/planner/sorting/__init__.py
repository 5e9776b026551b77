"""Plans of kernels that sort slots by the group that each of them names."""
