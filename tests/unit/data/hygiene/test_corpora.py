"""Data recipes: all that ship load, mistakes are named with their line, and the blend is a section of a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ctxlm_ds.commands.prepare_corpus import add_filter_flags, corpora_lines, with_filter_flags
from ctxlm_ds.data.hygiene.corpora import CorpusSource, blend_text, input_corpus, load_corpus, shipped_corpora
from ctxlm_ds.data.sources.reading import find_sources
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.load import load_config

NAMES = [name.replace("-LANG", "-de") for name in shipped_corpora()]


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_recipe_is_complete(name: str) -> None:
    recipe = load_corpus(name)
    assert recipe.name == name
    assert recipe.title and recipe.size and recipe.paper.startswith("https://") and recipe.language
    for source in recipe.sources:
        assert [file.format for file in find_sources(source.input, source.input_format)] == ["hf"] * len(source.input)
        assert "{" not in source.input[0]
        assert source.note if source.status != "original" else True
        assert source.expected and all(count.published for count in source.expected)


def test_the_table_has_a_line_for_each_source() -> None:
    lines = corpora_lines()
    sources = sum(len(load_corpus(name).sources) for name in NAMES)
    assert lines[1 + sources] == ""
    assert all(any(line.startswith(name) for line in lines) for name in shipped_corpora())
    assert "hf://wikimedia/wikipedia?config=20231101.en" in "\n".join(lines)


def test_a_corpus_of_corpora_has_their_sources_in_order() -> None:
    recipe = load_corpus("roberta")
    names = [source.name for source in recipe.sources]
    assert names == ["wikipedia", "bookcorpus", "openwebtext", "stories", "cc-news"]
    assert recipe.sources[0].input == ["hf://wikimedia/wikipedia?config=20231101.en"]


@pytest.mark.parametrize(("language", "count"), [("de", 2845308), ("en", 6407814), ("xh", None)])
def test_a_wikipedia_for_any_language(language: str, count: int | None) -> None:
    recipe = load_corpus(f"wikipedia-{language}")
    source = recipe.sources[0]
    assert source.input == [f"hf://wikimedia/wikipedia?config=20231101.{language}"]
    counts = {expected.measure: expected.count for expected in source.expected}
    assert counts.get("records_read") == count
    assert ("words_written" in counts) == (language == "en")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("openwebtxt", "did you mean openwebtext"),
        ("wikipedia", "did you mean wikipedia-LANG"),
        ("wikipedia-../x", "not found"),
        ("nowhere/corpus.yaml", "not found"),
    ],
)
def test_a_name_that_is_none(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_corpus(name)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            "name: x\nsources:\n- name: a\n  inputs: [f]\n",
            [r"sources\[0\].inputs: unknown setting; did you mean input", "x.yaml:4", r"sources\[0\].input: missing"],
        ),
        (
            "name: x\nsources:\n- {name: a, input: [f], clean: [w]}\n",
            [r'sources\[0\].clean\[0\]: "w": Input should be .control_characters', "x.yaml:3"],
        ),
        ("name: x\nfilters:\n  min_word: 3\n", ["min_word: unknown setting; did you mean min_words", "x.yaml:3"]),
        ("name: x\nfilters:\n  min_words: -3\n", ["filters.min_words: -3: Input should be greater than or equal to 0"]),
        ("name: x\nfilters:\n  min_words: fifty\n", ['"fifty": Input should be a valid integer.*x.yaml:3']),
        ("name: x\nfilters:\n  languages: en\n", ['languages: "en": Input should be a valid array']),
        ("name: x\nsources:\n- {name: a, input: []}\n", ["List should have at least 1 item"]),
        ("name: x\nsources:\n- {name: a, input: [f], expected: [{count: x}]}\n", ['count: "x": Input should be']),
        ("name: x\n", ["no sources; name at least one"]),
        ("name: x\nname: y\n", ["written twice"]),
        ("- x\n", ["expected settings"]),
        ("name: [x\n", ["not valid YAML"]),
        ("name: x\nsources:\n- {name: a, input: [f]}\n- {name: a, input: [g]}\n", ["two sources have the same name"]),
        ("name: x\nsources:\n- {name: a/b, input: [f]}\n", ["sources\\[0\\].name"]),
        ("name: x\nsources:\n- {name: a, input: [f], json_keys: [title, text]}\n", ["`text` must come first"]),
        ("name: x\ninclude: [c4, c4]\n", ["two sources have the same name"]),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, messages: list[str]) -> None:
    (tmp_path / "x.yaml").write_text(text)
    for message in messages:
        with pytest.raises(ConfigError, match=message):
            load_corpus(tmp_path / "x.yaml")


def test_includes_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"name: a\ninclude: [{tmp_path}/b.yaml]\n")
    (tmp_path / "b.yaml").write_text(f"name: b\ninclude: [{tmp_path}/a.yaml]\n")
    with pytest.raises(ConfigError, match="forms a circle"):
        load_corpus(tmp_path / "a.yaml")


def test_wrong_settings_of_files_are_one_message() -> None:
    with pytest.raises(ConfigError, match="join_rows: -1"):
        input_corpus("x", {"input": ["f"], "join_rows": -1})


def test_the_blend_is_the_data_section_of_a_training_recipe(tmp_path: Path) -> None:
    text = blend_text(["wikipedia", "bookcorpus"], "data/x")
    (tmp_path / "run.yaml").write_text("extends: bert-tiny\n" + text)
    data = load_config(tmp_path / "run.yaml").data
    assert (data.blend, [source.name for source in data.train]) == ("concatenate", ["wikipedia", "bookcorpus"])
    assert data.train[1].path == "data/x-bookcorpus_text_sentence"


def test_every_filter_has_a_flag_that_is_laid_over_the_recipe() -> None:
    parser = argparse.ArgumentParser()
    add_filter_flags(parser)
    recipe = load_corpus("cc-news")
    assert with_filter_flags(recipe, parser.parse_args([])) == recipe
    words = "--min-words 3 --languages de fr --no-near-duplicates --gopher-quality --near-duplicate-threshold 0.7"
    given = with_filter_flags(recipe, parser.parse_args(words.split())).filters
    expected = {"min_words": 3, "languages": ["de", "fr"], "near_duplicates": False, "gopher_quality": True}
    assert given == recipe.filters.model_copy(update=expected | {"near_duplicate_threshold": 0.7})
    for wrong in ("--min-letters 2", "--decontamination-ngram 1", "--max-words 0", "--min-letters nan"):
        with pytest.raises(ConfigError, match=f"{wrong.split()[0]} .*: Input should be "):
            with_filter_flags(recipe, parser.parse_args(wrong.split()))


@pytest.mark.parametrize(
    ("given", "applied"),
    [
        ("control_characters fix_text", "fix_text control_characters"),
        ("markup control_characters whitespace fix_text", "markup fix_text control_characters whitespace"),
        ("fix_text whitespace control_characters", "fix_text whitespace control_characters"),
        ("whitespace fix_text", "whitespace fix_text"),
    ],
)
def test_text_is_repaired_before_control_characters_are_removed(given: str, applied: str) -> None:
    source = CorpusSource(name="a", input=["f"], clean=given.split())
    assert source.clean == applied.split()
