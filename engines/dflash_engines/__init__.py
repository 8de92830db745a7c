"""The build pipeline: a recipe to quantised checkpoints, ONNX and engines, each with where it came from."""
