"""Sections of the named family, objective and format: validation, inheritance, saved configs, entries of others."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from pydantic import ValidationError

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.recipe.load import dump_config, load_config, load_saved_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES
from tests.unit.recipe.test_load import problems_of, write
from tools.write_config_docs import render_reference

GPT2 = {
    "model": {"family": "gpt2", "hidden_size": 48, "num_attention_heads": 4},
    "objective": {"name": "causal_lm"},
    "data": {"sample_format": "blocks", "train": ["a"], "reset_at_documents": False},
}


class WideSection(TransformerSection):
    """A family of a user's package."""

    same_function: ClassVar[tuple[str, ...]] = (*TransformerSection.same_function, "width_factor")

    family: str = "wide"
    width_factor: float = 2.0
    """How much wider the feed-forward layer is."""


@pytest.fixture
def wide() -> Iterator[None]:
    """Register a family for one test."""
    FAMILIES.register("wide", replace(FAMILIES.get("bert"), name="wide", section=WideSection))
    yield
    FAMILIES._added.pop("wide")
    FAMILIES._loaded.pop("wide", None)


def test_copies_of_every_kind_are_equal() -> None:
    config = RunConfig.model_validate(GPT2)
    assert RunConfig.model_validate(config.model_dump()) == config
    assert RunConfig.model_validate_json(config.model_dump_json(), strict=True) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert RunConfig(model=config.model, objective=config.objective, data=config.data) == config
    assert config.model_dump(mode="json")["data"]["reset_at_documents"] is False
    larger = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 7})})
    assert larger != config and larger.model_dump()["model"]["hidden_size"] == 48
    with pytest.raises(ValidationError):
        config.model.vocab_size = 7  # type: ignore[misc]


def test_errors_of_python_values_have_their_exact_place() -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"model": {"family": "gpt2", "type_vocab_size": 2, "num_layers": 0}})
    assert {error["loc"] for error in caught.value.errors()} == {("model", "type_vocab_size"), ("model", "num_layers")}
    with pytest.raises(ValidationError, match="did you mean gpt2") as caught:
        RunConfig.model_validate({"model": {"family": "gpt22"}})
    assert [error["loc"] for error in caught.value.errors()] == [("model", "family")]


MASKED = (
    "a setting of masked_lm, masked_lm_nsp, masked_lm_sop, unified_lm, replaced_tokens, distillation and tinybert; "
    "objective.name is causal_lm"
)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("model: {family: gpt2, type_vocab_size: 2}", "model.type_vocab_size",
         "(value 2): it is a setting of bert, albert, electra, tinybert, unilm and megatron_bert; "
         "model.family is gpt2"),
        ("objective: {name: causal_lm, mask_prob: 0.2}", "objective.mask_prob", f"it is {MASKED}"),
        ("data: {reset_at_documents: true}", "data.reset_at_documents",
         "it is a setting of blocks; data.sample_format is segment_pair"),
        ("objective: {name: causal_lm, mask_prb: 0.2}", "objective.mask_prb",
         f"did you mean objective.mask_prob? It is {MASKED}"),
        ("objective: {name: causal_lm, mlm_probability: 0.2}", "objective.mlm_probability",
         f"did you mean objective.mask_prob? It is {MASKED}"),
        ("model: {ffn_hidden_size: 64}", "model.ffn_hidden_size", "did you mean model.intermediate_size?"),
        ("data: {short_seq_prb: 0.2}", "data.short_seq_prb", "did you mean data.short_seq_prob?  ["),
        ("model: {family: brt, num_layers: x}", "model.family",
         '"brt": expected one of bert, roberta, xlm_roberta, albert, electra, distilbert, tinybert, modernbert, t5, '
         "bart, mbart, xlnet, unilm, megatron_bert, gpt2, gpt1, llama, elmo; did you mean bert?"),
        ("objective: {name: 3}", "objective.name", "3: expected one of masked_lm,"),
        ("data: {sample_format: block}", "data.sample_format", "did you mean blocks?"),
        ("data: {sample_format: null}", "data.sample_format", "null: expected one of"),
    ],
)  # fmt: skip
def test_a_wrong_name_or_setting_is_one_problem(tmp_path: Path, text: str, path: str, words: str) -> None:
    recipe = write(tmp_path / "r.yaml", f"{text}\n")
    (line,) = [line for line in problems_of(recipe) if line.startswith(f"{path}:")]
    assert words in line and f"[{recipe}:1]" in line


def test_an_unknown_family_hides_what_cannot_be_judged(tmp_path: Path) -> None:
    recipe = write(tmp_path / "r.yaml", "model: {family: brt, num_layers: x, odd: 1}\ntraining: {sed: 3}\n")
    assert [line.split(":")[0] for line in problems_of(recipe)] == ["model.family", "training.sed"]


