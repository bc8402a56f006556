"""Ways in from other libraries: transformers, diffusers, ComfyUI."""
