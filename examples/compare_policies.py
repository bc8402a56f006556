"""Compare tree policies: `python examples/compare_policies.py [MODEL]` prints a table.

All policies generate the same image, bit for bit.
"""

import sys

from rich.console import Console
from rich.table import Table

from underdraw import Pipeline

POLICIES = ("none", "chain:depth=4", "static:shape=mc_sim_7b_63", "confidence:nodes=16", "adjacency:init=both,nodes=24")

pipe = Pipeline.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "tiny")
table = Table("tree", "seconds", "passes", "tokens per pass", "mean depth", "mean nodes")
images = set()
for policy in POLICIES:
    pipe.tree = policy
    out = pipe("a fox, 3D render, on a sky blue background", seed=2)
    stats = out.stats
    means = (stats.tokens_per_pass, stats.mean_depth, stats.mean_nodes)
    table.add_row(policy, f"{stats.seconds:.2f}", str(stats.passes), *(f"{mean:.2f}" for mean in means))
    images.add(out.images[0].tobytes())
Console().print(table)
print(f"{len(POLICIES)} policies, {len(images)} image")
