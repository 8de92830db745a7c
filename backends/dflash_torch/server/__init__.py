"""The embedded engine behind an OpenAI-compatible HTTP server."""
