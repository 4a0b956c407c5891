"""Texts that models write are those of transformers' generate(), on every layout: continuations, targets, masks.

The engine's evaluation passes write them (training/continuations.py), from the weights that the export has.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.export.base import export_of
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.registry import FAMILIES, OBJECTIVES
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.training.continuations import (
    FIRST_MASK,
    MASK_EVERY,
    Continuations,
    FilledMasks,
    Given,
    TokenChoice,
    Writing,
    WrittenTargets,
)
from ctxlm_ds.training.engine.engine import Engine
from tests.families import hugging_face, runs
from tests.families.runs import MICRO_ROWS, ONE_RANK, Layout, Run
from tests.families.test_contract import VARIANTS, Results, case

pytestmark = pytest.mark.dist
CAUSAL = [
    name
    for name in FAMILIES.shipped_names()
    if OBJECTIVES.get(FAMILIES.get(name).objective).next_tokens and export_of(name).next_token_output
]
PROMPT, WRITTEN, NUM_PROMPTS, FEW = 8, 12, 60, 8
UNSHARED = "xlnet"
NOISE, MATRICES = 0.3, 2
"""On every matrix, or each text would repeat its last token."""
LAYOUTS = [
    Layout(tensor=2, stage=1), Layout(pipeline=2, stage=1), Layout(data=2, stage=3), Layout(context=2, stage=1),
    Layout(tensor=2, pipeline=2, stage=1, sequence_parallel=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("generation"))


def held_out(run: Run, count: int) -> dict[str, torch.Tensor]:
    """The fields of rows that no step reads."""
    batches = [step.micro_batches[0].fields for step in runs.load_recorded(runs.recorded(run), slice(-count, None))]
    return {name: torch.cat([batch[name] for batch in batches])[-count:] for name in batches[0]}


def prompts(run: Run, count: int) -> list[list[int]]:
    """The first tokens of held-out rows."""
    return held_out(run, count)["input_ids"][:, :PROMPT].tolist()


def with_noise(run: Run, temperature: float = 0.0) -> tuple[Engine, RunConfig]:
    """An engine with the weights of `hugging_face.make_pair`, and the recipe of its texts."""
    engine, config = runs.build(run), run.config()
    weights = dict(hugging_face.noisy(config, run.seed, NOISE, MATRICES).named_parameters())
    held = {fragment.name for fragment in engine.fragments()}
    engine.load_weights((name, weight.detach()) for name, weight in weights.items() if name in held)
    update = {"continuation_tokens": WRITTEN, "continuation_temperature": temperature}
    return engine, config.model_copy(update={"evaluation": config.evaluation.model_copy(update=update)})


def writer_of(kind: type[Any], given: list[Any], config: RunConfig) -> Any:
    """What writes texts for these rows in the engine's evaluation."""
    tokenizer = load_tokenizer(config.tokenizer.path)
    objective = build_objective(config.objective, tokenizer)
    return kind(given, Writing(config.data, config.training, config.evaluation, objective, tokenizer))


def ours(rank: int, world_size: int, run: Run, count: int, temperature: float = 0.0) -> list[list[int]]:
    """Case: the tokens after each prompt."""
    engine, config = with_noise(run, temperature)
    given = prompts(run, count)
    writer = writer_of(Continuations, given, config)
    choice = TokenChoice("logits", temperature, engine.parallel)
    groups = range(0, count, MICRO_ROWS)
    return [row for i in groups for row in writer.tokens(engine, choice, given[i : i + MICRO_ROWS], 0, i)]


def theirs(rank: int, world_size: int, run: Run, folder: Path) -> list[list[int]]:
    """Case: what the exported model's generate() writes, up to the end of a document."""
    config = run.config()
    (part,) = hugging_face.make_pair(config, folder, run.seed, NOISE, MATRICES).theirs
    ids = torch.tensor(prompts(run, NUM_PROMPTS))
    return up_to_the_end(generated(part, ids, torch.ones_like(ids)), config)


