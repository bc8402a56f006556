"""underdraw: exact tree-speculative decoding for autoregressive image models."""

__version__ = "0.1.0"
