"""Published values, typed a second time with their place in the source, against every shipped recipe.

A value here is what the source has, not what a recipe has. Where a source has none, the entry says so ("ours" or
"inferred") and only fixes that a change is deliberate.
"""

from __future__ import annotations

from ctxlm_ds.recipe.load import load_config, shipped_recipes
from ctxlm_ds.recipe.phases import RunPhase, run_phases
from ctxlm_ds.recipe.schema import RunConfig
from tests.each import each
from tests.unit.recipe import published_families as later
from tests.unit.recipe.published_settings import (
    ALBERT,
    BERT_PHASE_1,
    BERT_PHASE_2,
    GPT1,
    GPT2,
    LAMB_PHASE_1,
    LAMB_PHASE_2,
    LLAMA_1B,
    LLAMA_125M,
    MOSAIC_BASE,
    ROBERTA,
    SPANBERT,
    UNILM,
    Values,
)  # fmt: skip

# Devlin 2018 = arXiv:1810.04805; code = google-research/bert.
NO_DROPOUT: Values = {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}  # Lan 2020, section 4.9
ROBERTA_LARGE: Values = {"optimizer.learning_rate": 4e-4, "schedule.warmup_steps": 30_000}  # table 9
FAIRSEQ: Values = {  # config/pretraining/base.yaml
    "optimizer.learning_rate": 5e-4, "schedule.warmup_steps": 10_000, "training.global_batch_size": 2048,
    "training.max_steps": 125_000,
}  # fmt: skip
GPT2_MEDIUM: Values = {"optimizer.learning_rate": 3e-4, "schedule.final_learning_rate": 3e-5}  # Brown 2020, table 2.1
LONGFORMER: Values = {  # Beltagy 2020 = arXiv:2004.05150, section 5
    "model.max_position_embeddings": 4096, "data.seq_length": 4096, "optimizer.learning_rate": 3e-5,
    "schedule.name": "polynomial", "schedule.power": 3.0, "schedule.warmup_steps": 500,
    "training.global_batch_size": 64, "training.max_steps": 65_000,
}  # fmt: skip
LONG_LLAMA: Values = {
    "model.max_position_embeddings": 32_768, "data.seq_length": 32_768, "data.max_sequences_per_row": 512,  # ours
    "model.rotary_scaling": "llama3", "model.rotary_scaling_factor": 32.0,  # config.json of Llama-3.2-1B
    "model.rotary_low_turns": 1.0, "model.rotary_high_turns": 4.0, "model.rotary_original_length": 8192,
    "optimizer.learning_rate": 3e-5, "schedule.name": "constant", "schedule.warmup_steps": 50,  # ours
    "schedule.final_learning_rate": 0.0, "schedule.decay_from": "no such setting",  # of another schedule
    "training.activation_checkpointing": False,  # ours
    "training.global_batch_size": 128, "training.max_steps": 1192,  # Fu 2024 = arXiv:2402.10171: 5 billion tokens
}  # fmt: skip
LONGER_LLAMA: Values = {
    "model.max_position_embeddings": 131_072, "data.seq_length": 131_072, "data.max_sequences_per_row": 2048,  # ours
    "training.global_batch_size": 32, "parallel.context_parallel_size": 4,
}  # fmt: skip
LONG_T5: Values = {
    "data.seq_length": 4096, "training.global_batch_size": 128,  # Guo 2022 = arXiv:2112.07916, section 4.1
    "schedule.start_step": 1_000_000, "training.max_steps": 100_000,  # ours
}  # fmt: skip


def shape(num_layers: int, hidden_size: int, num_attention_heads: int) -> Values:
    """The feed-forward layer is four times as wide in all of these models."""
    return {
        "model.num_layers": num_layers, "model.hidden_size": hidden_size,
        "model.num_attention_heads": num_attention_heads, "model.intermediate_size": 4 * hidden_size,
    }  # fmt: skip


def generator(hidden_size: int) -> Values:
    """run_pretraining.py, get_generator_config: heads of 64, a feed-forward layer four times as wide."""
    return {
        "model.generator_hidden_size": hidden_size, "model.generator_num_attention_heads": hidden_size // 64,
        "model.generator_intermediate_size": 4 * hidden_size,
    }  # fmt: skip


