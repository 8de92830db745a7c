"""Proof that speculation is lossless, healthy and worth it: `verify`, `doctor`, `bench`."""
