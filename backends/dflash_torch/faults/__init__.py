"""What can be wrong with how a drafter is served: made on purpose, replayed, predicted, and told from tensors."""
