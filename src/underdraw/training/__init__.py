"""Trains drafters for any model. `trainer.Trainer` is the loop that the recipes of checkpoints use as well."""