def generated(part: hugging_face.Part, ids: torch.Tensor, inside: torch.Tensor, start: int = 0) -> torch.Tensor:
    from transformers import GenerationConfig

    part.model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=WRITTEN, eos_token_id=None, pad_token_id=0, decoder_start_token_id=start
    )
    return part.model.eval().generate(ids, attention_mask=inside)[:, -WRITTEN:]


def up_to_the_end(written: torch.Tensor, config: RunConfig) -> list[list[int]]:
    end = load_tokenizer(config.tokenizer.path).sep_id
    return [row[: row.index(end)] if end in row else row for row in written.tolist()]


def targets(rank: int, world_size: int, run: Run, folder: Path) -> list[list[list[int]]]:
    """Case: what our decoder, and the exported model's generate(), writes for corrupted held-out texts."""
    config, fields = run.config(), held_out(run, NUM_PROMPTS)
    pair = hugging_face.make_pair(config, folder, run.seed, NOISE, MATRICES)
    start = export_of(config.model.family).start_id(load_tokenizer(config.tokenizer.path))
    wanted = generated(pair.theirs[0], fields["input_ids"], (fields["sequence_ids"] > 0).long(), start)
    written = torch.full((NUM_PROMPTS, WRITTEN + 1), start)
    for length in range(1, WRITTEN + 1):
        ones = torch.ones(NUM_PROMPTS, length, dtype=torch.int64)
        fields |= {
            "decoder_input_ids": written[:, :length], "decoder_position_ids": ones.cumsum(1) - 1,
            "decoder_sequence_ids": ones, "decoder_sequence_starts": torch.tensor([[0, length]] * NUM_PROMPTS),
        }  # fmt: skip
        with torch.no_grad():
            written[:, length] = pair.ours.run(fields)["decoder_logits"][:, -1].argmax(-1)
    return [up_to_the_end(rows, config) for rows in (written[:, 1:], wanted)]


def our_targets(rank: int, world_size: int, run: Run, count: int) -> list[list[int]]:
    """Case: the targets that the engine writes for corrupted held-out texts."""
    engine, config = with_noise(run)
    tokenizer, fields = load_tokenizer(config.tokenizer.path), held_out(run, count)
    lengths = (fields["sequence_ids"] > 0).sum(1).tolist()
    start = export_of(config.model.family).start_id(tokenizer)
    rows = zip(fields["input_ids"].tolist(), lengths, strict=True)
    given = [Given(ids[:length], [start], []) for ids, length in rows]
    writer = writer_of(WrittenTargets, given, config)
    choice, groups = TokenChoice("decoder_logits", 0.0, engine.parallel), range(0, count, MICRO_ROWS)
    return [row for i in groups for row in writer.targets(engine, choice, given[i : i + MICRO_ROWS], 0, i)]


def our_masks(rank: int, world_size: int, run: Run, count: int) -> list[tuple[str, str]]:
    """Case: the first tokens of held-out texts with the masks that the writer puts there, and what it fills in."""
    engine, config = with_noise(run)
    return writer_of(FilledMasks, prompts(run, count), config).write(engine, 0)


def their_masks(rank: int, world_size: int, run: Run, folder: Path, count: int) -> list[str]:
    """Case: what the exported model predicts at these places."""
    config = run.config()
    (part,) = hugging_face.make_pair(config, folder, run.seed, NOISE, MATRICES).theirs
    tokenizer, found = load_tokenizer(config.tokenizer.path), []
    predict = PREDICTIONS[run.family]
    mask = tokenizer.mask_id
    for prompt in prompts(run, count):
        ids = [token for token in prompt if token not in tokenizer.special_ids - {mask}]
        own = [place for place, token in enumerate(ids) if token == mask]  # rows of masked models have some
        places = own or list(range(min(FIRST_MASK, len(ids) - 1), len(ids), MASK_EVERY))
        with torch.no_grad():
            words = predict(part.model.eval(), ids, places, tokenizer).argmax(-1).tolist()
        was = ["" if own else f" (was {tokenizer.decode([ids[place]])})" for place in places]
        found.append(", ".join(f"{tokenizer.decode([word])}{old}" for word, old in zip(words, was, strict=True)))
    return found


