"""Continued texts and filled masks: the choice of a token, the rows of the passes, where a text ends, the prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.recipe.check import find_problems
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from ctxlm_ds.training.continuations import Continuations, FilledMasks, MaskChoice, TokenChoice, encode_prompts

WORDS = 300
ROWS, LENGTH = 3, 12


def config(**evaluation: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"family": "gpt2", "vocab_size": WORDS, "max_position_embeddings": LENGTH},
            "objective": {"name": "causal_lm"}, "data": {"sample_format": "blocks", "seq_length": LENGTH},
            "training": {"micro_batch_size": ROWS, "global_batch_size": ROWS}, "evaluation": evaluation,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizers")
    return train_tokenizer("gpt2", iter(["the quick brown fox jumps over the lazy dog"] * 30), WORDS, folder / "gpt2")


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
    writer = Continuations(prompts, settings, build_objective(settings.objective, tokenizer), tokenizer)
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
    writer = Continuations(prompts, settings, build_objective(settings.objective, tokenizer), tokenizer)
    writer.on_pass = lambda: passes.append(len(engine.batches))
    writer.write(engine, 1)  # type: ignore[arg-type]
    assert passes == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_text_ends_with_its_document(tokenizer: Tokenizer) -> None:
    end = tokenizer.sep_id
    texts, engine = written([[end - 2]], tokenizer, continuations=1, continuation_tokens=8)
    assert texts == [[end - 1]] and len(engine.batches) == 2


def test_rows_have_room_for_prompt_and_text(tokenizer: Tokenizer) -> None:
    settings, engine = config(continuations=1, continuation_tokens=50), Counter()
    objective = build_objective(settings.objective, tokenizer)
    pairs = Continuations([list(range(20, 60))], settings, objective, tokenizer).write(engine, 3)  # type: ignore[arg-type]
    assert len(engine.batches) == LENGTH - 1
    assert pairs[0][0] == tokenizer.decode([59]) and pairs[0][1] == tokenizer.decode(range(60, 60 + LENGTH - 1))


def test_draws_depend_on_key_and_place_and_follow_the_temperature() -> None:
    choice = TokenChoice("logits", 0.5, ParallelContext())
    count = 4000
    logits = torch.tensor([0.0, 1.0, float("-inf")]).expand(count, 1, 3)
    choice.places, choice.keys = [0] * count, list(range(count))
    choice({"logits": logits}, {}, torch.ones(1))
    first = choice.chosen
    assert sum(first) / count == pytest.approx(torch.sigmoid(torch.tensor(2.0)).item(), abs=0.02)
    choice({"logits": logits}, {}, torch.ones(1))
    assert choice.chosen == first
    choice.keys = [key + count for key in choice.keys]
    choice({"logits": logits}, {}, torch.ones(1))
    assert choice.chosen != first


def test_models_of_neither_next_tokens_nor_masks_write_no_text() -> None:
    spans = RunConfig.model_validate({"objective": {"name": "span_corruption"}, "evaluation": {"prompts": ["a"]}})
    (problem,) = [found for found in find_problems(spans) if found.path.startswith("evaluation")]
    assert problem.path == "evaluation.prompts" and "predicts no next tokens and fills no masks" in problem.text
    masked = RunConfig.model_validate({"evaluation": {"prompts": ["a"]}})
    assert not [found for found in find_problems(masked) if found.path.startswith("evaluation")]
    assert not [found for found in find_problems(config(continuations=1)) if found.path.startswith("evaluation")]


def masked_config(*prompts: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "masks", "data": {"sample_format": "full_sentences", "seq_length": LENGTH, "packing": False},
            "objective": {"name": "masked_lm", "mask_prob": 0.3}, "evaluation": {"prompts": list(prompts)},
            "training": {"micro_batch_size": ROWS, "global_batch_size": ROWS},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def with_masks(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizers")
    return train_tokenizer("wordpiece", iter(["the quick brown fox jumps over the lazy dog"] * 30), 120, folder / "b")


class Left:
    """An engine whose model predicts for each slot the token to the left of it, and that remembers what it read."""

    parallel = ParallelContext()

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def choose(self, batch: Any, choice: MaskChoice) -> list[int]:
        self.batches.append(batch)
        left = batch.fields["input_ids"].gather(1, (batch.fields["prediction_positions"] - 1).clamp(min=0).long())
        choice({"predicted_logits": torch.nn.functional.one_hot(left, WORDS).float()}, {}, torch.ones(1))
        return choice.chosen


def filled(config: RunConfig, prompts: list[list[int]], tokenizer: Tokenizer) -> tuple[list[tuple[str, str]], Left]:
    engine = Left()
    writer = FilledMasks(prompts, config, build_objective(config.objective, tokenizer), tokenizer)
    return writer.write(engine, 1), engine  # type: ignore[arg-type]


def test_each_mask_is_filled_from_its_slot(with_masks: Tokenizer) -> None:
    config = masked_config("the [MASK] fox", "[MASK] lazy dog [MASK]", "brown [MASK]", "jumps [MASK]")
    prompts = encode_prompts(config, build_objective(config.objective, with_masks), with_masks)
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
        encode_prompts(config, build_objective(config.objective, with_masks), with_masks)
    text = str(error.value)
    assert "evaluation.prompts[0]" in text and "write [MASK] for 1 to 4 of its words, not 0" in text
    assert "evaluation.prompts[2]" in text and "evaluation.prompts[1]" not in text
