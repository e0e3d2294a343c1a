"""Runs under Ray Train: Ray places and starts the workers, and our supervisor keeps their training together."""
