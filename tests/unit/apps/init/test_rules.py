import json
import shlex

import pytest

from ctxlm_ds.apps.init.rules import steps_of_samples
from ctxlm_ds.apps.init.settings import read_command, recipe_text, write_recipe
from ctxlm_ds.apps.init.translate import translate
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.schema import TrainingConfig

SCRIPTS = ["run_mlm.py", "run_clm.py", "run_mlm_no_trainer.py"]
TINY = "num_hidden_layers=2,hidden_size=64,num_attention_heads=4,intermediate_size=128,hidden_dropout_prob=0.0"


def _recipe(text, tmp_path, **options):
    result = translate("run_mlm", read_command(shlex.split(text), SCRIPTS), **options)
    return write_recipe(tmp_path / "x.yaml", recipe_text([], result.settings)), result


def test_run_mlm_takes_the_shape_of_transformers_config_and_its_defaults(tmp_path):
    text = f"run_mlm.py --model_type roberta --config_overrides {TINY} --tokenizer_name tok --train_file a/b.txt"
    text += " --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --warmup_steps 0.1 --max_steps 7"
    config, result = _recipe(text, tmp_path, ranks=2)
    model = config.model
    assert (model.family, model.num_layers, model.hidden_size, model.hidden_dropout) == ("roberta", 2, 64, 0.0)
    training = config.training
    assert (training.global_batch_size, training.micro_batch_size, training.max_steps) == (16, 4, 7)
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay, config.training.seed) == (5e-5, 0.0, 42)
    assert (config.schedule.warmup_fraction, config.training.precision, config.data.split) == (0.1, "fp32", "95,5,0")
    assert config.data.seq_length == model.longest_sequence == 510
    assert config.data.train[0].path == "data/b_text_sentence"
    command = "ctxlm preprocess --input a/b.txt --tokenizer tok --split-sentences --output-prefix data/b"
    assert command in result.notes[0]


def test_run_mlm_without_trainer_has_its_own_names_and_defaults(tmp_path):
    text = "accelerate launch --num_processes 2 --mixed_precision=bf16 run_mlm_no_trainer.py --model_type bert "
    text += f"--config_overrides {TINY} --tokenizer_name tok --train_file a/b.txt --gradient_accumulation_steps 2 "
    text += "--max_train_steps 70 --num_warmup_steps 7 --checkpointing_steps 35 --use_slow_tokenizer --with_tracking"
    config, result = _recipe(text, tmp_path)
    training = config.training
    assert (training.global_batch_size, training.micro_batch_size, training.max_steps) == (32, 8, 70)
    assert (training.precision, config.schedule.warmup_steps, config.checkpoint.interval_steps) == ("bf16", 7, 35)
    assert (config.optimizer.gradient_clipping, config.optimizer.learning_rate) == (0.0, 5e-5)
    assert result.settings["training.max_steps"].source == "--max_train_steps 70" and not result.unknown
    translated = translate("run_mlm", read_command(shlex.split(text.replace("steps 35", "steps epoch")), SCRIPTS))
    assert "--checkpointing_steps epoch: no counterpart; set checkpoint.interval_steps" in translated.notes
    assert "checkpoint.interval_steps" not in translated.settings


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("accelerate launch --mixed_precision bf16 run_mlm.py", "bf16"),
        ("accelerate launch --mixed_precision bf16 run_mlm.py --fp16 True", "fp16"),
        ("accelerate launch --mixed_precision=no run_mlm.py --bf16 False --gradient_checkpointing false", "fp32"),
    ],
)
def test_flags_have_values_and_the_launcher_a_precision(words, expected, tmp_path):
    text = f"{words} --model_type bert --config_overrides {TINY} --tokenizer_name t --max_steps 40 --save_steps 0.1"
    config, result = _recipe(text, tmp_path)
    assert (config.training.precision, config.training.activation_checkpointing) == (expected, False)
    assert config.checkpoint.interval_steps == 4 and not result.unknown


def test_what_the_launcher_does_not_say_is_a_note(tmp_path):
    text = "accelerate launch --config_file acc.yaml --mixed_precision fp8 run_mlm.py --model_type bert "
    text += f"--config_overrides {TINY} --tokenizer_name t"
    _, result = _recipe(text, tmp_path)
    notes = "\n".join(result.notes)
    for words in ("--config_file acc.yaml: not read", "--mixed_precision fp8"):
        assert words in notes, notes


