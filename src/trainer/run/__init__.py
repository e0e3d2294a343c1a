"""One run: attempts, what outlives them, and how the slices work together. Start reading at trainer/train.py."""
