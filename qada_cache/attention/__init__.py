"""Who attends to what: the function that transformers calls, and what becomes of a call."""
