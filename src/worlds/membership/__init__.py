"""Which processes train together, and which steps they have committed: one supervisor decides, members follow."""
