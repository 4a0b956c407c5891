"""Impossible combinations: each is found, told with both values, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.check import (
    check_config,
    find_problems,
    schedule_warnings,
    total_schedule_steps,
    unused_settings,
    warmup_schedule_steps,
)
from ctxlm_ds.recipe.schema import RunConfig


def config_of(**sections: dict[str, Any] | str) -> RunConfig:
    return RunConfig.model_validate(sections)


def chosen(family: str, objective: str, sample_format: str) -> dict[str, dict[str, Any]]:
    return {"model": {"family": family}, "objective": {"name": objective}, "data": {"sample_format": sample_format}}


GPT2 = chosen("gpt2", "causal_lm", "blocks")
ELECTRA = chosen("electra", "replaced_tokens", "doc_segments")


def gpt2(**sections: dict[str, Any]) -> RunConfig:
    """GPT-2's recipe; `sections` replace its settings."""
    return config_of(**sections | {name: {**GPT2[name], **sections.get(name, {})} for name in GPT2})


CASES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"model": {"hidden_size": 100, "num_attention_heads": 8}}, "model.num_attention_heads", ["8", "100", "10 does"]),
    ({"model": {"hidden_dropout": 1.0}}, "model.hidden_dropout", ["below 1"]),
    ({"model": {"attention_dropout": 1.0}}, "model.attention_dropout", ["below 1"]),
    ({"model": {"type_vocab_size": 1}}, "model.type_vocab_size", ["segment_pair", "set it to 2"]),
    ({"data": {"seq_length": 513}}, "data.seq_length", ["513", "max_position_embeddings 512"]),
    ({"data": {"seq_length": 4}}, "data.seq_length", ["3 positions are special", "at least 5"]),
    ({"data": {"packing": True, "max_sequences_per_row": 1}}, "data.max_sequences_per_row", ["packs nothing"]),
    ({"data": {"train": ["corpus.bin"]}}, "data.train[0]", ["without the extension: corpus"]),
    (
        {"data": {"validation": [{"name": "a", "path": "p"}, {"name": "a", "path": "q"}]}},
        "data.validation",
        ['2 sources are named "a"'],
    ),
    ({"data": {"validation": [{"name": "a", "path": "p.idx"}]}}, "data.validation[0].path", ["extension: p"]),
    ({"data": {"train": ["a", "b/../a"]}}, "data.train", ["a is listed 2 times", "epochs"]),
    (
        {"data": {"train": [{"path": "a", "name": "x"}, {"path": "b", "name": "x"}]}},
        "data.train",
        ['2 sources are named "x"'],
    ),
    (
        {"data": {"train": ["a", {"path": "b", "weight": 2.5}]}},
        "data.train[1].weight",
        ["2.5", "no effect with data.blend concatenate", "weighted or megatron"],
    ),
    (
        {"data": {"train": [{"path": "a", "weight": 1, "epochs": 3}], "blend": "weighted"}},
        "data.train[0].epochs",
        ["3 has no effect with data.blend weighted", "concatenate"],
    ),
    (
        {"data": {"train": [{"path": "a", "weight": 1}, "b"], "blend": "weighted"}},
        "data.train[1].weight",
        ["a weight for every source"],
    ),
    (
        {"data": {"train": [{"path": "a", "weight": 1}, "b"], "blend": "megatron"}},
        "data.train[1].weight",
        ["for every source, or for none"],
    ),
    *(
        ({"data": {"split": split}}, "data.split", [f'"{split}"', "969,30,1"])
        for split in ("", "0,1,0", "1,2,3,4", "9;1", "-1,2", "90,,10", "nan", "1e2")
    ),
    (
        {"data": {"validation": [{"name": "v", "path": "a", "part": "valid"}]}},
        "data.validation[0].part",
        ["valid", "no parts without data.split"],
    ),
    (
        {"data": {"train": ["a"], "split": "9,1", "validation": [{"name": "v", "path": "./a"}]}},
        "data.validation[0].part",
        ["all of ./a", "valid or test"],
    ),
    ({"name": "a/b"}, "name", ["cannot name a folder"]),
    ({"objective": {"keep_prob": 0.6, "random_prob": 0.5}}, "objective.random_prob", ["0.5", "0.6", "more than 1"]),
    ({"objective": {"mask_prob": 0.0}}, "objective.mask_prob", ["above 0"]),
    ({"evaluation": {"mask_prob": 0.2}}, "evaluation.mask_prob", ["0.2", "at most objective.mask_prob 0.15"]),
    ({"evaluation": {"mask_prob": 0.0}}, "evaluation.mask_prob", ["above 0"]),
    (
        {"evaluation": {"downstream": [{"task": "cola", "data": "a", "every_steps": 1500}]}},
        "evaluation.downstream[0].every_steps",
        ["1500", "checkpoint.interval_steps 1000"],
    ),
    (
        {"evaluation": {"downstream": [{"task": f"{at}/a.yaml", "data": "a", "every_steps": 1000} for at in "xy"]}},
        "evaluation.downstream[1].task",
        ["a is named twice"],
    ),
    (
        {"evaluation": {"downstream": [{"task": "x/hf.yaml", "data": "a", "every_steps": 1000}]}},
        "evaluation.downstream[0].task",
        ["hf is the name of another folder", "rename"],
    ),
    (GPT2 | {"evaluation": {"mask_prob": 0.15}}, "evaluation.mask_prob", ["causal_lm masks no tokens", "set null"]),
    ({"objective": {"max_predictions": 129}}, "objective.max_predictions", ["129", "seq_length 128"]),
    (
        {"objective": {"name": "masked_lm", "max_predictions": 7}}
        | {"data": {"packing": True, "sample_format": "doc_sentences"}},
        "objective.max_predictions",
        ["7 is less than data.max_sequences_per_row 8"],
    ),
    (
        ELECTRA | {"objective": ELECTRA["objective"] | {"generator_weight": 0.0, "discriminator_weight": 0.0}},
        "objective.discriminator_weight",
        ["all weights are 0"],
    ),
    (
        ELECTRA | {"objective": ELECTRA["objective"] | {"boundary_weight": 1.0}},
        "objective.boundary_weight",
        ["1.0 needs the model outputs boundary_logits", "electra does not compute; set 0.0"],
    ),
    (
        {"objective": {"name": "masked_seq2seq"}, "model": {"family": "t5"}}
        | {"data": {"sample_format": "chunks", "seq_length": 1}},
        "data.seq_length",
        ["the first token of a text is never masked"],
    ),
    ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas", ["0.9, 1.0"]),
    ({"optimizer": {"name": "lamb"}, "kernels": {"optimizer": "deepspeed"}}, "kernels.optimizer", ["no exact lamb"]),
    (
        {"optimizer": {"name": "from_ds_config"}, "kernels": {"optimizer": "torch"}},
        "kernels.optimizer",
        ["from_ds_config", "set auto"],
    ),
    (
        {"optimizer": {"name": "from_ds_config"}, "initialize_moments": True},
        "initialize_moments",
        ["unknown before its first update"],
    ),
    ({"schedule": {"warmup_steps": 1001}}, "schedule.warmup_steps", ["1001", "1000"]),
    ({"schedule": {"warmup_steps": 1, "warmup_fraction": 0.1}}, "schedule.warmup_fraction", ["0.1", "1", "keep one"]),
    (
        {"schedule": {"name": "wsd", "warmup_fraction": 0.6, "decay_fraction": 0.5}},
        "schedule.decay_fraction",
        ["500 steps of decay", "600 of warmup"],
    ),
    ({"schedule": {"final_learning_rate": 1.0}}, "schedule.final_learning_rate", ["above the peak", "0.0001"]),
    ({"schedule": {"total_steps": 500}}, "schedule.total_steps", ["500", "1000", "learning rate 0"]),
    ({"schedule": {"total_steps": 1000, "start_step": 900}}, "schedule.total_steps", ["1899", "start_step 900"]),
    ({"profiler": {"num_steps": 5, "start_step": 1000}}, "profiler.start_step", ["never reached"]),
    (
        {"training": {"precision": "bf16", "grad_accum_dtype": "fp16"}},
        "training.grad_accum_dtype",
        ["fp16", "bf16", "set fp32 or bf16"],
    ),
    ({"training": {"precision": "fp32", "grad_accum_dtype": "bf16"}}, "training.grad_accum_dtype", ["set fp32"]),
    (
        {"training": {"global_batch_size": 100, "micro_batch_size": 8}},
        "training.global_batch_size",
        ["100", "micro_batch_size 8", "a multiple of 8 x the data-parallel ranks", "micro_batch_size to 5"],
    ),
    (
        chosen("gpt2", "masked_lm", "blocks"),
        "objective.name",
        [
            "needs the model outputs predicted_logits",
            "gpt2 does not compute",
            "set objective.name to causal_lm",
            "bert, roberta, xlm_roberta, albert, distilbert, tinybert, modernbert or megatron_bert",
        ],
    ),
    (
        chosen("gpt2", "masked_lm_nsp", "blocks"),
        "objective.name",
        ["predicted_logits and sentence_logits", "causal_lm, or model.family to bert, albert or megatron_bert"],
    ),
    (
        chosen("gpt2", "causal_lm", "full_sentences"),
        "data.sample_format",
        ["no token after the last input for objective.name causal_lm", "set data.sample_format to blocks"],
    ),
    (
        chosen("bert", "masked_lm", "blocks"),
        "data.sample_format",
        ["objective.name masked_lm does not read", "full_sentences, doc_sentences or chunks"],
    ),
    (
        chosen("bert", "masked_lm_nsp", "doc_sentences"),
        "data.sample_format",
        ["no second segment", "set data.sample_format to segment_pair or sentence_pair, or objective.name to mask"],
    ),
    (
        chosen("bert", "masked_lm_nsp", "doc_segments"),
        "data.sample_format",
        ["doc_segments gives its segments no label for", "set data.sample_format to segment_pair or sentence_pair"],
    ),
    (
        chosen("albert", "masked_lm_sop", "segment_pair"),
        "data.sample_format",
        ["next_sentence, objective.name masked_lm_sop reads sentence_order", "sample_format to sentence_o"],
    ),
]


