"""Drafters: whatever can guess the next tokens of an image."""
