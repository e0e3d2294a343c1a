"""The compiled program of a step: state, loss, gradients, update, and the shares of several worlds."""
