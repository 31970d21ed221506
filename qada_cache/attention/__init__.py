"""Attention of managed layers: the function that transformers calls, and the computation of each call."""
