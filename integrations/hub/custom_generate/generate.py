"""Loaded by transformers: `model.generate(**inputs, custom_generate="OWNER/underdraw", trust_remote_code=True)`."""

from underdraw.integrations.generate_inputs import check_raw_arguments
from underdraw.integrations.transformers import custom_generate


def generate(model, *args, **kwargs):
    """`model.generate` with underdraw's decoding; takes the arguments of both."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    check_raw_arguments(model.config.model_type, given)
    given.setdefault("max_new_tokens", 1)  # without effect, but transformers would refuse prompts of 20 tokens
    config_scale = getattr(given.get("generation_config"), "guidance_scale", None)
    scale = given.get("guidance_scale", config_scale)  # dropped on the way by Janus
    if scale is not None:
        given.setdefault("guidance", scale)
    if given.get("generation_mode") == "image":
        del given["generation_mode"]  # Janus' own name for what is done here; it refuses custom_generate with it
    # Of the class: `model.generate` is this function where the model's repository has this folder.
    return type(model).generate(model, *args, custom_generate=custom_generate, **given)
