"""A step's batch: checked, filled up, cut into micro-batches."""
