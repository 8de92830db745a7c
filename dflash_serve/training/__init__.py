"""Training a drafter for any target, on answers the target wrote itself."""
