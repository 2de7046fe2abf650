"""Harvests: activations of a whole data set, from the model's process straight to files."""
