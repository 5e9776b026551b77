"""Kernels of attention, in the words of one dialect."""