def at_masks(model: torch.nn.Module, ids: list[int], places: list[int], tokenizer: Tokenizer) -> torch.Tensor:
    """Logits at masks."""
    masked = [tokenizer.mask_id if place in places else token for place, token in enumerate(ids)]
    logits: torch.Tensor = model(torch.tensor([[tokenizer.cls_id, *masked, tokenizer.sep_id]])).logits
    return logits[0, 1:-1][places]


def from_the_others(model: torch.nn.Module, ids: list[int], places: list[int], tokenizer: Tokenizer) -> torch.Tensor:
    """Logits of an XLNet's second stream."""
    row = torch.tensor([[*ids, tokenizer.sep_id, tokenizer.cls_id]])
    length = row.shape[1]
    hidden = torch.zeros(1, length, length)  # [1, i, j], 1 if token i does not see j
    hidden[:, :, places] = 1.0
    mapping = torch.nn.functional.one_hot(torch.tensor([places]), length).float()
    types = torch.tensor([[0] * (length - 1) + [2]])
    logits: torch.Tensor = model(row, perm_mask=hidden, target_mapping=mapping, token_type_ids=types).logits
    return logits[0]


PREDICTIONS = {"xlnet": from_the_others, "distilbert+teacher": at_masks}


@pytest.mark.parametrize("family", CAUSAL)
def test_greedy_continuations_are_those_of_generate(results: Results, family: str, tmp_path: Path) -> None:
    run = results.run(family)
    wanted = results.of(theirs, run, tmp_path / "model")
    assert len(wanted) == NUM_PROMPTS and len({tuple(row) for row in wanted}) > NUM_PROMPTS // 4
    assert results.of(ours, run, NUM_PROMPTS) == wanted


def some(families: Iterable[str], layouts: list[Layout]) -> Any:
    """The first family under layouts that do not split the model, all but variants under the last one."""

    def is_chosen(number: int, family: str, layout: Layout) -> bool:
        if number == 0:
            return layout == layouts[-1] or layout.tensor * layout.pipeline == 1
        return layout == layouts[-1] and family not in VARIANTS

    cases = [
        case(is_chosen(number, family, layout), family, layout)
        for number, family in enumerate(families)
        for layout in layouts
        if layout.context == 1 or family != UNSHARED
    ]
    return pytest.mark.parametrize(("family", "layout"), cases)


@some(CAUSAL, LAYOUTS)
def test_a_layout_writes_the_same_text(results: Results, family: str, layout: Layout) -> None:
    run = results.run(family)
    for temperature in (0.0, 1.0):
        wanted = results.of(ours, run.on(ONE_RANK), FEW, temperature)
        assert results.of(ours, run.on(layout), FEW, temperature) == wanted
    assert wanted != results.of(ours, run.on(ONE_RANK), FEW, 0.0)


@pytest.mark.parametrize("family", ["t5", "t5+1.1", "bart", "mbart"])
def test_greedy_targets_are_those_of_generate(results: Results, family: str, tmp_path: Path) -> None:
    written, wanted = results.of(targets, results.run(family), tmp_path / "model")
    assert len(wanted) == NUM_PROMPTS and len({tuple(row) for row in wanted}) > NUM_PROMPTS // 4
    assert written == wanted


@some(["t5", "bart"], [ONE_RANK, *LAYOUTS])
def test_the_engine_writes_these_targets(results: Results, family: str, layout: Layout, tmp_path: Path) -> None:
    run = results.run(family)
    _, wanted = results.of(targets, run.on(ONE_RANK), results.folder / family)
    longest = held_out(run, FEW)["decoder_input_ids"].shape[1]
    assert results.of(our_targets, run.on(layout), FEW) == [row[:longest] for row in wanted[-FEW:]]


@some(PREDICTIONS, [ONE_RANK, *LAYOUTS])
def test_masks_are_filled_as_the_exported_model_does(results: Results, family: str, layout: Layout) -> None:
    """From the words around them: by XLNet's second stream, and by a student next to its teacher."""
    run = results.run(family)
    wanted = results.of(their_masks, run.on(ONE_RANK), results.folder / family, FEW)
    assert [words for _, words in results.of(our_masks, run.on(layout), FEW)] == wanted
    assert len(set(wanted)) > 1