@pytest.mark.parametrize(
    "arguments",
    ["--per_device_train_batch_size abc", "--gradient_accumulation_steps nan", "--validation_split_percentage nan"],
)
def test_a_value_that_cannot_be_computed_with_is_named(arguments):
    text = f"run_mlm.py --model_type bert --config_overrides {TINY} --train_file a.txt {arguments}"
    with pytest.raises(ConfigError, match=arguments.split()[0]):
        translate("run_mlm", read_command(shlex.split(text), SCRIPTS))


def test_run_clm_takes_a_folder(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 4}
    (folder / "config.json").write_text(json.dumps({**config, "n_positions": 128, "vocab_size": 300}))
    recipe, result = _recipe(f"run_clm.py --model_name_or_path {folder} --bf16 --block_size 64", tmp_path)
    assert (recipe.model.family, recipe.model.num_layers, recipe.data.seq_length) == ("gpt2", 2, 64)
    assert (recipe.initialize_from, recipe.tokenizer.path) == (str(folder), str(folder))
    assert not recipe.data.reset_at_documents and recipe.model.vocab_size == 300  # also if the tokenizer has fewer
    assert "give --data PREFIX" in result.notes[-1]


def test_schedules_are_those_of_the_original(tmp_path):
    text = f"run_mlm.py --model_type bert --config_overrides {TINY} --tokenizer_name tok --max_steps 9"
    for name, warmup in (("constant", 0.0), ("constant_with_warmup", 0.5)):
        config, result = _recipe(f"{text} --warmup_ratio 0.5 --lr_scheduler_type {name}", tmp_path)
        assert config.schedule.name == "constant" and (config.schedule.warmup_fraction or 0.0) == warmup
        assert any("has no warmup there" in note for note in result.notes) == (not warmup)
    words = ["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "10", "--train-iters", "100"]
    for style, notes in (([], 1), (["--lr-wsd-decay-style", "linear"], 0)):
        found = translate("megatron", read_command(["pretrain_bert.py", *words, *style], ["pretrain_bert.py"])).notes
        assert len([note for note in found if "default is exponential" in note]) == notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokenizer_name tok", "none of --model_type, --config_name and --model_name_or_path"),
        ("--model_type perceptron", "transformers has no such model"),
        ("--model_type bert --config_overrides depth=2", "depth"),
        ("--model_name_or_path bert-base-uncased", "hf download bert-base-uncased --local-dir DIR"),
    ],
)
def test_a_model_that_is_not_known_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        translate("run_mlm", read_command(shlex.split(f"run_mlm.py {arguments}"), SCRIPTS))


def test_samples_are_divided_by_the_batch_without_a_ramp():
    assert steps_of_samples(1000, 64, None) == 15


@pytest.mark.parametrize("ramp", [(8, 8), ("a", 8, 100), (8, 0, 100), (64, 8, 100), (1, 1, 10**6)])
def test_a_ramp_that_cannot_be_followed_gives_no_steps(ramp):
    assert steps_of_samples(10**12, 64 if ramp[-1] != 10**6 else 10**5, ramp) is None


@pytest.mark.parametrize(
    ("samples", "batch", "ramp"),
    [
        (200_000, 96, (8, 8, 150_001)),
        (3000, 64, (8, 8, 20_000)),
        (20_100, 64, (8, 8, 20_000)),
        (9_000, 98, (7, 13, 15_001)),
        (30_000, 1000, (1, 1, 5000)),
        (50, 64, (8, 8, 49)),
    ],
)
def test_steps_along_a_ramp_are_those_of_one_by_one(samples, batch, ramp):
    training = TrainingConfig(global_batch_size=batch, batch_ramp=ramp)
    rows = steps = 0
    while rows <= ramp[2] and rows < samples:
        rows, steps = rows + training.batch_size_at(rows), steps + 1
    assert steps_of_samples(samples, batch, ramp) == steps + max(0, samples - rows) // batch


def test_a_long_ramp_is_counted_without_its_steps():
    assert 10**12 // 64 < steps_of_samples(10**12, 64, (1, 1, 10**12)) < 10**12
