"""Trains a drafter for any target, on answers that the target wrote itself."""
