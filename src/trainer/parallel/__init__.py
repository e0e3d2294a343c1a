"""Where arrays lie: the mesh, how weights and gradients are divided, and whether they fit."""
