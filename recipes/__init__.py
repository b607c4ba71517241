"""The reproducible runs: models, data, the task they train, and one page for each recipe with its numbers."""
