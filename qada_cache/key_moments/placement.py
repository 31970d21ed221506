"""The device a model computes on. With accelerate its weights may be kept elsewhere (host memory, disk)."""

import torch
from transformers import PreTrainedModel


def inputs_device(model: PreTrainedModel) -> torch.device:
    """The device for token ids: the embeddings compute there, and may be kept elsewhere."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):
        if (device := getattr(part, "execution_device", None)) is not None:
            return torch.device(device)
    return model.device
