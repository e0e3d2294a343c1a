"""What this process asks of the system and of JAX's runtime: signals, open files, the compilation cache, errors."""
