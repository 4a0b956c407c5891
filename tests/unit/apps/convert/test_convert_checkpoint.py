"""The next step that a conversion prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctxlm_ds.apps.convert.convert_checkpoint import loading_call
from ctxlm_ds.export.huggingface import Conversion


@pytest.mark.parametrize(("pipeline", "call"), [
    ("fill-mask", 'transformers.pipeline("fill-mask", model="out")'),
    (None, 'transformers.T5ForConditionalGeneration.from_pretrained("out")'),
])  # fmt: skip
def test_a_model_without_a_pipeline_is_loaded_by_its_class(pipeline: str | None, call: str) -> None:
    assert loading_call(Conversion(Path("run"), Path("out"), "T5ForConditionalGeneration", pipeline, 1, [])) == call
