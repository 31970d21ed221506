"""Devices on which a CUDA graph replays decode steps. It ends when a tensor that it reads is replaced by another."""

REPLAYING = ("cuda",)
