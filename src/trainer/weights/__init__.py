"""Weights that come from elsewhere or go elsewhere: Hugging Face folders and the parameters in checkpoints of runs."""
