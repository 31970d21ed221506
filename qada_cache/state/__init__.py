"""What a cache and its layers hold beside tokens: options, counters, how far a pass has come."""
