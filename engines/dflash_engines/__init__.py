"""The build pipeline: a recipe to quantised checkpoints, each with where it came from."""
