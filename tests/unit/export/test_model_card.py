"""The card says what the run recorded, at the exported step, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from markdown_it import MarkdownIt
from transformers.pipelines import PIPELINE_REGISTRY

from ctxlm_ds.export.base import export_of
from ctxlm_ds.export.model_card import read_evaluation, write_model_card
from ctxlm_ds.export.weights import CheckpointSource
from ctxlm_ds.families.bert.export import EXPORT
from ctxlm_ds.process.run_history import START, append_event
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.recipe.sections import TrainSource
from ctxlm_ds.registry import FAMILIES
from tests.checkpoints import make_config, outputs_of
from tests.sample_data import run_config
from tests.sections import data_section


def card_of(config: RunConfig, run: Path, step: int | None = 1200, source: str = "wiki_dev") -> str:
    """The card of a checkpoint of a run's folder; without a step, of imported weights."""
    metrics = [{"step": 1000, f"eval/{source}/masked_lm_loss": 2.34567}, {"step": 2000, f"eval/{source}/late": 1.0}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    train_state = {} if step is None else {"step": step, "tokens": 34_000_000, "seconds": 3700.0}
    folder = run / "checkpoints" / "step-00001200"
    checkpoint = CheckpointSource(
        folder, config, config.model, outputs_of(config), train_state, *cast("Any", (None, None))
    )
    text = EXPORT.card(outputs_of(config), "[MASK]")
    return write_model_card(checkpoint, text, "BertForPreTraining", "bf16", 12_345_678)


def test_the_card_holds_header_figures_data_and_hyperparameters(tmp_path: Path) -> None:
    prefix = tmp_path / "wiki_text_sentence"
    metadata = {"documents": 12345, "sequences": 234567, "tokens": 3456789, "split_sentences": True}
    Path(f"{prefix}.json").write_text(json.dumps(metadata))
    gone = tmp_path / "gone_text_sentence"
    optimizer = choices.OPTIMIZER.make(learning_rate=3e-4, betas=(0.9, 0.98))
    config = make_config("bert_nsp", tmp_path, 60, optimizer=optimizer)
    sources = [TrainSource(path=str(path), language=code) for path, code in ((prefix, "en_XX"), (gone, "cs_CZ"))]
    data = data_section(train=sources, seq_length=32)
    card = card_of(config.model_copy(update={"data": data}), tmp_path)

    _, header, body = card.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "transformers"
    assert yaml.safe_load(header)["license"] == "unknown" and yaml.safe_load(header)["language"] == ["cs", "en"]
    assert yaml.safe_load(header)["pipeline_tag"] == "fill-mask"
    assert "| wiki_text_sentence | 12,345 | 234,567 | 3,456,789 | yes |" in body
    assert "| gone_text_sentence | not recorded | not recorded | not recorded | not recorded |" in body
    assert "| wiki_dev/masked_lm_loss | 2.34567 |" in body and "wiki_dev/late" not in body
    assert "| steps | 1,200 |" in body and "| wall time | 1:01:40 |" in body
    assert "| optimizer.learning_rate | 0.0003 |" in body and "| optimizer.betas | 0.9, 0.98 |" in body
    assert "| data.packing | no |" in body and "| objective.mask_prob | 0.15 |" in body
    assert "data.reset_at_documents" not in body and "large [MASK]." in body
    assert "trained on sequences of 32 tokens; later positions have random weights" in body
    assert "12,345,678 parameters, stored in bf16" in body
    assert "BertForPreTraining.from_pretrained" in body


def test_imported_weights_claim_no_training(tmp_path: Path) -> None:
    config = make_config("bert", tmp_path, 60)
    card = card_of(config, tmp_path, step=None)
    assert "imported with ctxlm_ds" in card and "pretrained with" not in card and "Not recorded." in card
    assert "learning_rate" not in card and "None were recorded" in card and "random weights" not in card
    card = card_of(config.model_copy(update={"initialize_from": "runs/phase1"}), tmp_path)
    assert "started from the weights of `runs/phase1`" in card and "random weights" not in card


def test_changes_at_resumes_up_to_the_step_are_listed(tmp_path: Path) -> None:
    config = make_config("bert", tmp_path, 60)
    without = card_of(config, tmp_path)
    append_event(tmp_path, START, step=0)
    append_event(tmp_path, START, step=300, changed_settings=["optimizer.learning_rate 0.001 -> 0.005"])
    for step, changes in ((400, "no list"), (1200, ["training.seed 1 -> 2"])):
        append_event(tmp_path, START, step=step, changed_settings=changes)
    card = card_of(config, tmp_path)
    line = "- after step 300: `optimizer.learning_rate 0.001 -> 0.005`"
    assert card.count("- after step") == 1 and f"\n{line}\n\n## Limits" in card
    assert len(without) < len(card) and without.split("## Limits")[1] == card.split("## Limits")[1]


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


@pytest.mark.parametrize("family", [name for name in FAMILIES.shipped_names() if FAMILIES.get(name).export])
def test_a_named_pipeline_is_one_of_transformers(family: str) -> None:
    for export in export_of(family).models():
        task = export.card(tuple(FAMILIES.get(family).outputs), "[MASK]").task
        assert task in {*PIPELINE_REGISTRY.get_supported_tasks(), None}
        assert (task is None) == export.encoder_decoder


def family_card(family: str, objective: str, **data: Any) -> str:
    """The card of a run of a family's small model."""
    sections = FAMILIES.get(family).tiny()
    sections["model"]["vocab_size"] = 60
    sections["objective"] = {"name": objective}
    sections["data"] |= data
    config = run_config(**sections)
    outputs, export = outputs_of(config), export_of(family)
    state = {"step": 1, "tokens": 1, "seconds": 1.0}
    reader, program = cast("Any", (None, None))
    source = CheckpointSource(Path("run/checkpoints/step"), config, config.model, outputs, state, reader, program)
    return write_model_card(source, export.card(outputs, ""), "TheirClass", "bf16", 1)


@pytest.mark.parametrize("objective", ["span_corruption", "prefix_lm", "denoiser_mixture"])
def test_a_card_without_a_pipeline_names_none_and_is_true_for_every_objective(objective: str) -> None:
    _, header, body = family_card("t5", objective).split("---\n", 2)
    assert "pipeline_tag" not in yaml.safe_load(header) and "import AutoTokenizer, TheirClass\n" in body
    assert f"| objective.name | {objective} |" in body and "model.generate(" in body
    assert "predicts the spans" not in body and "span-corruption" not in body and "<extra_id_0>" not in body
    assert "None" not in header and "random weights" not in body


@pytest.mark.parametrize(("family", "objective"), [("llama", "causal_lm"), ("modernbert", "masked_lm")])
def test_rotary_positions_have_no_weights(family: str, objective: str) -> None:
    card = family_card(family, objective)
    assert "trained on sequences of 32 tokens; it never saw longer ones." in card and "random weights" not in card


def test_names_of_a_user_are_shown_as_text(tmp_path: Path) -> None:
    """A Markdown parser finds neither markup nor more rows and cells than for a plain name."""
    hostile = "a|b<img src=x> [l](http://x) ![i](http://x) `c` **d** \\\n\n# e"
    config = make_config("bert", tmp_path, 60).model_copy(update={"initialize_from": hostile})
    kinds = []
    for name in ("plain", hostile):
        source = name.replace("/", ":").replace("\n", " ")
        data = data_section(train=[TrainSource(path=str(tmp_path / source))], seq_length=32)
        run = config.model_copy(update={"data": data, "name": name, "initialize_from": name})
        body = card_of(run, tmp_path, source=name).split("---\n", 2)[2]
        tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(body)
        assert any(token.children and token.children[0].content == " ".join(name.split()) for token in tokens)
        kinds.append([(token.type, [child.type for child in token.children or () if child.type != "text"])
                      for token in tokens])  # fmt: skip
    assert kinds[0] == kinds[1]
