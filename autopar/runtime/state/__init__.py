"""Parameters, gradients and optimizers of a rank."""
