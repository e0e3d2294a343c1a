"""One run: attempts and what outlives them. Start reading at trainer/train.py."""
