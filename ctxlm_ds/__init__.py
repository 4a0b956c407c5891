"""Pretraining of contextual language models under DeepSpeed: raw text to a Hugging Face checkpoint.

The names below are the Python interface (docs/python.md), imported at first use.
"""

from __future__ import annotations

from typing import Any

_OBJECTS = {
    "Run": "ctxlm_ds.api:Run",
    "build_model": "ctxlm_ds.api:build_model",
    "export_model": "ctxlm_ds.api:export_model",
    "iterate_batches": "ctxlm_ds.api:iterate_batches",
    "load_recipe": "ctxlm_ds.recipe.load:load_config",
    "open_dataset": "ctxlm_ds.data.dataset.reader:IndexedDataset",
    "open_tokenizer": "ctxlm_ds.tokenizers.load:load_tokenizer",
}
__all__ = list(_OBJECTS)


def __getattr__(name: str) -> Any:
    if name not in _OBJECTS:
        raise AttributeError(f"module ctxlm_ds has no attribute {name}")
    from ctxlm_ds.registry import load_object

    return load_object(_OBJECTS[name])
