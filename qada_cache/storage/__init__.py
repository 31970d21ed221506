"""Storage of a layer's tokens, and reads of it."""
