"""Pretraining of contextual language models under DeepSpeed: raw text to a Hugging Face checkpoint.

The names below are the Python interface (docs/python.md), imported at first use.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Run", "build_model", "export", "iterate_batches", "load_recipe", "open_dataset", "open_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module ctxlm_ds has no attribute {name}")
    from ctxlm_ds import api

    return getattr(api, name)
