"""ComfyUI finds `comfy_entrypoint` here when this folder is in its custom_nodes."""

from .nodes import comfy_entrypoint

__all__ = ["comfy_entrypoint"]
