"""Settings every test runs under."""

import os

import torch

# Triton decides when it decorates a kernel: on the CPU its interpreter runs them. `make gpu` compiles them instead.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Tensors here are tiny: more threads only wait for each other, and badly so on a busy machine.
torch.set_num_threads(1)
