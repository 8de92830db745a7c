"""Faults in how a drafter is served: made on purpose, replayed, predicted, and found in tensors."""
