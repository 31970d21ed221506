"""Where a model computes, which accelerate need not have be where it keeps the weights (host memory, disk)."""

import torch
from transformers import PreTrainedModel


def inputs_device(model: PreTrainedModel) -> torch.device:
    """Where the model takes token ids: where its embeddings compute, which need not be where they are kept."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):
        if (device := getattr(part, "execution_device", None)) is not None:
            return torch.device(device)
    return model.device
