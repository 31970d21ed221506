"""What settings of a cache cost on a user's own model and text, and which of them to take: `qada tune`."""
