"""The card says what the run recorded, at the exported step, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from ctxlm_ds.export.model_card import CardFacts, read_dataset_metadata, read_evaluation, write_model_card
from ctxlm_ds.families.bert.export import EXPORT
from ctxlm_ds.recipe.schema import OptimizerConfig, RunConfig
from ctxlm_ds.recipe.sections import TrainSource
from tests.checkpoints import make_config, outputs_of
from tests.sections import data_section


def facts(config: RunConfig, **values: object) -> CardFacts:
    defaults = {
        "config": config, "text": EXPORT.card(outputs_of(config), "[MASK]"), "hf_class": "BertForPreTraining",
        "dtype": "bf16", "num_parameters": 12_345_678,
        "train_state": {"step": 1200, "tokens": 34_000_000, "seconds": 3700.0},
        "evaluation": {"eval/wiki_dev/masked_lm_loss": 2.34567}, "datasets": {}, "trained_length": 40,
    }  # fmt: skip
    return CardFacts(**{**defaults, **values})  # type: ignore[arg-type]


def test_the_card_holds_header_figures_data_and_hyperparameters(tmp_path: Path) -> None:
    prefix = tmp_path / "wiki_text_sentence"
    metadata = {"documents": 12345, "sequences": 234567, "tokens": 3456789, "split_sentences": True}
    Path(f"{prefix}.json").write_text(json.dumps(metadata))
    gone = tmp_path / "gone_text_sentence"
    config = make_config("bert_nsp", tmp_path, 60, optimizer=OptimizerConfig(learning_rate=3e-4, betas=(0.9, 0.98)))
    paths = [str(prefix), str(gone)]
    data = data_section(train=[TrainSource(path=path) for path in paths], seq_length=64)
    config = config.model_copy(update={"initialize_from": "runs/phase1", "data": data})
    card = write_model_card(facts(config, datasets=read_dataset_metadata(paths), trained_length=32))

    _, header, body = card.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "transformers"
    assert yaml.safe_load(header)["pipeline_tag"] == "fill-mask"
    assert "| wiki_text_sentence | 12,345 | 234,567 | 3,456,789 | yes |" in body
    assert "| gone_text_sentence | not recorded | not recorded | not recorded | not recorded |" in body
    assert "| wiki_dev/masked_lm_loss | 2.34567 |" in body
    assert "| steps | 1,200 |" in body and "| wall time | 1:01:40 |" in body
    assert "| optimizer.learning_rate | 0.0003 |" in body and "| optimizer.betas | 0.9, 0.98 |" in body
    assert "| data.packing | no |" in body and "| objective.mask_prob | 0.15 |" in body
    assert "data.reset_at_documents" not in body and "large [MASK]." in body
    assert "trained on sequences of 32 tokens; later positions have random weights" in body
    assert "12,345,678 parameters, stored in bf16" in body
    assert "BertForPreTraining.from_pretrained" in body and "`runs/phase1`" in body


def test_imported_weights_claim_no_training(tmp_path: Path) -> None:
    card = write_model_card(facts(make_config("bert", tmp_path, 60), train_state={}, evaluation={},
                                  hf_class="BertForMaskedLM"))  # fmt: skip
    assert "imported with ctxlm_ds" in card and "pretrained with" not in card
    assert "learning_rate" not in card and "None were recorded" in card and "random weights" not in card


def test_figures_are_the_last_at_or_before_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 10, "eval/a/loss": 3.0, "eval/b/loss": 5.0},
        {"step": 15, "loss": 2.2},
        {"step": 20, "eval/a/loss": 2.0},
        {"step": 30, "eval/a/loss": 1.0},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 25, "eval/a/lo')
    assert read_evaluation(path, 29) == {"eval/a/loss": 2.0, "eval/b/loss": 5.0}
    assert read_evaluation(path, 9) == {}
    assert read_evaluation(tmp_path / "none.jsonl", 9) == {}
