"""Elastic, fault-tolerant pre-training of Qwen3 and Llama in JAX."""

__version__ = "0.1.0"
