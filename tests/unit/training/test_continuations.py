"""Continued texts and filled masks: the choice of a token, the rows of the passes, where a text ends, the prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ctxlm_ds.data.sample import Samples, empty_samples
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.recipe.check import find_problems
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from ctxlm_ds.training.continuations import (
    Continuations,
    FilledMasks,
    MaskChoice,
    TokenChoice,
    Writing,
    WrittenTargets,
    encode_prompts,
    given_prompt,
    held_out_targets,
)

WORDS = 300
ROWS, LENGTH = 3, 12


def recipe(data: dict[str, Any], **sections: Any) -> RunConfig:
    training = {"micro_batch_size": ROWS, "global_batch_size": ROWS}
    return RunConfig.model_validate({"data": {"seq_length": LENGTH, **data}, "training": training, **sections})


def config(**evaluation: Any) -> RunConfig:
    model = {"family": "gpt2", "vocab_size": WORDS, "max_position_embeddings": LENGTH}
    return recipe({"sample_format": "blocks"}, model=model, objective={"name": "causal_lm"}, evaluation=evaluation)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizers")
    return train_tokenizer("gpt2", iter(["the quick brown fox jumps over the lazy dog"] * 30), WORDS, folder / "gpt2")


def writing(config: RunConfig, tokenizer: Tokenizer) -> Writing:
    objective = build_objective(config.objective, tokenizer)
    return Writing(config.data, config.training, config.evaluation, objective, tokenizer)


def prompts_of(config: RunConfig, tokenizer: Tokenizer) -> list[list[int]]:
    run = writing(config, tokenizer)
    return encode_prompts(config.evaluation.prompts, run.data, run.objective, tokenizer)


class Counter:
    """An engine whose model predicts the id after each token, and that remembers what it read."""

    parallel = ParallelContext()

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def choose(self, batch: Any, choice: TokenChoice) -> list[int]:
        self.batches.append(batch)
        ids = batch.fields["input_ids"]
        logits = torch.nn.functional.one_hot((ids + 1) % WORDS, WORDS).float()
        choice({"logits": logits}, {}, torch.ones(1))
        return choice.chosen


def written(prompts: list[list[int]], tokenizer: Tokenizer, **evaluation: Any) -> tuple[list[list[int]], Counter]:
    settings, engine = config(**evaluation), Counter()
    writer = Continuations(prompts, writing(settings, tokenizer))
    choice = TokenChoice("logits", settings.evaluation.continuation_temperature, engine.parallel)
    return writer.tokens(engine, choice, prompts, 0, 0), engine  # type: ignore[arg-type]


def test_each_token_follows_from_the_text_before_it(tokenizer: Tokenizer) -> None:
    texts, engine = written([[5, 7], [40]], tokenizer, continuations=2, continuation_tokens=4)
    assert texts == [[8, 9, 10, 11], [41, 42, 43, 44]]
    fields = engine.batches[-1].fields
    assert fields["input_ids"].shape == (ROWS, LENGTH)
    assert fields["input_ids"][0, :5].tolist() == [5, 7, 8, 9, 10]
    assert fields["position_ids"][0, :6].tolist() == [0, 1, 2, 3, 4, 0]
    assert fields["sequence_ids"][:, :5].tolist() == [[1] * 5, [1] * 4 + [0], [1] + [0] * 4]
    assert fields["sequence_starts"][:, :3].tolist() == [[0, 5, LENGTH], [0, 4, LENGTH], [0, 1, LENGTH]]


def test_every_pass_is_reported(tokenizer: Tokenizer) -> None:
    settings, engine, passes = config(continuations=2, continuation_tokens=4), Counter(), []
    prompts = [[5 + number] for number in range(ROWS + 1)]
    writer = Continuations(prompts, writing(settings, tokenizer))
    writer.on_pass = lambda: passes.append(len(engine.batches))
    writer.write(engine, 1)  # type: ignore[arg-type]
    assert passes == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_text_ends_with_its_document(tokenizer: Tokenizer) -> None:
    end = tokenizer.sep_id
    texts, engine = written([[end - 2]], tokenizer, continuations=1, continuation_tokens=8)
    assert texts == [[end - 1]] and len(engine.batches) == 2


def test_rows_have_room_for_prompt_and_text(tokenizer: Tokenizer) -> None:
    settings, engine = config(continuations=1, continuation_tokens=50), Counter()
    pairs = Continuations([list(range(20, 60))], writing(settings, tokenizer)).write(engine, 3)  # type: ignore[arg-type]
    assert len(engine.batches) == LENGTH - 1
    assert pairs[0][0] == tokenizer.decode([59]) and pairs[0][1] == tokenizer.decode(range(60, 60 + LENGTH - 1))


@pytest.mark.parametrize(
    ("objective", "family", "reason"),
    [
        ("tinybert", "tinybert", "has no output over words"),
        ("bidirectional_lm", "elmo", "lanes of both directions"),
        ("masked_seq2seq", "bart", "writes masked tokens at their places only"),
    ],
)
def test_models_that_write_no_text_say_why(objective: str, family: str, reason: str) -> None:
    sections = {"objective": {"name": objective}, "model": {"family": family}}
    silent = RunConfig.model_validate({**sections, "evaluation": {"prompts": ["a"]}})
    (problem,) = [found for found in find_problems(silent) if found.path.startswith("evaluation")]
    assert problem.path == "evaluation.prompts" and reason in problem.text


@pytest.mark.parametrize(
    "objective", ["masked_lm", "span_corruption", "text_infilling", "permutation_lm", "distillation", "prefix_lm"]
)
def test_the_others_may_write(objective: str) -> None:
    writes = RunConfig.model_validate({"objective": {"name": objective}, "evaluation": {"continuations": 1}})
    assert not [found for found in find_problems(writes) if found.path.startswith("evaluation")]


def test_texts_without_what_their_rows_need_are_refused() -> None:
    languages = {"objective": {"name": "text_infilling", "language_tokens": True}, "evaluation": {"prompts": ["a"]}}
    (problem,) = [p for p in find_problems(RunConfig.model_validate(languages)) if p.path.startswith("evaluation")]
    assert "no language token" in problem.text


def masked_config(*prompts: str) -> RunConfig:
    objective = {"name": "masked_lm", "mask_prob": 0.3}
    data = {"sample_format": "full_sentences", "packing": False}
    return recipe(data, objective=objective, evaluation={"prompts": list(prompts)})


@pytest.fixture(scope="module")
def with_masks(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizers")
    return train_tokenizer("wordpiece", iter(["the quick brown fox jumps over the lazy dog"] * 30), 120, folder / "b")


class Left(Counter):
    """An engine whose model predicts for each slot the token to the left of it."""

    def choose(self, batch: Any, choice: MaskChoice) -> list[int]:  # type: ignore[override]
        self.batches.append(batch)
        left = batch.fields["input_ids"].gather(1, (batch.fields["prediction_positions"] - 1).clamp(min=0).long())
        choice({"predicted_logits": torch.nn.functional.one_hot(left, WORDS).float()}, {}, torch.ones(1))
        return choice.chosen


def filled(config: RunConfig, prompts: list[list[int]], tokenizer: Tokenizer) -> tuple[list[tuple[str, str]], Left]:
    engine = Left()
    return FilledMasks(prompts, writing(config, tokenizer)).write(engine, 1), engine  # type: ignore[arg-type]


def test_each_mask_is_filled_from_its_slot(with_masks: Tokenizer) -> None:
    config = masked_config("the [MASK] fox", "[MASK] lazy dog [MASK]", "brown [MASK]", "jumps [MASK]")
    prompts = prompts_of(config, with_masks)
    texts, engine = filled(config, prompts, with_masks)
    assert texts == [
        ("the [MASK] fox", "the"), ("[MASK] lazy dog [MASK]", "[CLS], dog"), ("brown [MASK]", "brown"),
        ("jumps [MASK]", "jumps"),
    ]  # fmt: skip
    assert len(engine.batches) == 2
    fields = engine.batches[1].fields
    cls, sep, mask = with_masks.cls_id, with_masks.sep_id, with_masks.mask_id
    assert fields["input_ids"][:, :4].tolist() == [[cls, prompts[3][0], mask, sep], *[[cls, sep, 0, 0]] * 2]
    assert fields["prediction_positions"][:, 0].tolist() == [2, 0, 0]
    assert fields["sequence_ids"][:, :4].tolist() == [[1, 1, 1, 1], *[[1, 1, 0, 0]] * 2]


def test_held_out_texts_are_given_masks_and_show_what_was_there(with_masks: Tokenizer) -> None:
    words = with_masks.encode_batch(["the quick brown fox jumps over the lazy dog"])[0]
    held_out = [with_masks.cls_id, *words, with_masks.sep_id]
    ((given, written),), _ = filled(masked_config(), [held_out], with_masks)
    assert given == "the quick brown fox [MASK] over the lazy dog" and written == "fox (was jumps)"
    ((given, written),), _ = filled(masked_config(), [held_out[:3]], with_masks)
    assert (given, written) == ("the [MASK]", "the (was quick)")


def test_prompts_without_masks_or_with_too_many_are_refused(with_masks: Tokenizer) -> None:
    config = masked_config("no mask", "the [MASK]", " ".join(["[MASK]"] * 9))
    with pytest.raises(ConfigError) as error:
        prompts_of(config, with_masks)
    text = str(error.value)
    assert "evaluation.prompts[0]" in text and "write [MASK] for 1 to 4 of its words, not 0" in text
    assert "evaluation.prompts[2]" in text and "evaluation.prompts[1]" not in text


class Echo(Counter):
    """An engine whose decoder writes the tokens of the input in their order, and then the end."""

    def choose(self, batch: Any, choice: TokenChoice) -> list[int]:
        self.batches.append(batch)
        fields = batch.fields
        logits = torch.nn.functional.one_hot(fields["input_ids"], WORDS).float()
        columns = fields["decoder_input_ids"].shape[1]
        choice({"decoder_logits": logits[:, :columns]}, {}, torch.ones(1))
        return choice.chosen


def seq2seq_config(name: str, **evaluation: Any) -> RunConfig:
    return recipe({"packing": False}, objective={"name": name}, evaluation=evaluation)


@pytest.fixture(scope="module")
def with_sentinels(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = iter(["the quick brown fox jumps over the lazy dog ."] * 30)
    names = ["<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]
    folder = tmp_path_factory.mktemp("tokenizers") / "sentinels"
    return train_tokenizer("wordpiece", texts, WORDS, folder, special_tokens=names)


def echoed(config: RunConfig, tokenizer: Tokenizer) -> tuple[list[Any], list[tuple[str, str]], Echo]:
    """The prompts as they are given, and what is written for them."""
    run, engine = writing(config, tokenizer), Echo()
    given = [given_prompt(ids, run.objective, tokenizer) for ids in prompts_of(config, tokenizer)]  # type: ignore[arg-type]
    return given, WrittenTargets(given, run).write(engine, 1), engine  # type: ignore[arg-type]


def test_a_decoder_writes_the_target_of_an_input(with_sentinels: Tokenizer) -> None:
    tokenizer, prompt = with_sentinels, "the <extra_id_0> fox"
    _, written, engine = echoed(seq2seq_config("span_corruption", prompts=[prompt, "lazy dog"]), tokenizer)
    assert written == [(prompt, prompt), ("lazy dog", "lazy dog")]
    assert len(engine.batches) == 4, "up to the end of the longest"
    fields, words = engine.batches[2].fields, tokenizer.encode_batch([prompt])[0]
    assert fields["input_ids"][0, :5].tolist() == [*words, tokenizer.sep_id, tokenizer.pad_id]
    assert fields["sequence_ids"][:, :4].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]
    assert fields["decoder_input_ids"][0, :4].tolist() == [tokenizer.pad_id, *words[:2], tokenizer.pad_id]
    assert fields["decoder_sequence_ids"][:, :4].tolist() == [[1, 1, 1, 0]] * 2 + [[1, 0, 0, 0]]
    assert fields["decoder_sequence_starts"][:, 1].tolist() == [3, 3, 1]


def test_a_target_begins_and_is_framed_as_in_training(with_sentinels: Tokenizer) -> None:
    tokenizer = with_sentinels
    config = seq2seq_config("text_infilling", prompts=["the [MASK] fox", "the quick brown fox " * 9])
    given, written, engine = echoed(config, tokenizer)
    assert given[0].start == [tokenizer.sep_id, tokenizer.cls_id]
    assert (given[0].ids[0], given[0].ids[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
    assert written[0] == ("the [MASK] fox", "the [MASK] fox")
    inputs = engine.batches[0].fields["input_ids"][1]
    assert inputs[0] == tokenizer.cls_id and inputs[-1] == tokenizer.sep_id, "cut, with its end"
    assert len(engine.batches) <= LENGTH - 1


@pytest.mark.parametrize("name", ["span_corruption", "text_infilling"])
def test_held_out_texts_are_corrupted_as_in_training(name: str, with_sentinels: Tokenizer) -> None:
    tokenizer = with_sentinels
    config = seq2seq_config(name, continuations=2)
    objective = build_objective(config.objective, tokenizer)
    words = tokenizer.encode_batch(["the quick brown fox jumps over the lazy dog"])[0]
    rows = Rows([tokenizer.cls_id, *words, tokenizer.sep_id])
    given = held_out_targets(rows, 5, config.data, config.training.seed, objective)  # type: ignore[arg-type]
    assert len(given) == 2 and given == held_out_targets(rows, 5, config.data, config.training.seed, objective)  # type: ignore[arg-type]
    for one in given:
        assert one.ids[-1] == one.target[-1] == tokenizer.sep_id and one.ids != [*words, tokenizer.sep_id]
        assert one.start == list(objective.generation_settings.values())
        assert set(words) <= {*one.ids, *one.target}
    engine = Echo()
    ((_, written), _) = WrittenTargets(given, writing(config, tokenizer)).write(engine, 1)  # type: ignore[arg-type]
    assert " (was " in written and "the" in written


class Rows:
    """Two held-out rows of one text."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = np.array(ids, dtype=np.int32)

    def __len__(self) -> int:
        return 2

    def samples(self, numbers: Any, epochs: Any) -> tuple[Samples, Any]:
        count, length = len(numbers), len(self._ids)
        samples = empty_samples(np.full(count, length))
        samples.input_ids[:] = np.tile(self._ids, count)
        samples.special_mask[:] = np.tile(np.arange(length) % (length - 1) == 0, count)
        samples.keys[:, 0] = numbers
        return samples, np.arange(count + 1)


def test_places_are_predicted_from_the_other_tokens(with_masks: Tokenizer) -> None:
    """As XLNet is trained: a mask has a higher rank than the text, and its own token is not read."""
    objective = build_objective(seq2seq_config("permutation_lm").objective, with_masks)
    row, fields = objective.masked_row([7, with_masks.mask_id, 9], [1], with_masks)
    assert row == [7, with_masks.mask_id, 9, with_masks.sep_id, with_masks.cls_id]
    assert fields == {"target_positions": [1], "ranks": [0, 1, 0, 0, 0], "token_type_ids": [0, 0, 0, 0, 2]}
