"""Pages and pictures of runs: one file without a network, light and dark, and the same pictures as PNG."""
