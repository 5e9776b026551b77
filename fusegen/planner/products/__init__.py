"""Plans of kernels with matrix products: tensor cores by mma.sync, MFMA, WMMA and wgmma."""
