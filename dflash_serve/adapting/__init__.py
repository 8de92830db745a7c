"""A drafter fitted to one's own traffic: logs to prompts, training from the served drafter, and a gate."""
