"""Arrays of a checkpoint: which host holds which part, checksums on the devices, and how parts become arrays again."""
