"""Plans of kernels that take whole rows, or no rows at all: elementwise chains and reductions."""
