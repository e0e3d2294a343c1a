"""The two ways in which the slices of a run work together: one program on all of them, or worlds of their own."""
