"""The objective of T5: fields, sentinels of several vocabularies, refusals."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.index.build import build_rows
from ctxlm_ds.data.index.index import RowSource
from ctxlm_ds.data.numba_random import stream_key
from ctxlm_ds.data.stream.loader import TrainLoader
from ctxlm_ds.data.stream.preview import preview_rows
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.objectives.base import build_objective
from ctxlm_ds.objectives.span_corruption import LONGEST_TEXT, MOST_NOISE, Denoiser
from ctxlm_ds.recipe.check import check_config
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.each import each
from tests.ragged import samples_from, single_sample
from tests.sample_data import FakeTokenizer, random_documents, run_config, write_dataset

WORDS = "the cat sat on the mat while a dog ran over the green hill and did not stop until it was night"
PAD = 0


def config_of(seq_length: int = 64, **sections: dict[str, object]) -> RunConfig:
    values: dict[str, dict[str, object]] = {
        "model": {"family": "t5"}, "objective": {"name": "span_corruption"},
        "data": {"sample_format": "chunks", "seq_length": seq_length},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return run_config(**values)


def rows_of(config: RunConfig, folder: Path, documents: int = 30) -> tuple[Any, RowSource]:
    """The objective of a recipe and its rows of random documents."""
    tokenizer = FakeTokenizer()
    prefix = write_dataset(folder / "data", random_documents(documents, vocab_size=800), split_sentences=False)
    objective = build_objective(config.objective, tokenizer)
    return objective, build_rows([prefix], tokenizer, config.row_settings)


def test_batches_hold_inputs_and_shifted_targets(tmp_path: Path) -> None:
    tokenizer, config = FakeTokenizer(), config_of()
    objective, rows = rows_of(config, tmp_path)
    assert set(rows.indexes[0].records["num_tokens"][:-1]) == {config.objective.sample_length(config.data)}
    step = next(iter(TrainLoader(rows, objective, config.data, config.training)))
    assert step.counts["span_corruption"] == sum(
        int((batch.fields["decoder_labels"] != IGNORE_LABEL).sum()) for batch in step.micro_batches
    )
    for batch in step.micro_batches:
        fields = {name: value.numpy() for name, value in batch.fields.items()}
        for row in range(len(fields["input_ids"])):
            inside = fields["sequence_ids"][row] > 0
            assert fields["input_ids"][row][inside][-1] == tokenizer.sep_id
            assert not fields["input_ids"][row][~inside].any()
            labels, ids = fields["decoder_labels"][row], fields["decoder_input_ids"][row]
            size = int((labels != IGNORE_LABEL).sum())
            assert ids[0] == PAD and ids[1:size].tolist() == labels[: size - 1].tolist()
            assert labels[size - 1] == tokenizer.sep_id and labels[0] == tokenizer.vocab_size - 1
            assert fields["decoder_position_ids"][row][:size].tolist() == list(range(size))
            assert fields["decoder_sequence_starts"][row].tolist() == [0, size]
            assert (fields["decoder_sequence_ids"][row] > 0).sum() == size


def test_restored_tokens_are_the_text_of_the_targets(tmp_path: Path) -> None:
    """Sentinels are left out although this vocabulary has them among its words, and so are ends and padding."""
    tokenizer, config = FakeTokenizer(), config_of()
    objective, rows = rows_of(config, tmp_path)
    for batch in next(iter(TrainLoader(rows, objective, config.data, config.training))).micro_batches:
        fields = {name: value.numpy() for name, value in batch.fields.items()}
        labels = fields["decoder_labels"]
        text = (labels > tokenizer.sep_id) & (labels < 800)
        assert np.array_equal(objective.restored(fields), text)
        assert 0 < text.sum() < (labels != IGNORE_LABEL).sum()


def test_a_preview_shows_input_and_target(tmp_path: Path) -> None:
    tokenizer, config = FakeTokenizer(), config_of()
    objective, rows = rows_of(config, tmp_path, 10)
    (text,) = preview_rows(rows, objective, tokenizer, config.data, config.training, 1)  # type: ignore[arg-type]
    assert "64 of 64 positions, 14 predictions" in text.plain
    shown, target = text.plain.split("→")
    assert shown.count("w999") == target.count("w999") == 1


@pytest.mark.parametrize(
    ("kind", "size", "settings", "names"),
    [
        ("t5", 160, {}, "<extra_id_{}>"),
        ("unigram", 160, {"extra_ids": 100}, "<extra_id_{}>"),
        ("wordpiece", 60, {"special_tokens": tuple(f"<extra_id_{n}>" for n in range(12))}, "<extra_id_{}>"),
        ("wordpiece", 60, {"special_tokens": tuple(f"[unused{n}]" for n in range(12))}, "[unused{}]"),
    ],
)
def test_any_vocabulary_with_sentinels_is_fit(
    kind: str, size: int, settings: dict[str, object], names: str, tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(kind, [WORDS] * 20, size, tmp_path / "tokenizer", **settings)
    config = config_of(objective={"sentinel_tokens": names})
    objective = build_objective(config.objective, tokenizer)
    objective.fields(config.data)
    tables = objective._tables_for(config.data.seq_length)
    assert [tokenizer.id_to_token(token) for token in tables.sentinels] == [
        names.replace("{}", str(number)) for number in range(len(tables.sentinels))
    ]
    assert tables.end_id == tokenizer.sep_id


class WithoutSentinels(FakeTokenizer):
    def token_to_id(self, token: str) -> int | None:
        return None


NAMES = r"ctxlm tokenizer --special-tokens '\[NLU\]' '\[NLG\]' '\[S2S\]', or name"


@pytest.mark.parametrize(
    ("seq_length", "objective", "tokenizer", "message"),
    [
        (64, {}, WithoutSentinels(), r"has no <extra_id_0>, rows need 3 such tokens .*--type t5"),
        (512, {"name": "denoiser_mixture", "mode_tokens": None}, FakeTokenizer(),
         r"has no <extra_id_100>, rows need 12\d such tokens .*--extra-ids 12\d,"),
        (64, {"name": "denoiser_mixture"}, FakeTokenizer(),
         rf"mode_tokens: the tokenizer has no \[NLU\], rows need 3 such tokens .*{NAMES}"),
    ],
)  # fmt: skip
def test_a_vocabulary_that_lacks_tokens_is_refused(
    seq_length: int, objective: dict[str, object], tokenizer: FakeTokenizer, message: str
) -> None:
    config = config_of(seq_length, objective=objective)
    with pytest.raises(ConfigError, match=message):
        build_objective(config.objective, tokenizer).fields(config.data)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"objective": {"noise_density": 0.0}}, "objective.noise_density: 0 leaves nothing"),
        ({"objective": {"name": "prefix_lm", "noise_density": 0.0}}, "0 leaves nothing to write"),
        ({"objective": {"sentinel_tokens": "<extra_id>"}}, "objective.sentinel_tokens: '<extra_id>' has no single"),
        ({"data": {"seq_length": 4}}, "data.seq_length: 4 leaves no room"),
        ({"data": {"sample_format": "doc_sentences", "packing": True}}, "data.packing: true, but objective.name"),
    ],
)
def test_impossible_settings_are_refused(sections: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_config(config_of(**sections), None)
    assert words in str(raised.value)


@pytest.mark.parametrize("density", [0.901, 0.999999, 1.0])
def test_noise_leaves_some_text(density: float, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_config(config_of()).replace("noise_density: 0.15", f"noise_density: {density}"))
    with pytest.raises(ConfigError, match=r"objective\.noise_density") as raised:
        load_config(path)
    assert str(raised.value).count("noise_density") == 1


def test_sequence_parallelism_must_split_both_stacks() -> None:
    config = config_of(
        512, parallel={"tensor_parallel_size": 4, "sequence_parallel": True}, training={"micro_batch_size": 1}
    )
    with pytest.raises(ConfigError, match=r"positions of a row of the decoder 114 .*micro_batch_size to 2"):
        check_config(config, None)


def test_rows_of_targets_are_padded_for_ranks_that_share_them() -> None:
    parallel = {"context_parallel_size": 4}
    with pytest.raises(ConfigError, match=r"4 does not divide the 114 .*set objective\.target_multiple to 4"):
        check_config(config_of(512, parallel=parallel), None)
    config = config_of(512, parallel=parallel, objective={"target_multiple": 4})
    check_config(config, None)
    columns = {field.name: field.columns for field in build_objective(config.objective).fields(config.data)}
    assert {columns[name] for name in columns if name.startswith("decoder") and "starts" not in name} == {116}


def test_no_row_is_no_error() -> None:
    config = config_of()
    objective = build_objective(config.objective, FakeTokenizer())
    assert len(objective.budgets(np.empty(0, dtype=np.int64), config.data)) == 0


@pytest.mark.parametrize(("density", "fewest"), [(0.5, 1), (0.25, 30)])
def test_a_text_is_cut_in_two(density: float, fewest: int) -> None:
    config = config_of(64, objective={"name": "prefix_lm", "noise_density": density})
    objective = build_objective(config.objective, FakeTokenizer())
    text = np.arange(5, 5 + config.objective.sample_length(config.data))
    samples = samples_from([single_sample(text)] * 400)
    examples = objective.corrupt_batch(samples, stream_key(1, "mask"), objective.budgets(samples.lengths, config.data))
    lengths = np.diff(examples.starts) - 1
    assert lengths.max() <= 62 and lengths.min() >= fewest
    assert abs((1 - lengths / len(text)).mean() - density) < 4 * (density / 3**0.5) / 20
    for number in range(400):
        example = examples.example(number)
        assert [*example.input_ids[:-1], *example.target_ids[:-1]] == text.tolist()
        assert example.input_ids[-1] == example.target_ids[-1] == FakeTokenizer().sep_id


def test_it_needs_no_sentinels() -> None:
    config = config_of(64, objective={"name": "prefix_lm"})
    objective = build_objective(config.objective, WithoutSentinels())
    fields = {field.name: field.columns for field in objective.fields(config.data)}
    assert (fields["input_ids"], fields["decoder_labels"]) == (64, 63)


MODES = {"[NLU]": 5, "[NLG]": 6, "[S2S]": 7}
COUNT = 3000


class ModeTokenizer(FakeTokenizer):
    def token_to_id(self, token: str) -> int | None:
        """Mode tokens, and two hundred sentinels: half of the tokens in spans of 3 make 127 spans."""
        number = token.removeprefix("<extra_id_").removesuffix(">")
        if number.isdigit() and int(number) < 200:
            return self.vocab_size - 1 - int(number)
        return MODES.get(token, super().token_to_id(token))


def test_the_denoisers_are_those_of_the_paper() -> None:
    """Tay 2022, section 3.1.2 and table 1 (R, S and X), and the shares of its mixture."""
    published = {
        ("[NLU]", 0.15, 3.0), ("[NLU]", 0.15, 8.0), ("[NLG]", 0.5, 3.0), ("[NLG]", 0.5, 8.0), ("[NLG]", 0.15, 64.0),
        ("[NLG]", 0.5, 64.0), ("[S2S]", 0.25, None),
    }  # fmt: skip
    denoisers = config_of(512, objective={"name": "denoiser_mixture"}).objective.denoisers()
    assert len(denoisers) == 7 and {(d.mode_token, d.noise_density, d.mean_span_length) for d in denoisers} == published
    assert [d.share for d in denoisers] == pytest.approx([0.8 / 6] * 6 + [0.2])


def test_samples_are_of_the_published_denoisers() -> None:
    config = config_of(512, objective={"name": "denoiser_mixture"})
    objective = build_objective(config.objective, ModeTokenizer(vocab_size=40_000))
    fields = {field.name: field.columns for field in objective.fields(config.data)}
    text = np.arange(10, 10 + config.objective.sample_length(config.data))
    samples = samples_from([single_sample(text)] * COUNT)
    examples = objective.corrupt_batch(samples, stream_key(1, "mask"), objective.budgets(samples.lengths, config.data))
    assert np.diff(examples.starts).max() == fields["input_ids"] == 512
    assert np.diff(examples.target_starts).max() <= fields["decoder_labels"]
    kinds: Counter[tuple[int, int, int]] = Counter()
    continuations = 0
    for number in range(COUNT):
        example = examples.example(number)
        mode, spans = int(example.input_ids[0]), int((example.input_ids >= 39_000).sum())
        noise = len(example.target_ids) - 1 - spans
        if mode == MODES["[S2S]"]:
            continuations += 1
            assert spans == 0
        else:
            kinds[mode, noise, spans] += 1
    denoisers = config.objective.denoisers()
    wanted = Counter((MODES[str(d.mode_token)], *d.counts(d.text_length(512))) for d in denoisers if not d.is_prefix)
    assert set(kinds) == set(wanted) and len(kinds) == 6
    for times, share in [(continuations, 0.2), *((times, 0.8 / 6) for times in kinds.values())]:
        assert abs(times / COUNT - share) < 4 * (share * (1 - share) / COUNT) ** 0.5


def test_mode_tokens_may_be_left_out() -> None:
    config = config_of(64, objective={"name": "denoiser_mixture", "mode_tokens": None})
    assert build_objective(config.objective, FakeTokenizer()).fields(config.data)


PUBLISHED = Denoiser(0.15, 3.0)


def published_helper(inputs_length: int, density: float, mean: float) -> tuple[int, int]:
    """`random_spans_helper` with one sentinel for each span: tokens of text, tokens of the target."""

    def lengths(tokens: int) -> tuple[int, int]:
        noise = int(round(tokens * density))
        spans = int(round(noise / mean))
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = inputs_length - 1
    while lengths(tokens + 1)[0] <= inputs_length:
        tokens += 1
    inputs, targets = lengths(tokens)
    if density == 0.5 and targets > inputs:
        return tokens - 1, targets - 1
    return tokens, targets


def published_counts(length: int, density: float, mean: float) -> tuple[int, int]:
    """`random_spans_noise_mask`'s numbers of tokens and spans, computed in float32 as there."""
    noise = int(np.rint(np.float32(length) * np.float32(density)))
    noise = min(max(noise, 1), length - 1)
    return noise, max(int(np.rint(np.float32(noise) / np.float32(mean))), 1)


