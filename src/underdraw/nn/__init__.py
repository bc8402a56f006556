"""The decoder of every family: layers, RoPE, attention, KV cache, row-invariant GEMMs and weights on disk."""
