"""Plans of kernels that reduce columns: over the axes of rows."""
