"""The recipe and DeepSpeed's JSON made into one: filled, refused, and accepted by DeepSpeed itself."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.deepspeed import build_deepspeed_config
from ctxlm_ds.recipe.deepspeed_rules import deepspeed_keys
from ctxlm_ds.recipe.json_source import load_deepspeed_json
from ctxlm_ds.recipe.schema import RunConfig
from tests.each import each
from tests.misspelling import misspell

CONFIG_DIR = Path(__file__).resolve().parents[3] / "ds_configs"
SHIPPED = sorted(path.stem for path in CONFIG_DIR.glob("*.json"))


def config_of(**sections: dict[str, Any]) -> RunConfig:
    training = {"global_batch_size": 64, "micro_batch_size": 8, "precision": "fp32"} | sections.pop("training", {})
    return RunConfig.model_validate({"training": training, **sections})


def problems_of(config: RunConfig, user_json: dict[str, Any], world_size: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build_deepspeed_config(config, user_json, world_size, "my.json")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("my.json with recipe run: ")
    return [line.strip() for line in lines[1:]]


def test_shipped_configs_are_those_promised() -> None:
    offloading = {"zero2-offload", "zero3-offload", "infinity"}
    assert set(SHIPPED) == {"zero0", "zero1", "zero2", "zero3", "pipeline"} | offloading


@each("name, precision", itertools.product(SHIPPED, ("fp32", "bf16", "fp16")))
def test_deepspeed_accepts_what_is_built_from_the_shipped_ones(name: str, precision: str) -> None:
    import deepspeed

    training = {"precision": precision, "grad_accum_dtype": precision, "initial_loss_scale_power": 12}
    config = config_of(training=training, optimizer={"gradient_clipping": 0.5})
    if name == "zero0" and precision != "fp32":
        assert "stage" in problems_of(config, load_deepspeed_json(name))[0]
        return
    built = build_deepspeed_config(config, load_deepspeed_json(name), 1)
    parsed = deepspeed.DeepSpeedConfig(copy.deepcopy(built))
    stages = {"infinity": 3, "pipeline": 1}
    assert parsed.zero_optimization_stage == (stages[name] if name in stages else int(name[4]))
    assert (parsed.train_batch_size, parsed.train_micro_batch_size_per_gpu) == (64, 8)
    assert parsed.gradient_accumulation_steps == 8
    assert parsed.gradient_clipping == 0.5
    assert (parsed.bfloat16_config.enabled, parsed.float16_config.enabled) == (precision == "bf16", precision == "fp16")
    assert parsed.float16_config.initial_scale_power == 12
    assert parsed.grad_accum_dtype == precision
    assert parsed.zero_allow_untested_optimizer
    assert not parsed.wall_clock_breakdown
    assert parsed.steps_per_print > 10**9
    assert parsed.optimizer_name is None
    assert parsed.scheduler_name is None
    offload = parsed.zero_config.offload_optimizer
    assert (offload is not None and offload.device == "cpu") == ("offload" in name)
    if name in ("zero3", "zero3-offload", "infinity"):
        assert parsed.zero_config.param_persistence_threshold == 10 * 768
        assert parsed.zero_config.reduce_bucket_size == 768 * 768


def test_auto_everywhere_is_filled_and_nothing_of_it_is_left() -> None:
    import deepspeed

    user_json = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": "auto",
        "communication_data_type": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "initial_scale_power": "auto", "loss_scale": "auto"},
        "data_types": {"grad_accum_dtype": "auto"},
        "scheduler": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "overlap_comm": "auto",
            "stage3_param_persistence_threshold": "auto",
            "offload_param": {"device": "cpu", "buffer_size": "auto"},
        },
        "pipeline": {"stages": "auto"},
    }
    before = copy.deepcopy(user_json)
    built = build_deepspeed_config(config_of(), user_json, 1)
    assert user_json == before
    assert built.pop("pipeline") == {"stages": "auto"}
    assert '"auto"' not in json.dumps(built)
    assert built["zero_optimization"]["stage3_prefetch_bucket_size"] == int(0.9 * 768 * 768)
    deepspeed.DeepSpeedConfig(built)


def test_owned_keys_may_be_repeated() -> None:
    user_json = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False, "hysteresis": 4},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": 0.01}},
    }
    built = build_deepspeed_config(config_of(), user_json, 2)
    assert "optimizer" not in built
    assert built["fp16"]["hysteresis"] == 4


SAME = ("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")


@pytest.mark.parametrize(
    ("user_json", "words"),
    [
        ({"train_batch_size": 32}, ["train_batch_size: 32 here, but 64", "training.global_batch_size"]),
        ({"train_micro_batch_size_per_gpu": 4}, ["4 here, but 8", "training.micro_batch_size"]),
        ({"gradient_accumulation_steps": 2}, ["2 here, but 8", "micro_batch_size x data-parallel ranks"]),
        ({"gradient_clipping": 0.1}, ["0.1 here, but 1.0", "optimizer.gradient_clipping"]),
        ({"bf16": {"enabled": True}}, ["bf16.enabled: true here, but false", "training.precision"]),
        ({"bfloat16": {"enabled": True}}, ["bf16.enabled: true here, but false"]),
        ({"fp16": {"enabled": True}}, ["fp16.enabled: true here, but false"]),
        ({"fp16": {"initial_scale_power": 12}}, ["12 here, but 16", "training.initial_loss_scale_power"]),
        ({"bf16": True}, ["bf16: true: expected a section"]),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, ['"bf16" here, but "fp32"', "training.grad_accum_dtype"]),
        ({"optimizer": {"type": "Lamb"}}, ['optimizer.type: "Lamb" here, but adamw', "from_ds_config"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}, ["optimizer.params.lr: 1 here, but 0.0001"]),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.98]}}}, ["[0.9, 0.98] here, but [0.9, 0.999]"]),
        ({"optimizer": {"params": {"freeze_step": 3}}}, ["optimizer.params.freeze_step: 3", "from_ds_config"]),
        ({"optimizer": "AdamW"}, ['optimizer: "AdamW": expected a section']),
        ({"scheduler": {"type": "WarmupLR"}}, ["scheduler:", "the recipe's schedule section"]),
        ({"zero_optimization": True}, ["zero_optimization: true: expected a section"]),
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage: 4: expected one of 0, 1, 2, 3"]),
        ({"zero_optimisation": {"stage": 2}}, ["zero_optimisation:", "did you mean zero_optimization?"]),
        ({"gradient_cliping": 1.0}, ["did you mean gradient_clipping?"]),
        ({"zero_optimization": {"stge": 1}}, ["zero_optimization.stge", "did you mean zero_optimization.stage?"]),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
            ["zero_optimization.offload_optimizer.devise", "offload_optimizer.device?"],
        ),
        ({"flops_profiler": {"enable": True}}, ["flops_profiler.enable", "did you mean flops_profiler.enabled?"]),
        ({"curriculum_learning": {"enabled": True}}, ["changes the shape of the batches", "initialize_from"]),
        (
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
            ["curriculum_learning.enabled", "changes the shape of the batches"],
        ),
        ({"data_efficiency": {"enabled": True}}, ["data_efficiency.enabled", "loader of ctxlm_ds"]),
        ({"sparse_attention": {"mode": "fixed"}}, ["sparse_attention: DeepSpeed Sparse Attention has been removed"]),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, ["mics_shard_size", "has been removed"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["stage 0 keeps", "use stage 1, 2 or 3"]),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, ["stage 2 does not partition"]),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            ["offload_optimizer.ratio: 0.5", "nor a checkpoint reaches the optimizer"],
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            ["offload_optimizer.nvme_path: missing"],
        ),
        (
            {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
            ["compute_grad_norm: false", "gradient norm"],
        ),
        ({"zero_optimization": {"stage": 1, "allgather_bucket_size": 7}}, ["7", "even number", "use 8"]),
        (
            {"zero_optimization": {"stage": 2}, "prescale_gradients": True},
            ["prescale_gradients: true", "reduce_scatter"],
        ),
        ({"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op", "averages over the ranks"]),
        ({"tensor_parallel": {"autotp_size": 2}}, ["autotp_size: 2", "parallel.tensor_parallel_size"]),
        ({"sequence_parallel_size": 2}, ["sequence_parallel_size: 2", "parallel.context_parallel_size"]),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, ["torch_autocast.enabled", "training.precision"]),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, ["master weights are fp32"]),
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": "abc"}},
            ['"abc": expected a whole number from 1 to'],
        ),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 0}}, ["0: expected a whole number from 1 to"]),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 1e300}}, ["expected a whole number from 1 to"]),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": None}}, ["null: expected a whole number from 1 to"]),
        ({"zero_optimization": {"stage": 1, "reduce_scatter": {}}}, ["expected true or false"]),
        ({"zero_optimization": {"stage": 1, "overlap_comm": [1]}}, ["[1]: expected true or false or null"]),
        ({"zero_optimization": {"stage": 3, "offload_param": "true"}}, ['"true": expected a section']),
        ({"zero_optimization": {"stage": 3, "sub_group_size": -1}}, ["-1: expected a whole number from 1 to"]),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": 5}}},
            ["5: expected text"],
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 7}}, ["a divisor of the 1 data-parallel ranks"]),
        ({"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}}, ["remove one"]),
        (
            {"zero_optimization": dict.fromkeys(SAME, True)},
            ["gather_16bit_weights_on_model_save is the same setting; remove one"],
        ),
        ({"wandb": []}, ["wandb: []: expected a section"]),
        ({"aio": 5}, ["aio: 5: expected a section"]),
        ({"aio": {"blok_size": 5}}, ["did you mean aio.block_size?"]),
        ({"gradient_predivide_factor": 0}, ["0: expected a number above 0"]),
        ({"gradient_predivide_factor": "x"}, ["expected a number above 0"]),
        ({"prescale_gradients": []}, ["[]: expected true or false"]),
        ({"disable_python_gc": {}}, ["expected true or false"]),
        ({"steps_per_print": 0}, ["expected a whole number from 1 to"]),
        ({"communication_data_type": "fp64"}, ["expected one of fp16, bf16, fp32 or null"]),
        ({"log_level": "loud"}, ["expected one of debug, info"]),
    ],
)
def test_conflicts_are_told_with_both_values(user_json: dict[str, Any], words: list[str]) -> None:
    problems = problems_of(config_of(), user_json)
    assert len(problems) == 1, problems
    for word in words:
        assert word in problems[0]


def test_a_batch_that_does_not_split_is_refused() -> None:
    problems = problems_of(config_of(), {}, world_size=3)
    assert problems[0].startswith("training.global_batch_size: 64 is not a multiple of training.micro_batch_size 8 x 3")


@pytest.mark.parametrize(("precision", "accumulation"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")])
def test_stage_0_trains_in_fp32_only(precision: str, accumulation: str) -> None:
    config = config_of(training={"precision": precision, "grad_accum_dtype": accumulation})
    for user_json in ({}, {"zero_optimization": {"stage": 0}}):
        line = problems_of(config, user_json)[0]
        assert line.startswith(f"zero_optimization.stage: 0 does not work with training.precision {precision}")
        assert ("NotImplementedError" in line) == (accumulation != precision)
        assert "stage 1" in line
    build_deepspeed_config(config, {"zero_optimization": {"stage": 1}}, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_pipeline_takes_stages_0_and_1_only(stage: int) -> None:
    config = config_of(parallel={"pipeline_parallel_size": 2})
    problems = problems_of(config, {"zero_optimization": {"stage": stage}}, world_size=2)
    assert len(problems) == 1
    words = f"zero_optimization.stage: {stage} does not work with parallel.pipeline_parallel_size"
    assert problems[0].startswith(words)
    assert "use stage 1" in problems[0]
    build_deepspeed_config(config, {"zero_optimization": {"stage": 1}}, 2)


def test_deepspeed_really_fails_where_stage_0_is_refused() -> None:
    """The rule's reason, read from DeepSpeed's own decision about the wrapper."""
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine

    class Dtypes:
        pipeline_parallelism = False

        def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
            return torch.bfloat16, torch.float32

        def zero_optimization(self) -> bool:
            return False

    with pytest.raises(NotImplementedError):
        DeepSpeedEngine._do_optimizer_sanity_check(Dtypes(), None)


def test_the_optimizer_section_is_handed_over_whole() -> None:
    import deepspeed

    section = {"type": "RMSprop", "params": {"lr": "auto", "weight_decay": "auto", "alpha": 0.9}}
    config = config_of(optimizer={"name": "from_ds_config", "learning_rate": 3e-4, "weight_decay": 0.1})
    built = build_deepspeed_config(config, {"optimizer": section, "zero_optimization": {"stage": 1}}, 1)
    expected = {"type": "RMSprop", "params": {"lr": 3e-4, "weight_decay": 0.1, "alpha": 0.9}}
    assert built["optimizer"] == expected
    assert "params" not in built
    assert deepspeed.DeepSpeedConfig(built).optimizer_params["alpha"] == 0.9
    assert section["params"]["lr"] == "auto"


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (None, ["missing", "from_ds_config"]),
        ({"params": {}}, ["without a type"]),
        ({"type": "Adam", "params": {"lr": 1.0}}, ["lr: 1.0 here, but 0.0001", "optimizer.learning_rate"]),
        ({"type": "Adam", "params": {"bias_correction": "auto"}}, ["bias_correction", "write one here"]),
        ({"type": "SGD", "params": []}, ["optimizer.params: []: expected a section"]),
        ({"type": "SGD", "params": {"momentum": "x"}}, ['"x": expected a number from 0 to 1']),
        (
            {"type": "SGD", "params": {"momentm": 0.9}},
            ["SGD has no such parameter (value 0.9); did you mean momentum?"],
        ),
        ({"type": "SGD", "params": {"nesterov": 1}}, ["1: expected true or false"]),
    ],
)
def test_an_optimizer_section_that_cannot_be_handed_over(section: dict[str, Any] | None, words: list[str]) -> None:
    config = config_of(optimizer={"name": "from_ds_config"})
    problems = problems_of(config, {} if section is None else {"optimizer": section})
    assert len(problems) == 1
    for word in words:
        assert word in problems[0]


def test_user_s_own_engine_knobs_stay() -> None:
    user_json = {
        "steps_per_print": 50,
        "wall_clock_breakdown": True,
        "zero_force_ds_cpu_optimizer": True,
        "flops_profiler": {"enabled": True, "profile_step": 3},
        "comms_logger": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "aio": {"block_size": 1048576},
        "communication_data_type": "fp32",
    }
    built = build_deepspeed_config(config_of(), user_json, 1)
    for name, value in user_json.items():
        assert built[name] == value


def test_every_misspelt_top_level_key_is_reported_with_the_nearest_name() -> None:
    keys = deepspeed_keys()["top_level"]
    removed = {path.split(".")[0] for path in deepspeed_keys()["removed"]}
    for key in sorted(keys):
        for position in range(0, len(key), 3):
            wrong = misspell(key, position, "drop")
            if wrong in keys or wrong in removed or len(key) < 5:
                continue
            problems = problems_of(config_of(), {wrong: {}})
            assert any(f"{wrong}:" in line and f"did you mean {key}?" in line for line in problems), (wrong, problems)
