"""Published values, typed a second time with their place in the source, against every shipped recipe.

A value here is what the source has, not what a recipe has. Where a source has none, the entry says so ("ours" or
"inferred") and only fixes that a change is deliberate.
"""

from __future__ import annotations

import pytest

from ctxlm_ds.recipe.load import load_config, shipped_recipes
from tests.each import each
from tests.unit.recipe.published_families import (
    BART,
    BART_LAPTOP,
    BART_LARGE,
    DISTILBERT,
    ELECTRA,
    ELMO,
    ELMO_SMALL,
    MBART,
    MODERNBERT,
    MODERNBERT_LARGE,
    MODERNBERT_LARGE_PHASE_2,
    MODERNBERT_LARGE_RESTART,
    MODERNBERT_PHASE_2,
    ONE_MINUS_SQRT,
    T5,
    T5_1_1,
    T5_BASE,
    T5_LAPTOP,
    TINYBERT,
    TINYBERT_4,
    XLNET,
    XLNET_LAPTOP,
)
from tests.unit.recipe.published_settings import (
    ALBERT,
    BERT,
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
    Values,
)  # fmt: skip
from tests.unit.recipe.published_unilm import UNILM, UNILM_LAPTOP

POSITION_TABLE = "model.max_position_embeddings"
# Devlin 2018 = arXiv:1810.04805; code = google-research/bert.
NO_DROPOUT: Values = {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}  # Lan 2020, section 4.9
ROBERTA_LARGE: Values = {"optimizer.learning_rate": 4e-4, "schedule.warmup_steps": 30_000}  # table 9
FAIRSEQ: Values = {  # config/pretraining/base.yaml
    "optimizer.learning_rate": 5e-4, "schedule.warmup_steps": 10_000, "training.global_batch_size": 2048,
    "training.max_steps": 125_000,
}  # fmt: skip
GPT2_MEDIUM: Values = {"optimizer.learning_rate": 3e-4, "schedule.final_learning_rate": 3e-5}  # Brown 2020, table 2.1


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
LAPTOP: Values = {  # ours: 128 positions, an hour of two cores
    **MINI, "model.vocab_size": None, "model.max_position_embeddings": 128, "data.seq_length": 128,
    "optimizer.learning_rate": 1e-3, "optimizer.gradient_clipping": 1.0, "schedule.warmup_steps": None,
    "schedule.warmup_fraction": 0.06, "training.global_batch_size": 64, "training.max_steps": 8000,
}  # fmt: skip
# bert-docstrings names the source of each.
DOCSTRINGS: Values = {
    **TINY,  # Turc 2019
    "model.family": "bert",
    "model.vocab_size": 4096,  # ours
    "model.max_position_embeddings": 64,  # ours
    "model.hidden_dropout": 0.0,  # ours
    "model.attention_dropout": 0.0,  # ours
    "model.initializer_range": 0.09,  # ours: 1 / sqrt(width)
    "data.seq_length": 64,  # ours
    "data.sample_format": "doc_sentences",  # Liu 2019
    "data.separate_sentences": False,  # Warner 2024
    "data.packing": True,  # Warner 2024
    "objective.name": "masked_lm",  # Liu 2019
    "objective.mask_prob": 0.3,  # Warner 2024
    "optimizer.name": "muon",  # Jordan 2024
    "optimizer.learning_rate": 1e-2,  # ours
    "optimizer.matrix_learning_rate": 0.02,  # Muon's default
    "optimizer.matrix_scale": "original",  # muon.py: max(1, rows / columns) ** 0.5
    "optimizer.betas": (0.9, 0.98),  # Warner 2024
    "optimizer.eps": 1e-8,  # ours
    "optimizer.weight_decay": 0.01,  # Devlin 2018
    "optimizer.gradient_clipping": 1.0,  # Devlin 2018
    "schedule.name": "linear",  # Devlin 2018
    "schedule.warmup_fraction": 0.05,  # ours
    "training.global_batch_size": 32,  # ours
    "training.max_steps": 4500,  # ours
}
MASKS_AND_PACKING = ("objective.mask_prob", "data.separate_sentences", "data.packing")
ENCODER_ONLY = (*MASKS_AND_PACKING, "model.max_position_embeddings", "model.initializer_range")
ELECTRA_DOCSTRINGS: Values = {
    "model.family": "electra", "model.embedding_size": 128, "model.generator_hidden_size": 128,
    "model.generator_num_layers": 2, "model.generator_num_attention_heads": 2,
    "model.generator_intermediate_size": 512, "objective.name": "replaced_tokens",
    "objective.keep_prob": 0.15, "objective.random_prob": 0.0, "training.max_steps": 2800,
}  # fmt: skip
ROBERTA_TINY: Values = {  # ours
    "model.vocab_size": None, "model.max_position_embeddings": 128, "data.seq_length": 128,
    "optimizer.learning_rate": 1e-3, "optimizer.gradient_clipping": 1.0, "schedule.warmup_steps": 500,
    "training.global_batch_size": 256, "training.max_steps": 10_000,
}  # fmt: skip
BERT_LAPTOP: Values = BERT | LAPTOP | {  # ours
    "model.initializer": "normal", "data.num_duplicates": 1, "objective.masking": "dynamic",
    "objective.special_tokens": "never", "objective.max_predictions": None, "schedule.total_steps": None,
    "schedule.decay_from": "warmup",
}  # fmt: skip
SHORT_SHARE_ROWS: Values = {"data.packing": True, "data.max_sequences_per_row": 4}  # ours, for small runs
ADAMW_OF_BERT: Values = {  # ours: the optimizer of bert-laptop
    "optimizer.name": "adamw", "optimizer.eps": 1e-6, "optimizer.decay_biases": False,
    "schedule.final_learning_rate": 0.0, "schedule.decay_from": "warmup",
}  # fmt: skip
LAPTOP_PHASES: Values = {  # ours
    "model.max_position_embeddings": 512, "schedule.warmup_steps": 480, "schedule.warmup_fraction": None,
    "schedule.total_steps": 8000, "training.max_steps": 7200,
}  # fmt: skip
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
PUBLISHED: dict[str, Values] = {
    **{f"bert-{size}": BERT_PHASE_1 | values for size, values in SIZES.items()},
    **{f"bert-{size}-phase2": BERT_PHASE_2 | values for size, values in SIZES.items()},
    **{f"bert-{size}-lamb-phase1": LAMB_PHASE_1 | SIZES[size] for size in ("base", "large")},
    **{f"bert-{size}-lamb-phase2": LAMB_PHASE_2 | SIZES[size] for size in ("base", "large")},
    "roberta-base": ROBERTA | BASE,
    "roberta-base-fairseq": ROBERTA | BASE | FAIRSEQ,
    "roberta-large": ROBERTA | LARGE | ROBERTA_LARGE,
    "roberta-tiny": ROBERTA | TINY | ROBERTA_TINY,
    "roberta-small": ROBERTA | SMALL | ROBERTA_TINY | {"optimizer.learning_rate": 5e-4},
    "spanbert-base": SPANBERT | BASE,
    "spanbert-large": SPANBERT | LARGE,
    "spanbert-laptop": SPANBERT | LAPTOP | ADAMW_OF_BERT | SHORT_SHARE_ROWS | {"training.max_steps": 8000},
    "albert-base": ALBERT | BASE,
    "albert-large": ALBERT | LARGE,
    "albert-xlarge": ALBERT | shape(24, 2048, 32),
    "albert-xxlarge": ALBERT | shape(12, 4096, 64) | NO_DROPOUT,
    "albert-laptop": ALBERT | LAPTOP | ADAMW_OF_BERT | SHORT_SHARE_ROWS | {
        "model.initializer": "truncated_normal", "data.num_duplicates": 1, "objective.masking": "dynamic",
        "objective.special_tokens": "never", "objective.max_predictions": None,
    },
    "distilbert-base": DISTILBERT,
    "distilbert-laptop": DISTILBERT | LAPTOP | ADAMW_OF_BERT | SHORT_SHARE_ROWS | {  # ours: half of bert-laptop
        "model.num_layers": 2, "teacher.model.num_layers": 4, "teacher.model.hidden_size": 256,
        "objective.soft_targets": "masked", "objective.special_tokens": "never", "optimizer.betas": (0.9, 0.999),
        "optimizer.weight_decay": 0.01, "optimizer.gradient_clipping": 5.0, "training.max_steps": 2000,
    },
    "electra-small": ELECTRA | shape(12, 256, 4) | generator(256 // 4),  # table 6
    "electra-base": ELECTRA | BASE | generator(768 // 3) | {  # table 6
        "model.embedding_size": 768, "data.seq_length": 512, "objective.max_predictions": 79,
        "optimizer.learning_rate": 2e-4, "training.global_batch_size": 256, "training.max_steps": 766_000,
    },
    "electra-laptop": ELECTRA | LAPTOP | SHORT_SHARE_ROWS | generator(256 // 4) | {
        "model.generator_num_layers": 4, "objective.max_predictions": None, "schedule.decay_from": "warmup",
    },
    "tinybert-4l": TINYBERT | TINYBERT_4,
    "tinybert-6l": TINYBERT | shape(6, 768, 12),
    "tinybert-laptop": TINYBERT | shape(2, 128, 4) | {  # ours: half of bert-laptop
        "model.vocab_size": None, "model.max_position_embeddings": 128, "model.fit_size": 256,
        "optimizer.learning_rate": 1e-3, "training.global_batch_size": 64, "training.max_steps": 4000,
    },
    "modernbert-base": MODERNBERT,
    "modernbert-base-phase2": MODERNBERT_PHASE_2,
    "modernbert-base-phase3": MODERNBERT_PHASE_2 | ONE_MINUS_SQRT,
    "modernbert-large": MODERNBERT | MODERNBERT_LARGE,
    "modernbert-large-restart": MODERNBERT | MODERNBERT_LARGE | MODERNBERT_LARGE_RESTART,
    "modernbert-large-phase2": MODERNBERT_PHASE_2 | MODERNBERT_LARGE_PHASE_2,
    "modernbert-large-phase3": MODERNBERT_PHASE_2 | MODERNBERT_LARGE_PHASE_2 | ONE_MINUS_SQRT | {
        # modernbert-large-learning-rate-decay.yaml
        "schedule.final_learning_rate": 5e-8, "training.global_batch_size": 624, "training.max_steps": 9781,
    },
    "modernbert-laptop": MODERNBERT | LAPTOP | {  # ours
        "model.intermediate_size": 640, "model.local_attention": 32, "data.max_sequences_per_row": 8,
        "optimizer.name": "adamw", "optimizer.weight_decay": 0.01, "schedule.name": "linear",
        "training.batch_ramp": None,
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
    "bert-wwm-laptop": BERT_LAPTOP | SHORT_SHARE_ROWS | WHOLE_WORD,
    "mbert-base": BERT_PHASE_1 | BASE | MBERT,
    "mbert-base-phase2": BERT_PHASE_2 | BASE | MBERT,
    "mbert-laptop": BERT_LAPTOP | SHORT_SHARE_ROWS | MBERT | {"model.vocab_size": None},
    "xlm-roberta-base": ROBERTA | BASE | XLMR,
    "xlm-roberta-laptop": ROBERTA | LAPTOP | XLMR | {"model.vocab_size": None, "training.max_steps": 8000},
    "bert-laptop": BERT_LAPTOP | SHORT_SHARE_ROWS,
    "bert-laptop-phase1": BERT_LAPTOP | SHORT_SHARE_ROWS | LAPTOP_PHASES,
    "bert-laptop-phase2": BERT_LAPTOP | SHORT_SHARE_ROWS | LAPTOP_PHASES | {
        "data.seq_length": 512, "schedule.start_step": 7200, "training.global_batch_size": 16,
        "training.max_steps": 800,
    },
    "roberta-laptop": ROBERTA | LAPTOP,
    "gpt2-laptop": GPT2 | LAPTOP | {
        "model.hidden_dropout": 0.1, "model.position_initializer_range": None, "data.reset_at_documents": True,
        "schedule.total_steps": None, "schedule.final_learning_rate": 1e-4, "training.global_batch_size": 32,
        "training.max_steps": 2500,
    },
    "llama-125m": LLAMA_125M,
    "llama-1b": LLAMA_1B,
    "llama-laptop": LLAMA_125M | LAPTOP | {  # ours
        "model.num_key_value_heads": 2, "model.intermediate_size": 704, "data.reset_at_documents": True,
        "schedule.total_steps": None, "schedule.final_learning_rate": 1e-4, "training.global_batch_size": 32,
        "training.max_steps": 2500,
    },
    "xlnet-base": XLNET | BASE,
    "xlnet-laptop": {k: v for k, v in (XLNET | LAPTOP | XLNET_LAPTOP).items() if k != POSITION_TABLE},
    "unilm-base": UNILM | BASE,
    "unilm-laptop": UNILM | LAPTOP | UNILM_LAPTOP,
    "t5-small": T5,
    "t5-base": T5 | T5_BASE,
    "t5-v1_1-base": T5 | T5_BASE | T5_1_1,
    "t5-laptop": T5 | T5_LAPTOP,
    "t5-v1_1-laptop": T5 | T5_LAPTOP | T5_1_1 | {"model.intermediate_size": 684},
    "t5-docstrings": {key: value for key, value in DOCSTRINGS.items() if key not in ENCODER_ONLY} | T5_1_1 | {
        "model.family": "t5", "model.num_decoder_layers": 2, "model.head_size": 32, "model.intermediate_size": 344,
        "model.num_attention_heads": 4, "model.initializer_factor": 0.1, "data.sample_format": "chunks",
        "objective.name": "span_corruption", "objective.noise_density": 0.25, "objective.mean_span_length": 1.0,
        "optimizer.matrix_learning_rate": 0.008, "training.global_batch_size": 64, "training.max_steps": 3000,
    },
    "bart-docstrings": {key: value for key, value in DOCSTRINGS.items() if key not in MASKS_AND_PACKING} | {
        "model.family": "bart", "model.num_decoder_layers": 2, "model.activation_dropout": 0.0,  # ours
        "data.packing": False, "data.separate_sentences": False,  # Lewis 2020: a text in a row
        "objective.name": "text_infilling", "objective.permute_ratio": 0.0,  # Lewis 2020, table 1
    },
    "elmo-original": ELMO,
    "elmo-small": ELMO | ELMO_SMALL,
    "elmo-laptop": ELMO | {  # ours
        "model.vocab_size": None, "model.projection_size": 128, "model.cell_size": 256, "model.num_sampled": 1024,
        "model.state_dropout": 0.1,
        "model.filters": [(1, 16), (2, 32), (3, 64), (4, 64)], "model.num_highways": 1,
        "training.global_batch_size": 64, "training.max_steps": 3000,
    },
    "bart-base": BART,
    "bart-large": BART | BART_LARGE,
    "bart-laptop": BART | BART_LAPTOP,
    "mbart-base": BART | MBART,
    "mbart-large": BART | BART_LARGE | MBART,
    "mbart-laptop": BART | MBART | BART_LAPTOP,
    "bert-docstrings": DOCSTRINGS,
    "modernbert-docstrings": DOCSTRINGS | {
        "model.family": "modernbert", "model.intermediate_size": 256,
        "model.global_attention_every": 1, "model.global_rotary_base": 10_000.0,
    },
    "electra-docstrings": DOCSTRINGS | ELECTRA_DOCSTRINGS,
    "gpt2-docstrings": {key: value for key, value in DOCSTRINGS.items() if key not in MASKS_AND_PACKING} | {
        "model.family": "gpt2", "model.hidden_activation": "gelu_tanh", "model.layer_norm_eps": 1e-5,
        "model.position_initializer_range": 0.02, "data.sample_format": "blocks", "data.reset_at_documents": False,
        "objective.name": "causal_lm", "training.max_steps": 3200,
    },
    "llama-docstrings": {key: value for key, value in DOCSTRINGS.items() if key not in MASKS_AND_PACKING} | {  # ours
        "model.family": "llama", "model.num_key_value_heads": 1, "model.intermediate_size": 352,
        "model.hidden_activation": "silu", "model.layer_norm_eps": 1e-5, "model.tie_word_embeddings": True,
        "data.sample_format": "blocks", "data.reset_at_documents": False, "objective.name": "causal_lm",
        "training.max_steps": 3200,
    },
}  # fmt: skip
NOT_PUBLISHED = {"training.micro_batch_size", "training.precision", "data.num_workers"}


def test_the_table_has_every_shipped_recipe() -> None:
    assert set(PUBLISHED) == set(shipped_recipes())


@each("name", PUBLISHED)
def test_a_recipe_has_the_published_values(name: str) -> None:
    flat = flatten(load_config(name).model_dump())
    assert {key: flat.get(key, "no such setting") for key in PUBLISHED[name]} == PUBLISHED[name]


@each("name", PUBLISHED)
def test_every_setting_that_decides_the_result_is_in_the_table(name: str) -> None:
    """What a recipe sets in these sections, itself or through `extends`, has an entry."""
    config = load_config(name)
    for section in ("model", "data", "objective", "optimizer", "schedule", "training"):
        written = {f"{section}.{key}" for key in getattr(config, section).model_fields_set}
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

    assert round(describe(load_config(name))[1].num_parameters / 1e6) == PARAMETERS[name]


TOKENS_A_STEP = {"llama-125m": 2.1e6, "llama-1b": 4.2e6}
"""Liu 2024: 32 rows of 2,048 on each of 32 GPUs; Llama 2's table 1: 4M."""


@each("name", TOKENS_A_STEP)
def test_a_step_has_the_published_number_of_tokens(name: str) -> None:
    config = load_config(name)
    assert config.training.global_batch_size * config.data.seq_length == pytest.approx(TOKENS_A_STEP[name], rel=0.01)


@each("name", ["llama-125m", "llama-1b"])
def test_a_token_costs_two_operations_per_weight_and_four_per_pair_of_positions(name: str) -> None:
    """Kaplan 2020 (arXiv:2001.08361), table 1, with the scores of all pairs. Grouped heads change the weights only."""
    from ctxlm_ds.training.measure import describe, measure

    config = load_config(name)
    model, length = config.model.model_dump(), config.data.seq_length
    shapes = describe(config).shapes
    weights = sum(shape[0] * shape[1] for shape in shapes.values() if len(shape) == 2)  # the tied table once: the head
    attention = 4 * model["num_layers"] * length * model["hidden_size"]
    assert measure(config).flops_per_row == length * (2 * weights + attention)
