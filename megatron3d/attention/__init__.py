"""Attention: heads, pairs of rows and their kernels, packed documents, RoPE, latents, KV cache, context."""
