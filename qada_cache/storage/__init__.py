"""Where the tokens of a layer lie, and how they are read."""