# Devlin 2018, section 3; Turc 2019 (README of google-research/bert); Liu 2019, table 9; Radford 2018, section 4.1;
# Radford 2019, table 2 (heads: hparams.json of the released models).
TINY, MINI, SMALL, MEDIUM = shape(2, 128, 2), shape(4, 256, 4), shape(4, 512, 8), shape(8, 512, 8)
BASE, LARGE = shape(12, 768, 12), shape(24, 1024, 16)
SIZES = {"tiny": TINY, "mini": MINI, "small": SMALL, "medium": MEDIUM, "base": BASE, "large": LARGE}
# bert-docstrings names the source of each.
# multilingual.md of google-research/bert.
MBERT: Values = {
    "model.vocab_size": 119_547,  # bert_config.json of multi_cased_L-12_H-768_A-12
    "data.blend": "temperature",
    "data.temperature": 1 / 0.7,  # S=0.7
}
# Conneau 2020 = arXiv:1911.02116.
XLMR: Values = {
    "model.family": "xlm_roberta",
    "model.vocab_size": 250_002,  # section 3.1: 250k; sentencepiece.bpe.model of the release, and its special tokens
    "data.blend": "temperature",
    "data.temperature": 1 / 0.3,  # section 3.1: alpha 0.3
    "training.max_steps": 1_500_000,  # section 3.2
}
WHOLE_WORD: Values = {"objective.whole_word": True}  # README of google-research/bert, May 31st, 2019
PUBLISHED: dict[str, Values] = {  # RECIPE-phaseN: of its phase N
    **{f"bert-{size}": BERT_PHASE_1 | values for size, values in SIZES.items()},
    **{f"bert-{size}-phase2": BERT_PHASE_2 | values for size, values in SIZES.items()},
    **{f"bert-{size}-lamb": LAMB_PHASE_1 | SIZES[size] for size in ("base", "large")},
    **{f"bert-{size}-lamb-phase2": LAMB_PHASE_2 | SIZES[size] for size in ("base", "large")},
    "roberta-base": ROBERTA | BASE,
    "roberta-base-fairseq": ROBERTA | BASE | FAIRSEQ,
    "roberta-large": ROBERTA | LARGE | ROBERTA_LARGE,
    "spanbert-base": SPANBERT | BASE,
    "spanbert-large": SPANBERT | LARGE,
    "albert-base": ALBERT | BASE,
    "albert-large": ALBERT | LARGE,
    "albert-xlarge": ALBERT | shape(24, 2048, 32),
    "albert-xxlarge": ALBERT | shape(12, 4096, 64) | NO_DROPOUT,
    "distilbert-base": later.DISTILBERT,
    "electra-small": later.ELECTRA | shape(12, 256, 4) | generator(256 // 4),  # table 6
    "electra-base": later.ELECTRA | BASE | generator(768 // 3) | {  # table 6
        "model.embedding_size": 768, "data.seq_length": 512, "objective.max_predictions": 79,
        "optimizer.learning_rate": 2e-4, "training.global_batch_size": 256, "training.max_steps": 766_000,
    },
    "tinybert-4l": later.TINYBERT | later.TINYBERT_4,
    "tinybert-6l": later.TINYBERT | shape(6, 768, 12),
    "modernbert-base": later.MODERNBERT,
    "modernbert-base-phase2": later.MODERNBERT_PHASE_2,
    "modernbert-base-phase3": later.MODERNBERT_PHASE_2 | later.ONE_MINUS_SQRT,
    "modernbert-large": later.MODERNBERT | later.MODERNBERT_LARGE,
    "modernbert-large-phase2": later.MODERNBERT | later.MODERNBERT_LARGE | later.MODERNBERT_LARGE_RESTART,
    "modernbert-large-phase3": later.MODERNBERT_PHASE_2 | later.MODERNBERT_LARGE_PHASE_2,
    "modernbert-large-phase4": later.MODERNBERT_PHASE_2 | later.MODERNBERT_LARGE_PHASE_2 | later.ONE_MINUS_SQRT | {
        # modernbert-large-learning-rate-decay.yaml
        "schedule.final_learning_rate": 5e-8, "training.global_batch_size": 624, "training.max_steps": 9781,
    },
    "bert-base-h200": MOSAIC_BASE | BASE,
    "bert-large-h100x8": MOSAIC_BASE | LARGE | {  # ours, by the ratio of Liu 2019, table 9
        "optimizer.learning_rate": 3.3e-4, "optimizer.weight_decay": 0.03, "schedule.final_learning_rate": 6.6e-6,
    },
    "gpt1": GPT1 | BASE,
    "gpt2-small": GPT2 | BASE,
    "gpt2-medium": GPT2 | LARGE | GPT2_MEDIUM,
    "gpt2-small-h200": GPT2 | BASE | NO_DROPOUT,
    "gpt2-medium-h100x8": GPT2 | LARGE | GPT2_MEDIUM | NO_DROPOUT,
    "bert-wwm-large": BERT_PHASE_1 | LARGE | WHOLE_WORD,
    "bert-wwm-large-phase2": BERT_PHASE_2 | LARGE | WHOLE_WORD,
    "mbert-base": BERT_PHASE_1 | BASE | MBERT,
    "mbert-base-phase2": BERT_PHASE_2 | BASE | MBERT,
    "xlm-roberta-base": ROBERTA | BASE | XLMR,
    "llama-125m": LLAMA_125M,
    "llama-1b": LLAMA_1B,
    "roberta-base-4096": ROBERTA | BASE | LONGFORMER,
    "llama-1b-32k": LLAMA_1B | LONG_LLAMA,
    "llama-1b-128k": LLAMA_1B | LONG_LLAMA | LONGER_LLAMA,
    "t5-base-4096": later.T5 | later.T5_BASE | LONG_T5,
    "xlnet-base": later.XLNET | BASE,
    "unilm-base": UNILM | BASE,
    "t5-small": later.T5,
    "t5-base": later.T5 | later.T5_BASE,
    "t5-v1_1-base": later.T5 | later.T5_BASE | later.T5_1_1,
    "elmo-original": later.ELMO,
    "elmo-small": later.ELMO | later.ELMO_SMALL,
    "bart-base": later.BART,
    "bart-large": later.BART | later.BART_LARGE,
    "mbart-base": later.BART | later.MBART,
    "mbart-large": later.BART | later.BART_LARGE | later.MBART,
}  # fmt: skip
NOT_PUBLISHED = {"training.micro_batch_size", "training.precision", "data.num_workers"}


def test_the_table_has_every_published_recipe() -> None:
    """Others are ours: small ones for laptops and docstrings, and for BabyLM."""
    ends, begins = ("-laptop", "-docstrings"), ("babylm-",)
    ours = {name for name in shipped_recipes()
            if name.endswith(ends) or name.startswith(begins) or "laptop-phase" in name}  # fmt: skip
    published = set(shipped_recipes()) - ours - {"roberta-tiny", "roberta-small"}
    phases = {name: range(2, len(load_config(name).phases) + 1) for name in published}
    assert set(PUBLISHED) == published | {f"{name}-phase{one}" for name, more in phases.items() for one in more}


def recipe_and_phase(name: str) -> tuple[RunConfig, RunPhase]:
    recipe, _, number = name.partition("-phase")
    config = load_config(recipe)
    return config, run_phases(config)[int(number or 1) - 1]


@each("name", PUBLISHED)
def test_a_recipe_has_the_published_values(name: str) -> None:
    phase = recipe_and_phase(name)[1]
    flat = flatten(phase.config.model_dump())
    flat["initialize_moments"] = phase.number > 0 and phase.phase.moments != "fresh"
    assert {key: flat.get(key, "no such setting") for key in PUBLISHED[name]} == PUBLISHED[name]


@each("name", PUBLISHED)
def test_every_setting_that_decides_the_result_is_in_the_table(name: str) -> None:
    """What a recipe sets in these sections, itself, through `extends` or in a phase so far, has an entry."""
    config, phase = recipe_and_phase(name)
    for section in ("model", "data", "objective", "optimizer", "schedule", "training"):
        changed = (one.set.get(section, {}) for one in config.phases[: phase.number + 1])
        written = {f"{section}.{key}" for keys in (getattr(config, section).model_fields_set, *changed) for key in keys}
        assert written - set(PUBLISHED[name]) - NOT_PUBLISHED == set()


def flatten(values: Values) -> Values:
    """Map `section.key`, or the name of a setting outside the sections, to its value."""
    inside = {name: flatten(settings) for name, settings in values.items() if isinstance(settings, dict)}
    return values | {f"{name}.{key}": value for name, settings in inside.items() for key, value in settings.items()}


ELMO_MILLIONS = {"elmo-original": 93.6, "elmo-small": 13.6}
"""allennlp.org/elmo, which counts no softmax."""


@each("name", ELMO_MILLIONS)
def test_an_elmo_has_the_published_number_of_parameters_before_the_softmax(name: str) -> None:
    from ctxlm_ds.training.measure import describe

    config = load_config(name)
    model, count = config.model.model_dump(), describe(config).num_parameters
    count -= model["vocab_size"] * (model["projection_size"] + 1)
    assert round(count / 1e6, 1) == ELMO_MILLIONS[name]
    assert config.training.global_batch_size * config.data.seq_length == 7680


PARAMETERS = {
    "bert-base": 110, "bert-large": 336, "gpt2-small-h200": 124, "gpt2-medium-h100x8": 355, "mbert-base": 179,
    "xlm-roberta-base": 278, "llama-125m": 125, "llama-1b": 1236, "t5-small": 61, "t5-base": 223,
    "t5-v1_1-base": 248, "bart-base": 139, "bart-large": 406, "mbart-large": 611,
}  # fmt: skip
"""Millions with all heads, as the files of bert-base-uncased, bert-large-uncased, gpt2, gpt2-medium,
bert-base-multilingual-cased, xlm-roberta-base (XLM-R's paper: 270), facebook/MobileLLM-125M,
meta-llama/Llama-3.2-1B, google-t5/t5-small, t5-base, google/t5-v1_1-base, facebook/bart-base, bart-large and
mbart-large-cc25 have."""


@each("name", PARAMETERS)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    from ctxlm_ds.training.measure import describe

    assert round(describe(load_config(name)).num_parameters / 1e6) == PARAMETERS[name]


@each("name", ["llama-125m", "llama-1b"])
def test_a_token_costs_two_operations_per_weight_and_four_per_pair_of_positions(name: str) -> None:
    """Kaplan 2020 (arXiv:2001.08361), table 1, with the scores of all pairs. Grouped heads change the weights only."""
    from ctxlm_ds.training.measure import describe, measure

    config = load_config(name)
    model, length = config.model.model_dump(), config.data.seq_length
    shapes = describe(config).shapes
    weights = sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)  # the tied table once: the head
    attention = 4 * model["num_layers"] * length * model["hidden_size"]
    assert sum(layer.at(1).flops for layer in measure(config).layers) == length * (2 * weights + attention)
