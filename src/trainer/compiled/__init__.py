"""Reads memory, costs, communication and times from a compiled step."""
