"""Tree policies: pure functions from a `History` to the `TreePlan` of the next pass. No torch."""
