"""What the user writes: capturing a block, iterating over steps, saving, and the formats in which all that travels."""
