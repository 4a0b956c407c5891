"""Data recipes: which sources a corpus is made of, how they are cleaned, and the counts that prove it whole.

In: the name of a shipped recipe, `wikipedia-LANG`, or a YAML file. Out: a checked, frozen CorpusRecipe, or one
ConfigError with every problem in it. Not here: reading, filtering, counting (hygiene/). Imports no numpy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.recipe.describe import describe_field, describe_type, dotted
from ctxlm_ds.recipe.problems import Problem, did_you_mean, nearest_name, raise_problems, show_value
from ctxlm_ds.recipe.section import NonNegativeInt, PositiveFloat, PositiveInt, Probability, Section
from ctxlm_ds.recipe.yaml_source import YamlSource, read_yaml

CORPUS_DIR = Path(__file__).resolve().parents[2] / "corpora"
LANGUAGE_TEMPLATE = "wikipedia"
"""The recipe that stands for one a language; `{language}` in it is the part of the name after the dash."""
LANGUAGE_TOLERANCE = 0.05

CleaningRule = Literal[
    "control_characters",
    "whitespace",
    "markup",
    "wiki_tail",
    "prose_lines",
    "boilerplate_lines",
    "c4_lines",
    "gutenberg",
    "join_lines",
]
Measure = Literal[
    "records_read", "documents_read", "words_read", "bytes_read", "documents_written", "words_written", "bytes_written"
]


class Expectation(Section):
    """A published count."""

    measure: Measure
    """What is counted: records are rows or lines of the source, documents what they become, words what spaces part,
    bytes UTF-8 text; before all stages (`_read`) or after them (`_written`)."""
    count: PositiveInt
    """The published number."""
    tolerance: Probability = 0.01
    """Largest deviation, as a share of the number."""
    published: str
    """Where the number stands."""
    language: str = ""
    """Only for this language of a recipe by language."""


class CorpusSource(Section):
    """One part of a corpus."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Begins the names of its files."""
    input: Annotated[list[str], Field(min_length=1)]
    """Files, globs and hf://NAME?config=C&split=S&revision=R, as for tools/preprocess_data.py."""
    json_keys: Annotated[list[str], Field(min_length=1)] = ["text"]
    """Keys or columns; the first is the text that filters judge, and is written as `text`."""
    input_format: str = "auto"
    """As for tools/preprocess_data.py."""
    status: Literal["original", "copy", "substitute"] = "original"
    """`copy`: the original can no longer be had from its makers, this is another's copy of it. `substitute`: nor a
    copy; this is what is usually taken instead."""
    note: str = ""
    """What became of the original, and what to take instead."""
    join_rows: NonNegativeInt = 0
    """Rows that make a document where a row is a sentence; the last document of a chunk of rows is shorter."""
    clean: list[CleaningRule] = []
    """Cleaning rules, in order."""
    weight: PositiveFloat | None = None
    """Share of the training rows under a weighted blend (`data.train` of a recipe)."""
    epochs: PositiveFloat | None = None
    """Passes in one epoch of the run under a concatenating blend."""
    expected: list[Expectation] = []
    """Published counts, checked at the end."""
    records_by_language: dict[str, PositiveInt] = {}
    """Published number of records for each language of a recipe by language."""

    @model_validator(mode="after")
    def _text_comes_first(self) -> CorpusSource:
        if "text" in self.json_keys[1:]:
            raise ValueError(f"json_keys {' '.join(self.json_keys)}: `text` must come first, the first key becomes it")
        return self


