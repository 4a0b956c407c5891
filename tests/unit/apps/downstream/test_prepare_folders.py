"""Folders of other programs: sizes, types and code that no model has, and weights that are not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ctxlm_ds.apps.downstream.features.sources import TransformersSource
from ctxlm_ds.apps.downstream.fit import load_config
from ctxlm_ds.apps.downstream.language_model import load_scorer
from ctxlm_ds.apps.downstream.prepare import load_tokenizer, longest_input, make_kind, read_config, read_parts
from ctxlm_ds.errors import ConfigError
from tests.downstream_models import sentiment, write_bert, write_rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is more than 4,096"),
        ({"text_config": {"n_layer": 10**6}}, "n_layer is more"),
        ({"hidden_size": 10**400}, "hidden_size is"),
        ({"_attn_implementation": "evil/kernel"}, "'evil/kernel' is code of the Hub"),
        ({"attn_implementation": "evil/kernel"}, "is code of the Hub"),
        ({"model_type": "evil", "auto_map": {"AutoModel": "evil.py"}}, "'evil'; code of the model's own (auto_map)"),
        ({"model_type": ["bert"]}, "no model of type"),
        ({"hidden_size": 7}, "describes no model"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"dtype": "float7"}, "config.json"),
    ],
)
def test_a_config_that_no_model_has_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_bert(tmp_path)
    tokenizer, path = load_tokenizer(folder, False), folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError) as caught:
        longest_input(folder, tokenizer, 128)
    assert message in str(caught.value) and "trust_remote_code" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"a": ' * 1000])
def test_a_damaged_config_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def small_bert(tmp_path: Path) -> tuple[Path, Any]:
    """A model, and a task for it."""
    task, examples = sentiment(8)
    write_rows(tmp_path / "train.tsv", examples)
    write_rows(tmp_path / "dev.tsv", examples)
    folder = write_bert(tmp_path / "model")
    kind = make_kind(task, folder, read_parts(task, tmp_path))
    return folder, kind


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder, kind = small_bert(tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("value.weight"))
    weights[name][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{name.removeprefix('bert.')} has NaN"):
        kind.model(folder, load_config(folder, kind), random=False)
    with pytest.raises(ConfigError, match=f"{name} has NaN"):
        load_scorer(folder, kind.tokenizer)


def test_weights_of_a_wrapped_model_are_refused(tmp_path: Path) -> None:
    """transformers takes none of them, and draws all."""
    folder, kind = small_bert(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({f"module.{name}": value for name, value in weights.items()}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has no bert\.embeddings.* of a wrapped model"):
        kind.model(folder, load_config(folder, kind), random=False)
    with pytest.raises(ConfigError, match=r"has no embeddings.* of a wrapped model"):
        TransformersSource(folder)
