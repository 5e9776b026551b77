"""Programs: a chain that several kernels hold, one after another, with tensors between them."""