@each("input_length, density, mean", product([32, 128, 511, 512, 2048], [0.15, 0.5], [3.0, 8.0]))
def test_lengths_are_those_of_the_published_helper(input_length: int, density: float, mean: float) -> None:
    denoiser = Denoiser(density, mean)
    length = denoiser.text_length(input_length)
    wanted, target = published_helper(input_length, density, mean)
    assert length == wanted
    # At 0.5 the helper shortens text and target by one, whatever target the shorter text makes.
    assert abs(denoiser.lengths(length)[1] - target) <= (density == 0.5)


@each("density, mean", [(0.15, 3.0), (0.5, 3.0), (0.25, 32.0), (0.1, 2.0)])
def test_counts_are_those_of_the_published_mask(density: float, mean: float) -> None:
    denoiser = Denoiser(density, mean)
    for length in range(2, 3000):
        assert denoiser.counts(length) == published_counts(length, density, mean), length


def test_shorter_texts_never_make_more() -> None:
    for denoiser in (PUBLISHED, Denoiser(0.5, 64.0), Denoiser(0.3, 1.0), Denoiser(0.5, None)):
        most = denoiser.text_length(100)
        lengths = [denoiser.lengths(length) for length in range(1, most + 1)]
        assert max(inputs for inputs, _ in lengths) <= 100
        assert max(targets for _, targets in lengths) == lengths[-1][1]


def test_a_prefix_leaves_room_for_the_end_token() -> None:
    denoiser = Denoiser(0.5, None)
    assert denoiser.text_length(512) == 511
    assert denoiser.prefix_bounds(511) == (1, 510)
    assert denoiser.prefix_bounds(1) == (0, 0)
    assert denoiser.lengths(511) == (511, 511)


@each("density, mean, input_length", product([1e-6, 0.15, 0.5, MOST_NOISE], [1.0, 2.5, 64.0, 1e6], [8, 9, 33, 3001]))
def test_the_text_is_the_longest_that_fits(density: float, mean: float, input_length: int) -> None:
    denoiser = Denoiser(density, mean)
    length = denoiser.text_length(input_length)
    assert all(denoiser.lengths(shorter)[0] <= input_length for shorter in range(length + 1))
    assert length < LONGEST_TEXT * input_length
    assert denoiser.lengths(length + 1 + (density == 0.5))[0] > input_length


def test_a_text_that_is_all_noise_has_an_end() -> None:
    assert Denoiser(1.0, 1e6).text_length(1 << 20) == LONGEST_TEXT << 20
    assert Denoiser(MOST_NOISE, 3.0).text_length(1 << 20) < 5.1 * (1 << 20)
