"""The transformers model inside of wrappers: `torch.compile(model)`, peft's models."""

from typing import Any

from torch._dynamo import OptimizedModule


def unwrapped(model: Any) -> Any:
    """The model that `torch.compile` or peft wrapped; anything else as it is.

    Both compute by the very model that they hold: peft puts its adapters into that one's layers.

    Raises:
        NotImplementedError: peft's prompt learning.
    """
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if hasattr(model, "get_base_model"):
        settings = model.active_peft_config
        if settings.is_prompt_learning:
            raise NotImplementedError(
                f"QAdACache does not serve peft's prompt learning ({settings.peft_type}), which may hand the model a "
                "cache of its own: generate without a cache, or build it for get_base_model() and use that"
            )
        model = model.get_base_model()
    return model
