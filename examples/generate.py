"""One picture, and what it cost: `python examples/generate.py [MODEL]` writes fox.png."""

import sys

from underdraw import Pipeline

pipe = Pipeline.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "tiny")
out = pipe("a fox, 3D render, on a sky blue background", seed=3)
out.images[0].save("fox.png")
print(f"{out.stats.seconds:.2f} s, {out.stats.passes} passes, {out.stats.tokens_per_pass:.2f} tokens per pass")

# The same seed without speculation: one token a pass, and the very same picture.
plain = pipe.plain()("a fox, 3D render, on a sky blue background", seed=3)
assert plain.images[0].tobytes() == out.images[0].tobytes()
print(f"{plain.stats.seconds:.2f} s without speculation, identical pixels")
