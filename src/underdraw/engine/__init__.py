"""The decoding loop: passes, CUDA graphs, continuous batching, and the measured cost of passes."""
