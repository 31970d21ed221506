"""Settings every test runs under."""

import torch

# Tensors here are tiny: more threads only wait for each other, and badly so on a busy machine.
torch.set_num_threads(1)
