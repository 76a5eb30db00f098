"""How long a training step takes, before it runs: rooflines of kernels, links of a network, a simulated pipeline."""
