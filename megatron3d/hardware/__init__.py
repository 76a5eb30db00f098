"""Accelerators: published peaks, attention kernels of torch, and the optional kernels of NVIDIA's apex."""
