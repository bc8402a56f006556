"""Triton kernels and their launchers on tensors. Importing one of these modules needs triton."""
