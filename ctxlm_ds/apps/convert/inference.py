"""Export of a Hugging Face folder as ONNX, proved on real text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from ctxlm_ds.atomic import output_folder
from ctxlm_ds.checkpoint.folders import check_output
from ctxlm_ds.errors import ExportError
from ctxlm_ds.export.hf_config import read_hf_config
from ctxlm_ds.export.verify import TEXT_PAIRS, Comparison
from ctxlm_ds.installed import check_extra

ONNX_NAME = "model.onnx"
BOUND = 1e-4
"""Largest difference of an output, as a share of its largest value."""
TEXTS = [text for pair in TEXT_PAIRS for text in pair]
BATCHES = (TEXTS, TEXTS[:1], [" ".join(TEXTS[:3])] * 3)
"""Texts of a batch: padded, alone, and longer ones."""


def to_onnx(folder: Path, output: Path) -> list[str]:
    """Write the model of a Hugging Face folder as model.onnx, for any batch and length, next to its tokenizer.

    Raises:
        ConfigError: a package of the extra `onnx` is missing.
        ExportError: torch cannot export the class, or onnxruntime computes other outputs.
    """
    check_extra("onnx", ("onnx", "onnxscript", "onnxruntime"))
    check_output(output, folder)
    name = (read_hf_config(folder).get("architectures") or [""])[0]
    if not hasattr(transformers, name):
        raise ExportError(f"{folder}: config.json names no class of transformers; give a folder of ctxlm convert to-hf")
    # Other kernels of attention choose by the values of the mask, which a graph cannot.
    model = getattr(transformers, name).from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    model.eval()
    for part in model.modules():  # a T5's decoder has another config
        if isinstance(getattr(part, "config", None), transformers.PretrainedConfig):
            part.config.use_cache = False
    batches = [_inputs(folder, model, texts) for texts in BATCHES]
    with torch.no_grad():
        found = [{key: one for key, one in model(**batch).items() if torch.is_tensor(one)} for batch in batches]
    with output_folder(output) as place:
        for path in (path for path in folder.iterdir() if path.suffix == ".json" or "token" in path.name):
            shutil.copyfile(path, place / path.name)
        sides = {key: "decoder_length" if key.startswith("decoder") else "length" for key in batches[0]}
        axes = {key: {0: "batch", 1: side} for key, side in sides.items()}
        try:
            program = torch.onnx.export(
                model, (), kwargs=batches[0], dynamo=True, dynamic_shapes=axes, input_names=list(axes),
                output_names=list(found[0]), verbose=False,
            )  # fmt: skip
        except Exception as error:  # of many kinds, and some are not torch's
            reason = " ".join(str(error).partition("## Exception summary")[2].split())[:200] or type(error).__name__
            raise ExportError(f"{name}: torch's exporter cannot write this class ({reason})") from error
        assert program is not None
        program.save(place / ONNX_NAME)
        lines = [str(_compare(place / ONNX_NAME, batch, ours)) for batch, ours in zip(batches, found, strict=True)]
    return [f"{name} as ONNX:", *lines, f"wrote {output / ONNX_NAME}"]


def _inputs(folder: Path, model: Any, texts: list[str]) -> dict[str, torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    positions = getattr(model.config, "max_position_embeddings", None) or 0  # XLNet's are -1: no limit
    longest = min(tokenizer.model_max_length, positions if positions > 0 else 512)
    batch = dict(tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=longest))
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"][:, : max(2, batch["input_ids"].shape[1] // 2)].clone()
    return batch


def _compare(path: Path, batch: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> Comparison:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    read = {entry.name for entry in session.get_inputs()}
    theirs = session.run(list(ours), {key: value.numpy() for key, value in batch.items() if key in read})
    mask = batch.get("attention_mask")
    comparisons = []
    for (key, own), other in zip(ours.items(), map(torch.from_numpy, theirs), strict=True):
        attended = mask.bool() if mask is not None and own.shape[:2] == mask.shape else slice(None)
        difference, scale = float((own - other)[attended].abs().max()), float(own.abs().max())
        comparisons.append(Comparison(f"{key} of {len(own)} texts", difference, scale, BOUND))
    worst = max(comparisons, key=lambda one: one.relative)
    if not worst.holds:
        raise ExportError(f"onnxruntime computes other outputs: {worst}")
    return worst
