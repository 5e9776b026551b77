"""Plans of kernels that choose columns of each row: top-k and argmax."""