class FilterConfig(Section):
    """The stages that documents pass; each is off unless set."""

    min_words: NonNegativeInt = 0
    """Drop documents of fewer words (as spaces part them)."""
    max_words: PositiveInt | None = None
    """Drop documents of more words."""
    min_characters: NonNegativeInt = 0
    """Drop documents of fewer characters."""
    max_characters: PositiveInt | None = None
    """Drop documents of more characters."""
    min_letters: Probability = 0.0
    """Drop documents in which a smaller share of the characters (blanks not counted) are letters or marks."""
    scripts: list[str] = []
    """Drop documents whose letters are not mostly of these scripts, named as Unicode names letters: latin, greek,
    cyrillic, arabic, hebrew, devanagari, hiragana, katakana, hangul, cjk, thai, ..."""
    min_script_share: Probability = 0.9
    """Least share of the letters that must be of `scripts`."""
    gopher_quality: bool = False
    """Drop by Gopher's document rules (Rae et al. 2021, A.1.1): 50 to 100,000 words, mean word length 3 to 10, symbols,
    bullets, ellipses, words without letters; two English stop words unless `languages` leaves English out."""
    gopher_repetition: bool = False
    """Drop by Gopher's repetition rules (table A1): repeated lines, paragraphs and n-grams."""
    c4_quality: bool = False
    """Drop by C4's page rules (Raffel et al. 2020, 2.2): lorem ipsum, curly brackets, fewer than 3 sentences."""
    languages: list[str] = []
    """Drop documents that py3langid takes for another language than these (ISO 639 codes: en, de, ...)."""
    min_language_confidence: Probability = 0.0
    """Drop documents whose language is less certain than this."""
    decontaminate: list[str] = []
    """Held-out files; drop documents that share a word n-gram with them."""
    decontamination_ngram: Annotated[int, Field(ge=2, le=64)] = 13
    """Words of that n-gram (GPT-3, Brown et al. 2020, appendix C: 13)."""
    exact_duplicates: bool = False
    """Drop documents equal to an earlier one but for case, blanks and punctuation."""
    near_duplicates: bool = False
    """Drop documents nearly equal to an earlier one (MinHash, needs the package rensa)."""
    near_duplicate_threshold: Annotated[float, Field(gt=0.3, le=1.0)] = 0.8
    """Estimated Jaccard similarity of the sets of shingles from which on two documents are near duplicates."""
    near_duplicate_shingle: PositiveInt = 5
    """Words of a shingle."""
    near_duplicate_permutations: Annotated[int, Field(ge=16, le=1024)] = 128
    """Slots of a MinHash signature; more estimate better (error about 0.4/sqrt(slots)) and cost more."""


class CorpusRecipe(Section):
    """A corpus: sources, filters, provenance."""

    name: str
    """Its name."""
    title: str = ""
    """One line on what it is."""
    language: str = ""
    """ISO 639 code; empty for a mixed corpus."""
    size: str = ""
    """Published size of the text."""
    paper: str = ""
    """Where it was published."""
    note: str = ""
    """What else there is to know."""
    include: list[str] = []
    """Data recipes whose sources come first (their filters do not count)."""
    sources: list[CorpusSource] = []
    """The sources, in the order in which they are read and in which the first of duplicates stays."""
    filters: FilterConfig = FilterConfig()
    """The stages that all documents pass."""
    blend: Literal["concatenate", "weighted"] = "concatenate"
    """How the sources are mixed in training (`data.blend`)."""

    @model_validator(mode="after")
    def _names_differ(self) -> CorpusRecipe:
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"two sources have one name ({', '.join(names)}); give each its own")
        return self


def shipped_corpora() -> list[str]:
    """Names of the data recipes in the package; the one by language as `wikipedia-LANG`."""
    stems = sorted(path.stem for path in CORPUS_DIR.glob("*.yaml"))
    return [f"{stem}-LANG" if stem == LANGUAGE_TEMPLATE else stem for stem in stems]


def load_corpus(name: str | Path) -> CorpusRecipe:
    """A data recipe by shipped name, `wikipedia-LANG`, or path of a YAML file, with the sources that it includes.

    Raises ConfigError with every unknown key and wrong value, each with its line.
    """
    return _load(str(name), ())


def input_corpus(name: str, source: Mapping[str, Any]) -> CorpusRecipe:
    """A data recipe of one source made of files, its settings by name. Raises ConfigError for a wrong one."""
    data = {"name": name, "sources": [{"name": "part", **source}]}
    return _checked(data, YamlSource(data), "of --input")


def _load(name: str, above: tuple[str, ...]) -> CorpusRecipe:
    if name in above:
        raise ConfigError(f"data recipe {name}: `include` goes round in a circle: {' -> '.join((*above, name))}")
    path, language = _find(name)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data recipe {path}: not UTF-8 text (byte {error.start})") from error
    recipe = _validate(read_yaml(text.replace("{language}", language), str(path)), str(path))
    included = [source for other in recipe.include for source in _load(other, (*above, name)).sources]
    whole = {**recipe.model_dump(mode="json"), "include": []}
    whole["sources"] = [source.model_dump(mode="json") for source in (*included, *recipe.sources)]
    if not whole["sources"]:
        raise ConfigError(f"data recipe {path}: no sources; name at least one")
    return _checked(whole, YamlSource(whole), str(path))


