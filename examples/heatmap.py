"""Where drafts are accepted: `python examples/heatmap.py [MODEL]` writes heatmap.png and prints the hardest row."""

import sys

import numpy as np

from underdraw import Pipeline

pipe = Pipeline.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "tiny")
out = pipe("a fox, 3D render, on a sky blue background", seed=2, token_stats="keep")  # entropy, top-1 too
out.heatmap().save("heatmap.png")

history = out.history  # grids of accepted, depth, width, nodes, rank, entropy and top1
entropy, accepted = history.grid("entropy"), history.grid("accepted")
row = int(np.nanargmax(entropy.mean(axis=1)))
print(f"highest entropy in row {row}: {entropy[row].mean():.2f} nats on average")
print(f"accepted tokens per pass there: {accepted[row].mean():.2f}, in the whole image: {accepted.mean():.2f}")
