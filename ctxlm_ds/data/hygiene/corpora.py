"""Data recipes: the sources of a corpus, how they are cleaned, and the published counts that prove it complete.

Imports no numpy, so that --help answers fast.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from ctxlm_ds.data.hygiene.cleaning import RULES
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.describe import dotted
from ctxlm_ds.recipe.problems import Problem, did_you_mean, explain_error, raise_problems, show_value
from ctxlm_ds.recipe.sections import NonNegativeInt, PositiveInt, Probability, Section
from ctxlm_ds.recipe.yaml_source import YamlSource, read_yaml, write_yaml

CORPUS_DIR = Path(__file__).resolve().parents[2] / "corpora"
LANGUAGE_TEMPLATE = "wikipedia"
"""The recipe for any language: `{language}` in it is the part of the name after the dash."""

if TYPE_CHECKING:
    CleaningRule = str
else:
    CleaningRule = Literal[tuple(RULES)]
Measure = Literal[
    "records_read", "documents_read", "words_read", "bytes_read", "documents_written", "words_written", "bytes_written"
]


class Expectation(Section):
    """A published count."""

    measure: Measure
    """What is counted before (`_read`) or after (`_written`) all stages. A record is a row or line of the source,
    words are separated by blanks, bytes are UTF-8 text."""
    count: PositiveInt
    tolerance: Probability = 0.01
    """Largest deviation, as a share of the number."""
    published: str
    """The publication that gives the number."""
    language: str = ""
    """The language that it is for, in a recipe for any language; empty for all."""


class CorpusSource(Section):
    """One source of a corpus."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """First part of the names of its files."""
    input: Annotated[list[str], Field(min_length=1)]
    """Files, globs and hf://NAME?config=C&split=S&revision=R, as for ctxlm preprocess."""
    json_keys: Annotated[list[str], Field(min_length=1)] = ["text"]
    """Keys or columns. The first is the text that is cleaned and filtered; it is written as `text`."""
    input_format: str = "auto"
    status: Literal["original", "copy", "substitute"] = "original"
    """`copy`: somebody's copy of an original that is no longer available. `substitute`: what is usually read instead
    of an original that is not available at all."""
    note: str = ""
    """What happened to the original, and what to use instead."""
    join_rows: NonNegativeInt = 0
    """Rows per document, if a row is a sentence. The last document of a chunk of rows is shorter."""
    clean: list[CleaningRule] = []
    """Cleaning rules, in order; `fix_text` comes before `control_characters` in any case."""
    expected: list[Expectation] = []

    @field_validator("clean")
    @classmethod
    def _repair_first(cls, rules: list[CleaningRule]) -> list[CleaningRule]:
        """Move fix_text before control_characters, which takes out bytes of the text that it repairs."""
        if "fix_text" not in rules or "control_characters" not in rules[: rules.index("fix_text")]:
            return rules
        others = [rule for rule in rules if rule != "fix_text"]
        place = others.index("control_characters")
        return [*others[:place], "fix_text", *others[place:]]

    @model_validator(mode="after")
    def _text_comes_first(self) -> CorpusSource:
        if "text" in self.json_keys[1:]:
            raise ValueError(f"json_keys {' '.join(self.json_keys)}: `text` must come first, the first key becomes it")
        return self


class FilterConfig(Section):
    """The stages that documents pass; each is off unless set."""

    min_words: NonNegativeInt = 0
    """Drop documents of fewer words (separated by blanks)."""
    max_words: PositiveInt | None = None
    """Drop documents of more words."""
    min_characters: NonNegativeInt = 0
    """Drop documents of fewer characters."""
    max_characters: PositiveInt | None = None
    """Drop documents of more characters."""
    min_letters: Probability = 0.0
    """Drop documents in which a smaller share of the characters (blanks not counted) are letters or marks."""
    gopher_quality: bool = False
    """Drop by Gopher's document rules (Rae et al. 2021, A.1.1): 50 to 100,000 words, mean word length 3 to 10, symbols,
    bullets, ellipses, words without letters; two English stop words unless `languages` leaves English out."""
    gopher_repetition: bool = False
    """Drop by Gopher's repetition rules (table A1): repeated lines, paragraphs and n-grams."""
    c4_quality: bool = False
    """Drop by C4's page rules (Raffel et al. 2020, 2.2): lorem ipsum, curly brackets, fewer than 3 sentences."""
    languages: list[str] = []
    """Drop documents that py3langid takes for another language than these (ISO 639 codes: en, de, ...)."""
    decontaminate: list[str] = []
    """Held-out files; drop documents that share a word n-gram with them."""
    decontamination_ngram: Annotated[int, Field(ge=2, le=64)] = 13
    """Words of that n-gram (GPT-3, Brown et al. 2020, appendix C: 13)."""
    exact_duplicates: bool = False
    """Drop documents with the same words as an earlier one; case, blanks and punctuation do not count."""
    near_duplicates: bool = False
    """Drop documents nearly equal to an earlier one (MinHash, needs the package rensa)."""
    near_duplicate_threshold: Annotated[float, Field(gt=0.3, le=1.0)] = 0.8
    """Least estimated Jaccard similarity of the 5-word shingles of near duplicates."""


STAGE_SETTINGS: dict[str, tuple[list[str], list[str]]] = {
    "length": (["min_words", "max_words", "min_characters", "max_characters"], []),
    "characters": (["min_letters"], []),
    "gopher_quality": (["gopher_quality"], []),
    "gopher_repetition": (["gopher_repetition"], []),
    "c4_quality": (["c4_quality"], []),
    "language": (["languages"], []),
    "decontamination": (["decontaminate"], ["decontamination_ngram"]),
    "exact_duplicates": (["exact_duplicates"], []),
    "near_duplicates": (["near_duplicates"], ["near_duplicate_threshold"]),
}
"""The stages in their order: the settings that turn each on, and its further settings."""


