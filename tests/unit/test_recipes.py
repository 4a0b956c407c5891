"""Every shipped recipe: loads, is possible, says where its figures come from, and builds at the published size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ctxlm_ds.apps.plan.layouts import Layout
from ctxlm_ds.apps.plan.plan import Planner, load_jsons
from ctxlm_ds.apps.plan.search import MICRO_BATCHES
from ctxlm_ds.export.hf_config import from_hf_config
from ctxlm_ds.models.program import plain_program
from ctxlm_ds.recipe.check import check_config, unused_settings
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.hardware import Cluster, find_gpu
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from ctxlm_ds.recipe.load import RECIPE_DIR, load_config, shipped_recipes
from ctxlm_ds.recipe.phases import run_phases
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.training.measure import describe, with_vocabulary
from tests.each import each

RECIPES = shipped_recipes()
PUBLISHED_MILLIONS = {
    "bert-tiny": 4.4, "bert-mini": 11.2, "bert-small": 28.8, "bert-medium": 41.4, "bert-base": 110, "bert-large": 340,
    "roberta-base": 125, "roberta-large": 355, "gpt2-small": 124, "gpt2-medium": 355, "gpt1": 117, "albert-base": 12,
    "albert-large": 18, "albert-xlarge": 60, "albert-xxlarge": 223, "modernbert-base": 149, "modernbert-large": 395,
    "distilbert-base": 66, "tinybert-4l": 14.5, "tinybert-6l": 67, "xlnet-base": 116.7, "unilm-base": 110,
    "t5-small": 60.5, "t5-base": 222.9, "t5-v1_1-base": 247.6, "bart-base": 139.4, "bart-large": 406.3,
    "mbart-large": 610.9, "llama-125m": 124.6, "llama-1b": 1235.8,
}  # fmt: skip
"""Devlin 2018, Turc 2019 (README of google-research/bert), Liu 2019, Radford 2018 and 2019 (as corrected there), Lan
2020 (whose 235M for xxlarge is not the size of the released file: 223M), Sanh 2019 (table 3), Jiao
2020 (table 1), Warner 2024, Liu 2024 (README of the code), the files of meta-llama/Llama-3.2-1B, google-t5/t5-small,
google-t5/t5-base, google/t5-v1_1-base, facebook/bart-base, bart-large and mbart-large-cc25,
xlnet/xlnet-base-cased, README of microsoft/unilm (unilm-v1)."""


DISCRIMINATOR_MILLIONS = {"electra-small": 14, "electra-base": 110}
"""Clark 2020, tables 1 and 2 (README of google-research/electra), which count the discriminator."""


def num_parameters(config: RunConfig) -> int:
    return sum(map(math.prod, describe(config).trained_shapes.values()))


@each("name", RECIPES)
def test_loads_and_is_possible(name: str) -> None:
    config = load_config(name)
    assert config.name == name
    assert config.data.train == []
    assert unused_settings(config) == []
    ranks = config.parallel.model_parallel_size
    for world_size in (None, ranks, 2 * ranks):
        check_config(config, world_size)
    built = build_deepspeed_config(config, load_deepspeed_json(config.deepspeed or "zero1"), 2 * ranks)
    assert built["train_batch_size"] == config.training.global_batch_size


@each("name", RECIPES)
def test_says_where_every_figure_comes_from(name: str) -> None:
    text = (RECIPE_DIR / f"{name}.yaml").read_text(encoding="utf-8")
    header = [line for line in text.splitlines() if line.startswith("#")]
    assert text.startswith("# ")
    assert any("Sources" in line for line in header)
    authors = ("Devlin", "Liu", "Turc", "You et al", "fairseq", "Radford", "Lan et al", "Joshi", "Sanh et al", "Clark")
    later = ("Jiao", "Warner", "Conneau", "Touvron", "Raffel", "Lewis", "Yang", "Peters", "Dong")
    assert any(author in text for author in (*authors, *later, "Beltagy", "Fu et al", "Guo"))
    assert max(map(len, text.splitlines())) <= 120


@each("name", PUBLISHED_MILLIONS)
def test_has_as_many_parameters_as_published(name: str) -> None:
    # The papers count the encoder; heads add up to 1 % and BERT-large's 340M is itself rounded.
    assert num_parameters(load_config(name)) / 1e6 == pytest.approx(PUBLISHED_MILLIONS[name], rel=0.02)


@each("name", DISCRIMINATOR_MILLIONS)
def test_a_discriminator_has_as_many_parameters_as_published(name: str) -> None:
    model = with_vocabulary(load_config(name).model)
    count = plain_program(model, ("replaced_logits",)).num_parameters
    assert count / 1e6 == pytest.approx(DISCRIMINATOR_MILLIONS[name], abs=0.55)
    # A generator of the published size: tables shared, other widths divided.
    assert num_parameters(load_config(name)) < 1.1 * count


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base": ("bert", {}), "bert-large": ("bert", LARGE), "roberta-base": ("roberta", ROBERTA),
    "roberta-large": ("roberta", ROBERTA | LARGE), "gpt2-small": ("gpt2", {}),
    "gpt2-medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}), "gpt1": ("openai-gpt", {}),
    "albert-xxlarge": ("albert", {}), "distilbert-base": ("distilbert", {}), "t5-small": ("t5", {}),
}  # fmt: skip
"""Classes of transformers whose defaults, but for a size, are the published settings."""


@each("name", THEIRS)
def test_the_model_is_that_of_transformers_defaults(name: str, tmp_path: Path) -> None:
    model_type, settings = THEIRS[name]
    transformers.AutoConfig.for_model(model_type, **settings).save_pretrained(tmp_path)
    ours, theirs = with_vocabulary(load_config(name).model), from_hf_config(tmp_path).model
    # How weights begin is no setting of transformers' configs.
    begins = {"initializer", "position_initializer_range"}
    assert ours.model_dump(exclude=begins) == theirs.model_dump(exclude=begins)


@pytest.mark.parametrize(("name", "gpu", "count"), [
    ("bert-base-h200", "H200", 1), ("gpt2-small-h200", "H200", 1),
    ("bert-large-h100x8", "H100", 8), ("gpt2-medium-h100x8", "H100", 8),
])  # fmt: skip
def test_a_device_recipe_has_the_largest_micro_batch_that_fits(name: str, gpu: str, count: int) -> None:
    """Larger ones are faster by less and less: the planner's choice of a micro-batch is the largest."""
    config = load_config(name)
    check_config(config, count)
    planner = Planner(config, Cluster(find_gpu(gpu), 1, count), load_jsons(config.deepspeed or "zero1"))
    rows = config.training.micro_batch_size
    own, double = Layout(count, micro_batch_size=rows), Layout(count, micro_batch_size=2 * rows)
    usable, plan = planner.cluster.usable_bytes, planner.weigh(own)
    assert plan.memory.total <= usable
    is_divided = config.training.global_batch_size % (2 * rows * count) == 0
    assert rows == MICRO_BATCHES[-1] or not is_divided or planner.memory(double).total > usable
    assert planner.weigh(Layout(count, micro_batch_size=rows // 2)).time.total > plan.time.total
    assert config.model.attention_dropout == 0.0, "attention needs no mask then"  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", ["base", "large"])
def test_modernbert_has_the_shape_and_the_tokens_of_its_release(size: str) -> None:
    """Parameters of transformers' class at the released shape; tokens by phase (Warner 2024, section 2.2.2)."""
    shape = {"base": {}, "large": dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16,
                                       intermediate_size=2624)}[size]  # fmt: skip
    with torch.device("meta"):
        theirs = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**shape))
    published = {"base": (1719e9, 250e9, 50e9), "large": (900e9, 800e9, 250e9, 50e9)}[size]
    for phase, tokens in zip(run_phases(load_config(f"modernbert-{size}")), published, strict=True):
        config = phase.config
        assert num_parameters(config) == sum(parameter.numel() for parameter in theirs.parameters())
        read = config.training.rows_after(config.training.max_steps) * config.data.seq_length
        assert read == pytest.approx(tokens, rel=1e-4)