@pytest.mark.parametrize(("sections", "path", "words"), CASES)
def test_each_impossible_combination(sections: dict[str, Any], path: str, words: list[str]) -> None:
    problems = find_problems(config_of(**sections))
    assert [problem.path for problem in problems] == [path]
    for word in words:
        assert word in problems[0].text


@pytest.mark.parametrize("size", [0, -1, 10**9])
def test_a_world_without_ranks_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="expected a number of ranks from 1 to 1,000,000"):
        check_config(RunConfig(), size)


def test_proposed_batch_sizes_are_accepted() -> None:
    for rows, micro, ranks in [(100, 8, 1), (256, 8, 3), (10, 4, 4), (1024, 48, 2)]:
        problem = find_problems(config_of(training={"global_batch_size": rows, "micro_batch_size": micro}), ranks)[0]
        choices = problem.text.split("set it to ")[1].split(",")[0].split(" or ")
        for choice in choices:
            assert not find_problems(
                config_of(training={"global_batch_size": choice, "micro_batch_size": micro}), ranks
            )
        if "micro_batch_size to " in problem.text:
            other = problem.text.split("micro_batch_size to ")[1]
            assert not find_problems(config_of(training={"global_batch_size": rows, "micro_batch_size": other}), ranks)


def test_special_tokens_leave_room_for_text() -> None:
    roberta = {"model": {"family": "roberta"}, "objective": {"name": "masked_lm"}}
    assert not find_problems(config_of(**roberta, data={"sample_format": "full_sentences", "seq_length": 4}))
    assert find_problems(config_of(**roberta, data={"sample_format": "full_sentences", "seq_length": 3}))
    assert find_problems(config_of(**roberta, data={"sample_format": "segment_pair", "seq_length": 5}))
    assert not find_problems(config_of(**roberta, data={"sample_format": "segment_pair", "seq_length": 6}))