def test_another_family_keeps_what_both_have_and_drops_the_rest(tmp_path: Path) -> None:
    write(
        tmp_path / "base.yaml",
        "model: {hidden_size: 48, num_attention_heads: 4, type_vocab_size: 3}\nobjective: {mask_prob: 0.2}\n"
        "data: {train: [a], num_duplicates: 10, packing: true, seq_length: 64}\n",
    )
    child = "extends: base.yaml\nmodel: {family: gpt2}\nobjective: {name: causal_lm}\ndata: {sample_format: blocks}\n"
    config = load_config(write(tmp_path / "child.yaml", child))
    assert (config.model.family, config.model_dump()["model"]["hidden_size"]) == ("gpt2", 48)
    assert ([source.path for source in config.data.train], config.data.seq_length) == (["a"], 64)
    back = ["model.family=bert", "objective.name=masked_lm_nsp", "data.sample_format=segment_pair"]
    again = load_config(tmp_path / "child.yaml", back)
    assert again.model_dump()["model"]["type_vocab_size"] == 2 and again.data.passes == 1
    config = load_config(tmp_path / "base.yaml", ["data.sample_format=sentence_pair"])
    assert config.data.passes == 10 and config.data.shares_rows


def test_what_is_written_with_the_change_or_after_it_must_fit(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", "model: {type_vocab_size: 3, hiden_size: 5}\n")
    recipe = write(tmp_path / "r.yaml", "extends: base.yaml\nmodel:\n  type_vocab_size: 2\n  family: gpt2\n")
    problems = problems_of(recipe)
    assert any("it is a setting of bert" in line and f"[{recipe}:3]" in line for line in problems)
    # A slip of the base is no setting of the family before either.
    assert any(line.startswith("model.hiden_size:") and f"[{base}:1]" in line for line in problems)
    rest = ["objective.name=causal_lm", "data.sample_format=blocks", "model.family=gpt2"]
    write(base, "model: {type_vocab_size: 3}\n")
    assert load_config(base, rest).model.family == "gpt2"
    for overrides in (["model.type_vocab_size=2", *rest], [*rest, "model.type_vocab_size=2"]):
        (problem,) = problems_of(base, overrides)
        assert "it is a setting of bert" in problem and "[--set model.type_vocab_size=2]" in problem


SAVED_BEFORE = {
    "model": {"type_vocab_size": 2, "pre_layer_norm": True},
    "objective": {"mask_prob": 0.15, "keep_prob": 0.1, "random_prob": 0.1, "whole_word": False, "masking": "dynamic",
                  "special_tokens": "never", "count_rounding": "nearest", "max_predictions": None},
    "data": {"short_seq_prob": 0.1, "num_duplicates": 1, "packing": False, "max_sequences_per_row": 8,
             "reset_at_documents": True},
}  # fmt: skip
"""Settings that the version before saved whatever the family, objective and format were."""


@pytest.mark.parametrize("name", ["gpt2-small", "gpt1", "roberta-base", "bert-base"])
def test_a_config_saved_by_the_version_before_is_read(tmp_path: Path, name: str) -> None:
    config = load_config(name)
    saved: dict[str, Any] = config.model_dump(mode="json", exclude={"extends"})
    for section, settings in SAVED_BEFORE.items():
        saved[section] = settings | saved[section]
    path = write(tmp_path / "config.yaml", dump_config(config))
    assert load_saved_config(path) == config
    write(path, yaml.safe_dump(saved))
    assert load_saved_config(path) == config
    saved["parallel"]["pipeline_partition"] = "time"
    saved["teacher"]["outputs"] = "outputs"
    write(path, yaml.safe_dump(saved))
    assert load_saved_config(path) == config
    saved["model"]["hiden_size"] = 3
    write(path, yaml.safe_dump(saved))
    with pytest.raises(ConfigError, match="did you mean model.hidden_size"):
        load_saved_config(path)


def test_a_registered_family_is_known_in_recipes(tmp_path: Path, wide: None) -> None:
    recipe = write(tmp_path / "r.yaml", "model: {family: wide, width_factor: 3.0, num_layers: 2}\n")
    config = load_config(recipe)
    assert isinstance(config.model, WideSection) and config.model.width_factor == 3.0
    assert load_config(write(tmp_path / "config.yaml", dump_config(config))) == config
    assert "did you mean model.width_factor?" in problems_of(recipe, ["model.width_facto=1"])[0]
    (problem,) = problems_of(write(tmp_path / "bert.yaml", "model: {width_factor: 3.0}\n"))
    assert "it is a setting of wide; model.family is bert" in problem
    assert "width_factor" not in render_reference(), "the page lists what the package has"


def test_a_family_that_cannot_be_imported_is_one_problem(tmp_path: Path) -> None:
    FAMILIES.register("broken", "no_such_package.config:FAMILY")
    try:
        (problem,) = problems_of(write(tmp_path / "r.yaml", "model: {family: broken, odd: 1}\n"))
        assert problem.startswith("model.family:") and "cannot be imported" in problem
        # Nobody else is troubled by it.
        assert "it is a setting of bert" in problems_of("gpt2-small", ["model.type_vocab_size=2"])[0]
    finally:
        FAMILIES._added.pop("broken")
