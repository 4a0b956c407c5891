"""Continuations of texts: the choice of a token, the rows of the passes, where a text ends, and the prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctxlm_ds.objectives.build import build_objective
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.recipe.check import find_problems
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from ctxlm_ds.training.continuations import Continuations, TokenChoice

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


def test_only_models_of_next_tokens_continue() -> None:
    masked = RunConfig.model_validate({"evaluation": {"prompts": ["a"]}})
    (problem,) = [found for found in find_problems(masked) if found.path.startswith("evaluation")]
    assert problem.path == "evaluation.prompts" and "predicts no next tokens" in problem.text
    assert not [found for found in find_problems(config(continuations=1)) if found.path.startswith("evaluation")]