def test_length_of_schedule_and_warmup() -> None:
    config = config_of(schedule={"warmup_fraction": 0.2843}, training={"max_steps": 7038})
    assert (
        total_schedule_steps(config.schedule, config.training.max_steps),
        warmup_schedule_steps(config.schedule, config.training.max_steps),
    ) == (7038, 2000)
    config = config_of(schedule={"warmup_fraction": 0.29}, training={"max_steps": 100})
    assert warmup_schedule_steps(config.schedule, config.training.max_steps) == 29
    config = config_of(schedule={"start_step": 900}, training={"max_steps": 100})
    assert (
        total_schedule_steps(config.schedule, config.training.max_steps),
        warmup_schedule_steps(config.schedule, config.training.max_steps),
    ) == (1000, 0)


def test_settings_without_effect_are_named() -> None:
    config = config_of(
        data={"sample_format": "full_sentences", "max_sequences_per_row": 4},
        objective={"name": "masked_lm"},
        optimizer={"name": "from_ds_config", "eps": 1e-8},
        schedule={"name": "constant", "final_learning_rate": 1e-5},
        training={"initial_loss_scale_power": 8, "compile_mode": "reduce-overhead"},
        checkpoint={"interval_steps": 300, "keep_every_steps": 1000},
    )
    named = [sentence.split(":")[0] for sentence in unused_settings(config)]
    assert sorted(named) == [
        "checkpoint.keep_every_steps",
        "data.max_sequences_per_row",
        "optimizer.eps",
        "schedule.final_learning_rate",
        "training.compile_mode",
        "training.initial_loss_scale_power",
    ]
    assert unused_settings(RunConfig()) == []


