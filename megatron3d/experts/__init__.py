"""Mixture of experts: router, dispatch to the ranks of the experts, rows, grouped matmul."""
