"""Attention of served layers: the function that transformers calls, and the computation of each call."""