def active_stages(filters: FilterConfig) -> dict[str, dict[str, object]]:
    """Return the stages that are on, in order, with their settings."""
    off = FilterConfig()
    return {
        stage: {name: getattr(filters, name) for name in (*switches, *others)}
        for stage, (switches, others) in STAGE_SETTINGS.items()
        if any(getattr(filters, name) != getattr(off, name) for name in switches)
    }


def required_package(name: str, flag: str) -> Any:
    """Import and return an optional package. Raises DataError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"{flag} needs the package {name}, which is not installed here; pip install {name}") from error


class CorpusRecipe(Section):
    """A corpus: sources, filters, provenance."""

    name: str
    title: str = ""
    """One line on its content."""
    language: str = ""
    """ISO 639 code; empty for several languages."""
    size: str = ""
    """Published size of the text."""
    paper: str = ""
    """Address of the publication."""
    note: str = ""
    include: list[str] = []
    """Data recipes whose sources come first. Their filters do not apply."""
    sources: list[CorpusSource] = []
    """The sources in reading order. The first of several duplicates stays."""
    filters: FilterConfig = FilterConfig()
    """The stages that all documents pass."""


def shipped_corpora() -> list[str]:
    """Return the names of the data recipes in the package; the one for any language is `wikipedia-LANG`."""
    stems = sorted(path.stem for path in CORPUS_DIR.glob("*.yaml"))
    return [f"{stem}-LANG" if stem == LANGUAGE_TEMPLATE else stem for stem in stems]


def load_corpus(name: str | Path, above: tuple[str, ...] = ()) -> CorpusRecipe:
    """Return a data recipe with the sources that it includes, and the published counts of its language.

    `name` is a shipped name, `wikipedia-LANG`, or the path of a YAML file, `above` the recipes that include this one.
    Raises ConfigError with every unknown key and wrong value, each with its line.
    """
    name = str(name)
    if name in above:
        raise ConfigError(f"data recipe {name}: `include` forms a circle: {' -> '.join((*above, name))}")
    path, language = _find(name)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data recipe {path}: not UTF-8 text (byte {error.start})") from error
    yaml = read_yaml(text.replace("{language}", language), str(path))
    raise_problems(
        f"data recipe {path}",
        [Problem(dotted(at) or str(path), problem, where=f"{path}:{line}") for at, line, problem in yaml.problems],
    )
    if not isinstance(yaml.data, dict):
        raise ConfigError(f"data recipe {path}: expected settings, not {show_value(yaml.data)}")
    recipe = _checked(yaml, str(path))
    sources = [source for other in recipe.include for source in load_corpus(other, (*above, name)).sources]
    for source in recipe.sources:
        expected = [count for count in source.expected if count.language in ("", recipe.language)]
        sources.append(source.model_copy(update={"expected": expected}))
    names = [source.name for source in sources]
    if not sources:
        raise ConfigError(f"data recipe {path}: no sources; name at least one")
    if len(set(names)) < len(names):
        raise ConfigError(f"data recipe {path}: two sources have the same name ({', '.join(names)}); rename one")
    return recipe.model_copy(update={"include": [], "sources": sources})


def input_corpus(name: str, source: Mapping[str, Any]) -> CorpusRecipe:
    """Return a data recipe of one source made of files, given its settings. Raises ConfigError for a wrong one."""
    return _checked(YamlSource({"name": name, "sources": [{"name": "part", **source}]}), "of --input")


def _find(name: str) -> tuple[Path, str]:
    """Return file and language of a data recipe."""
    if "/" not in name and not name.endswith((".yaml", ".yml")):
        shipped = CORPUS_DIR / f"{name}.yaml"
        if shipped.is_file() and name != LANGUAGE_TEMPLATE:
            return shipped, ""
        language = name.removeprefix(f"{LANGUAGE_TEMPLATE}-")
        if language != name and re.fullmatch(r"[a-z]{2,}[a-z0-9-]*", language):
            return CORPUS_DIR / f"{LANGUAGE_TEMPLATE}.yaml", language
    elif Path(name).is_file():
        return Path(name), ""
    shipped_names = shipped_corpora()
    hint = did_you_mean(name, shipped_names) or "."
    raise ConfigError(f"data recipe {name}: not found{hint} Shipped: {', '.join(shipped_names)}")


def _checked(yaml: YamlSource, where: str) -> CorpusRecipe:
    try:
        return CorpusRecipe.model_validate_json(json.dumps(yaml.data), strict=True)
    except ValidationError as error:
        problems = [_problem(details, yaml.lines, where) for details in error.errors(include_url=False)]
    raise_problems(f"data recipe {where}", problems)
    raise AssertionError("a validation error holds at least one problem")


def _problem(details: ErrorDetails, lines: Mapping[tuple[str | int, ...], int], where: str) -> Problem:
    path = details["loc"]
    line = next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), None)
    sections: dict[Any, type[Section]] = {"sources": CorpusSource, "expected": Expectation, "filters": FilterConfig}
    section = next((sections[part] for part in reversed(path[:-1]) if part in sections), CorpusRecipe)
    text = explain_error(details, section.model_fields)
    return Problem(dotted(path) or where, text, where=f"{where}:{line}" if line else where)


def blend_text(sources: Sequence[str], prefix: str = "PREFIX") -> str:
    """Return the `data` section (YAML) of a training recipe that reads all sources, one after another."""
    train = [{"name": source, "path": f"{prefix}-{source}_text_sentence"} for source in sources]
    return write_yaml({"data": {"blend": "concatenate", "train": train}})
