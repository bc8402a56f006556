"""Generate one image and its statistics: `python examples/generate.py [MODEL]` writes fox.png."""

import sys

from underdraw import Pipeline

pipe = Pipeline.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "tiny")
request = pipe.request("a fox, 3D render, on a sky blue background", seed=2)
out = pipe.generate(request)
out.save("fox.png")  # with prompt, seed and settings as PNG metadata
print(f"{out.stats.seconds:.2f} s, {out.stats.passes} passes, {out.stats.tokens_per_pass:.2f} tokens per pass")

# The same request without speculation: one token per pass, and the same image.
plain = pipe.plain().generate(request)
assert plain.images[0].tobytes() == out.images[0].tobytes()
print(f"{plain.stats.seconds:.2f} s without speculation, identical pixels")
