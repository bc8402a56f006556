"""Drafters: they propose the next tokens of an image as a chain or a tree."""
