import shlex
from pathlib import Path

import pytest

from ctxlm_ds.apps.init.rules import RULES
from ctxlm_ds.apps.init.settings import canonical, read_command, recipe_text, write_recipe
from ctxlm_ds.apps.init.translate import load_table, translate
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.choices import CHOICES
from ctxlm_ds.recipe.schema import RunConfig

ORIGINALS = ("megatron", "run_mlm")
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
TRAINING = "--micro-batch-size 4 --global-batch-size 16 --lr 1e-3 --train-iters 50 --data-path a_text_document"


def _translate(text, original="megatron", **options):
    return translate(original, read_command(shlex.split(text), list(load_table(original)["scripts"])), **options)


def _recipe(result, tmp_path):
    return write_recipe(tmp_path / "x.yaml", recipe_text(["head"], result.settings))


@pytest.mark.parametrize("original", ORIGINALS)
def test_every_row_of_a_table_names_a_setting_of_the_schema(original):
    table, sections = load_table(original), {choice.section: choice for choice in CHOICES.values()}
    for name, row in table["arguments"].items():
        section, _, key = row["key"].partition(".")
        assert section in RunConfig.model_fields, name
        if section in sections and key:
            assert any(key in kind.model_fields for kind in sections[section].classes().values()), name
        elif key:
            assert key in RunConfig.model_fields[section].annotation.model_fields, name
        assert row.get("rule", "shape") in RULES, name
    mapped = [canonical(name) for name in table["arguments"]]
    assert len(mapped) == len({*mapped})


def test_megatron_bert(tmp_path):
    result = _translate(f"pretrain_bert.py {SHAPE} {TRAINING} --bf16 --hiden-dropout 0 --use-flash-attn", ranks=2)
    config = _recipe(result, tmp_path)
    model = config.model
    assert (model.family, model.intermediate_size, model.layer_norm_eps) == ("megatron_bert", 256, 1e-5)
    assert (model.hidden_activation, config.optimizer.eps, config.training.precision) == ("gelu_tanh", 1e-8, "bf16")
    assert (config.objective.spans, config.objective.whole_word, config.data.split) == ("ngram", True, "969,30,1")
    assert (config.evaluation.max_rows, config.training.global_batch_size) == (1600, 16)
    assert result.unknown == {"--hiden-dropout": "--hidden-dropout"}
    assert list(result.without.values()) == [["--use-flash-attn"]]


def test_ranks_that_share_rows_read_one_batch(tmp_path):
    layout = "--tensor-model-parallel-size 2 --context-parallel-size 2"
    config = _recipe(_translate(f"pretrain_gpt.py {SHAPE} --micro-batch-size 4 {layout}", ranks=16), tmp_path)
    assert config.parallel.context_parallel_size == 2 and config.training.global_batch_size == 4 * 4


def test_megatron_gpt_counts_samples_in_batches(tmp_path):
    text = f"pretrain_gpt.py {SHAPE} --micro-batch-size 4 --global-batch-size 16 --train-samples 1600 --lr 1e-3 --fp16"
    text += " --lr-warmup-samples 160 --min-lr 1e-5 --rampup-batch-size 8 4 320 --data-path 0.3 a 0.7 b --mask-prob 0.2"
    result = _translate(text)
    config = _recipe(result, tmp_path)
    assert 1600 - 16 < config.training.rows_after(config.training.max_steps) <= 1600
    assert 160 <= config.training.rows_after(config.schedule.warmup_steps) < 160 + 16
    assert config.training.batch_ramp == (8, 4, 320)
    assert [(source.path, source.weight) for source in config.data.train] == [("a", 0.3), ("b", 0.7)]
    assert (config.data.blend, config.training.initial_loss_scale_power) == ("megatron", 32)
    steps = config.schedule.warmup_steps
    assert result.notes == [
        f"--lr-warmup-samples 160: the rate rises evenly over {steps} steps, in Megatron over samples",
        "--mask-prob 0.2: causal_lm has no objective.mask_prob",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--swiglu --normalization RMSNorm", "without --position-embedding-type rope and --disable-bias-linear"),
        ("--normalization RMSNorm", "family gpt2, which the other arguments describe, has LayerNorm"),
        ("--eval-iters many", "--eval-iters many: expected a number"),
        ("--eval-iters inf", "--eval-iters inf: expected a number up to 1e"),
        ("--eval-iters nan", "--eval-iters nan: expected a number up to"),
        (f"--eval-iters {'9' * 400}", "--eval-iters 9{70,}…: expected a number up to"),
    ],
)
def test_a_model_that_no_family_is_and_a_wrong_value_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        _translate(f"pretrain_gpt.py {SHAPE} {TRAINING} {arguments}")


@pytest.mark.parametrize("original", ORIGINALS)
def test_the_guide_has_every_argument_with_its_setting(original):
    table, guide = load_table(original), Path("docs/migrate.md").read_text()
    for name, row in table["arguments"].items():
        key = f"`{row['key']}`" if row.get("key") else ""
        assert f"| `{name}` | {key}" in guide, name
    assert all(f"`{name}`" in guide for row in table["without"] for name in row["arguments"])


def test_the_tokenizer_that_the_user_names_is_in_every_command():
    result = _translate("run_mlm.py --model_type bert --train_file a.txt", "run_mlm", tokenizer="tok")
    assert result.value("tokenizer.path") == "tok" and any("--tokenizer tok " in note for note in result.notes)
    named = _translate("run_mlm.py --model_type bert --train_file a.txt", "run_mlm")
    assert named.value("tokenizer.path") == "tokenizer"


def test_arguments_are_named_as_they_were_written():
    result = _translate(f"pretrain_gpt.py {SHAPE} {TRAINING} --clip_grad 0.5 --use_flash_attn --hiden_dropout 0")
    assert result.settings["optimizer.gradient_clipping"].source == "--clip_grad 0.5"
    assert ([*result.without.values()], [*result.unknown]) == ([["--use_flash_attn"]], ["--hiden_dropout"])


def test_vocabulary_and_merges_in_one_folder_or_a_note():
    files = "--vocab-file a/gpt2-vocab.json --merge-file {}"
    same = _translate(f"pretrain_gpt.py {SHAPE} {TRAINING} {files.format('a/gpt2-merges.txt')}")
    assert same.value("tokenizer.path") == "a/gpt2-vocab.json" and not same.notes
    other = _translate(f"pretrain_gpt.py {SHAPE} {TRAINING} {files.format('b/gpt2-merges.txt')}")
    assert "put both files into one folder" in other.notes[0]


def test_a_llama_with_grouped_queries_and_no_evaluation(tmp_path):
    parts = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --eval-iters 0"
    text = f"pretrain_gpt.py {SHAPE} {TRAINING} {parts} --group-query-attention"
    result = _translate(f"{text} --num-query-groups 2 --mock-data --data-args-path x --chunk-size 3")
    config = _recipe(result, tmp_path)
    model = config.model
    assert (model.family, model.num_key_value_heads, model.intermediate_size) == ("llama", 2, 128)
    assert model.tie_word_embeddings and config.evaluation.interval_steps == 0
    assert not result.unknown and not result.notes
    ungrouped = text.removesuffix("--group-query-attention")
    half = _translate(f"{ungrouped} --num-query-groups 2 --activations-checkpoint-method uniform")
    assert half.value("training.activation_checkpointing") and "only with --group-query-attention" in half.notes[0]
    alone = _translate(text)
    assert alone.value("model.num_key_value_heads") == 1
