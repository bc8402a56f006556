"""Tree policies: pure functions from what was accepted so far to the size of the next tree. Numpy only."""
