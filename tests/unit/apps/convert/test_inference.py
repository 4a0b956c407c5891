"""Exports for use, proved by the other program; texts that the exports have not seen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from ctxlm_ds.apps.convert import inference
from ctxlm_ds.apps.convert.inference import to_onnx
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.huggingface import to_hf
from tests.checkpoints import make_tokenizer, write_random_run

TEXTS = ["the river was slowly reading the best books.", "a mountain", "worst times"]


@pytest.fixture(params=["bert_nsp", "gpt2"])
def export(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind = "gpt2" if request.param == "gpt2" else "wordpiece"
    run = write_random_run(tmp_path / "run", request.param, make_tokenizer(kind, tmp_path / "tokenizer"))
    to_hf(run, tmp_path / "hf")
    return tmp_path / "hf"


def test_onnx_computes_other_texts_of_any_batch_and_length(export: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    lines = to_onnx(export, tmp_path / "onnx")
    assert sum("largest difference" in line for line in lines) == len(inference.BATCHES)
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "onnx")
    name = json.loads((export / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(export).eval()
    for texts in (TEXTS, TEXTS[1:2]):
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        with torch.no_grad():
            expected = model(**batch)[0]
        (found, *_) = session.run(None, {entry.name: batch[entry.name].numpy() for entry in session.get_inputs()})
        attended = batch["attention_mask"].bool().numpy()
        np.testing.assert_allclose(found[attended], expected.numpy()[attended], atol=1e-4)


def test_sentence_transformers_loads_an_export_as_it_is(export: Path) -> None:
    """The mean of the last hidden states; of a causal model the last one."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(export), device="cpu")
    batch = transformers.AutoTokenizer.from_pretrained(export)(TEXTS[:1], return_tensors="pt")
    with torch.no_grad():
        hidden = transformers.AutoModel.from_pretrained(export).eval()(**batch).last_hidden_state[0]
    expected = hidden[-1] if model[1].pooling_mode == "lasttoken" else hidden.mean(0)
    np.testing.assert_allclose(model.encode(TEXTS[:1])[0], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_a_folder_of_no_class_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "config.json").write_text('{"model_type": "elmo"}')
    with pytest.raises(ExportError, match="names no class of transformers"):
        to_onnx(tmp_path, tmp_path / "onnx")
