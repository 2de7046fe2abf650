"""What the user points at: errors, addresses, the tree of a model's modules, Envoys and their ports."""