def _find(name: str) -> tuple[Path, str]:
    """File and language of a data recipe."""
    if "/" not in name and not name.endswith((".yaml", ".yml")):
        shipped = CORPUS_DIR / f"{name}.yaml"
        if shipped.is_file() and name != LANGUAGE_TEMPLATE:
            return shipped, ""
        language = name.removeprefix(f"{LANGUAGE_TEMPLATE}-")
        if language != name and re.fullmatch(r"[a-z]{2,}[a-z0-9-]*", language):
            return CORPUS_DIR / f"{LANGUAGE_TEMPLATE}.yaml", language
    elif Path(name).is_file():
        return Path(name), ""
    near = nearest_name(name, shipped_corpora())
    hint = f"did you mean {near}? " if near else ""
    raise ConfigError(f"data recipe {name}: there is none; {hint}Shipped: {', '.join(shipped_corpora())}")


def _validate(source: YamlSource, where: str) -> CorpusRecipe:
    unreadable = [Problem(dotted(path) or where, text, where=f"{where}:{line}") for path, line, text in source.problems]
    raise_problems(f"data recipe {where}", unreadable)
    if not isinstance(source.data, dict):
        raise ConfigError(f"data recipe {where}: expected settings, not {show_value(source.data)}")
    return _checked(source.data, source, where)


def _checked(data: dict[str, Any], source: YamlSource, where: str) -> CorpusRecipe:
    try:
        return CorpusRecipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems = [_problem(details, source, where) for details in error.errors(include_url=False)]
    raise_problems(f"data recipe {where}", problems)
    raise AssertionError("a validation error holds at least one problem")


def _problem(details: ErrorDetails, source: YamlSource, where: str) -> Problem:
    path = details["loc"]
    line = next((source.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in source.lines), None)
    place = f"{where}:{line}" if line else where
    name = dotted(path) or where
    if details["type"] == "extra_forbidden":
        hint = did_you_mean(str(path[-1]), _known_settings(path[:-1]))
        return Problem(name, f"unknown setting{hint}", where=place)
    if details["type"] == "missing":
        return Problem(name, "missing", where=place)
    return Problem(name, f"{show_value(details['input'])}: {explain(CorpusRecipe, details)}", where=place)


def explain(section: type[Section], details: ErrorDetails) -> str:
    """What is wrong with the value of a setting below `section`, in words: what it expects."""
    kind, path = details["type"], details["loc"]
    if kind == "value_error":
        return details["msg"].removeprefix("Value error, ")
    if kind == "string_pattern_mismatch":
        return "expected letters, digits and _ . - behind a first letter or digit"
    return f"expected {_expected(section, path)}" + (" with at least one in it" if kind == "too_short" else "")


def _expected(section: type[Section], path: tuple[int | str, ...]) -> str:
    inside: Any = section
    expected = "something else"
    for part in path:
        fields = getattr(inside, "model_fields", {})
        if part in fields:
            field = fields[part]
            inside, expected = field.annotation, describe_field(field)
        elif isinstance(part, int) or get_origin(inside) is dict:
            inside = get_args(inside)[-1]
            expected = describe_type(inside)
    return expected


def _known_settings(path: tuple[str | int, ...]) -> Mapping[str, Any]:
    sections: dict[str, type[Section]] = {"sources": CorpusSource, "expected": Expectation, "filters": FilterConfig}
    named = [part for part in path if isinstance(part, str)]
    return sections.get(named[-1], CorpusRecipe).model_fields if named else CorpusRecipe.model_fields


def expectations(source: CorpusSource, language: str) -> list[Expectation]:
    """The published counts of a source, those of its language among them."""
    expected = [count for count in source.expected if count.language in ("", language)]
    number = source.records_by_language.get(language)
    if number is None:
        return expected
    by_language = Expectation(
        measure="records_read",
        count=number,
        tolerance=LANGUAGE_TOLERANCE,
        published=f"articles of the {language} edition of that date",
    )
    return [*expected, by_language]


def blend_text(recipe: CorpusRecipe, names: Collection[str], prefix: str = "PREFIX") -> str:
    """The `data` section (YAML) of a training recipe that mixes the sources of these names as this data recipe says."""
    lines = ["data:", f"  blend: {recipe.blend}", "  train:"]
    for source in (source for source in recipe.sources if source.name in names):
        lines += [f"  - name: {source.name}", f"    path: {prefix}-{source.name}_text_sentence"]
        if recipe.blend == "weighted":
            lines.append(f"    weight: {source.weight or 1.0}")
        elif source.epochs is not None and source.epochs != 1:
            lines.append(f"    epochs: {source.epochs}")
    return "\n".join(lines) + "\n"
