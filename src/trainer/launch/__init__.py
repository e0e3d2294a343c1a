"""Starts the processes of a run: on this machine, or with the launchers of others."""
