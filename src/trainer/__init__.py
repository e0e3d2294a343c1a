"""Elastic, fault-tolerant pre-training of Qwen3 and Llama in JAX."""
