"""The batch of a step: checked, padded, and split into micro-batches."""
