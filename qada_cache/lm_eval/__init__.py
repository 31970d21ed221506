"""lm-eval on a QAdACache: `lm_eval --model hf --model_args pretrained=...,cache=qada`, or `--model hf-qada`."""

from .model import QAdALM

__all__ = ["QAdALM"]
