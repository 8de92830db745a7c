"""Faults of serving a drafter: made on purpose, replayed, predicted, and found by comparing tensors."""
