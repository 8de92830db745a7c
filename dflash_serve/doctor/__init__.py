"""Explains low acceptance: compares predictions of every known fault with observations."""