@pytest.mark.parametrize(
    ("objective", "idle"),
    [
        ({"name": "masked_lm", "random_prob": 0.0, "random_tokens": "corpus"}, ["random_tokens"]),
        ({"name": "tinybert", "whole_word": True, "masking": "static"}, ["masking", "whole_word"]),
        ({"name": "tinybert", "mask_prob": 0.15, "whole_word": True}, []),
        ({"name": "tinybert", "hidden_weight": 0, "attention_weight": 0, "layer_map": [1]}, ["layer_map"]),
        ({"name": "distillation", "soft_target_weight": 0, "temperature": 4, "soft_targets": "masked"},
         ["temperature"]),
        ({"name": "text_infilling", "mask_ratio": 0, "random_ratio": 0.5}, ["random_ratio"]),
    ],
)  # fmt: skip
def test_settings_of_objectives_without_effect(objective: dict[str, Any], idle: list[str]) -> None:
    named = [sentence.split(":")[0] for sentence in unused_settings(config_of(objective=objective))]
    assert sorted(named) == [f"objective.{name}" for name in idle]


def test_a_warmup_that_ends_after_the_run_is_told() -> None:
    def warnings(start_step: int, max_steps: int) -> list[str]:
        schedule = {"warmup_steps": 100, "total_steps": 1000, "start_step": start_step}
        return schedule_warnings(config_of(schedule=schedule).schedule, max_steps)

    (told,) = warnings(0, 100)
    assert told.startswith("the warmup of 100 steps is not over when the run ends (training.max_steps 100)")
    assert (
        warnings(0, 101)
        == warnings(90, 20)
        == schedule_warnings(RunConfig().schedule, RunConfig().training.max_steps)
        == []
    )


def test_rates_follow_the_width_under_some_optimizers_only() -> None:
    width = {"hidden_size": 768, "base_width": 256}
    for optimizer in ({"name": "lamb"}, {"name": "muon"}, {"name": "adafactor"}):
        found = find_problems(gpt2(model=width, optimizer=optimizer))
        assert [problem.path for problem in found] == ["model.base_width"] and "matrix_scale original" in found[0].text
    for optimizer in ({"name": "adamw"}, {"name": "stable_adamw"}, {"name": "muon", "matrix_scale": "original"}):
        assert find_problems(gpt2(model=width, optimizer=optimizer)) == []


def test_a_gpt2_and_a_gpt1_are_possible() -> None:
    assert find_problems(gpt2()) == []
    assert find_problems(gpt2(model={"family": "gpt1"})) == []
    assert find_problems(gpt2(data={"reset_at_documents": False, "seq_length": 1})) == []


def test_a_family_alone_is_told_all_that_goes_with_it() -> None:
    problems = find_problems(RunConfig.model_validate({"model": {"family": "gpt2"}}))
    assert [problem.path for problem in problems] == ["objective.name", "data.sample_format"]
    assert "set data.sample_format to blocks" in problems[1].text


def test_slots_without_effect_are_named() -> None:
    idle = gpt2(data={"reset_at_documents": False, "max_sequences_per_row": 4})
    assert [sentence.split(":")[0] for sentence in unused_settings(idle)] == ["data.max_sequences_per_row"]
    assert unused_settings(gpt2(data={"max_sequences_per_row": 1})) == []


def test_a_default_that_trains_nothing_is_no_advice() -> None:
    weights = {"embedding_weight": 0, "hidden_weight": 0, "attention_weight": 0, "prediction_weight": 1}
    config = config_of(objective={"name": "tinybert", **weights}, data={"sample_format": "doc_segments"})
    (problem,) = (found for found in find_problems(config) if found.path.startswith("objective"))
    assert problem.path == "objective.name" and "needs the model outputs class_logits" in problem.text
