"""What keeps a long run alive: numbers that are not finite, exact checkpoints, checks of the input. May import
`kernels` and `trust_region`."""
