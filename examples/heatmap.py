"""Where drafting is easy: `python examples/heatmap.py [MODEL]` writes heatmap.png and prints the hardest row."""

import sys

import numpy as np

from underdraw import Pipeline

pipe = Pipeline.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "tiny")
out = pipe("a fox, 3D render, on a sky blue background", seed=3, token_stats="keep")  # keep: also entropy, top-1
out.heatmap().save("heatmap.png")

history = out.history  # one number per cell and column: accepted, depth, width, nodes, rank, entropy, top1
entropy, accepted = history.grid("entropy"), history.grid("accepted")
row = int(np.nanargmax(entropy.mean(axis=1)))
print(f"the model is least sure in row {row}: {entropy[row].mean():.2f} nats on average")
print(f"codes kept there: {accepted[row].mean():.2f}, in the whole picture: {accepted.mean():.2f}")
