"""Loaded by transformers: `model.generate(**inputs, custom_generate="OWNER/underdraw", trust_remote_code=True)`."""

from underdraw.integrations.transformers import custom_generate


def generate(model, *args, **kwargs):
    """`model.generate` with underdraw's decoding; takes the arguments of both."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    given.setdefault("max_new_tokens", 1)  # without effect, but transformers would refuse prompts of 20 tokens
    return model.generate(*args, custom_generate=custom_generate, **given)
