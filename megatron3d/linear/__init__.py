"""Linears: the one matmul, its GEMMs, its collectives, and the ways of weight gradients to main_grad."""
