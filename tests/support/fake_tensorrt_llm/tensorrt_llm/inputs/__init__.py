"""The fake; see the package above."""
