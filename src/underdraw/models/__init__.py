"""Model families: how each kind of published checkpoint is recognised, downloaded and loaded."""
