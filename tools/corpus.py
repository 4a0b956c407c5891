"""Clean, filter and deduplicate text with datatrove, and compare a published corpus with its published counts.

    pip install -e '.[corpus]'
    python tools/corpus.py --input 'crawl/*.jsonl.gz' --output-dir corpus --clean markup whitespace --languages en \
        --quality gopher --deduplicate --workers 16

SOURCE-TASK.jsonl.gz, one {"text": ...} a line, and corpus.json with all counts appear when everything is done. The same
command continues an interrupted run. py3langid names languages: the models of datatrove's filters come from a network.
"""

from __future__ import annotations

import argparse
import html
import importlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ctxlm_ds.console import at_least, run_command
from ctxlm_ds.data.sources.corpus import BadRecords
from ctxlm_ds.data.sources.parsing import parse_chunk
from ctxlm_ds.data.sources.reading import find_sources, read_chunks, source_signature
from ctxlm_ds.data.sources.types import BadRecord, InputShard
from ctxlm_ds.errors import DataError

os.environ.setdefault("TQDM_DISABLE", "1")  # datatrove's bars; read when tqdm is imported
try:
    import ftfy
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline import dedup, filters
    from datatrove.pipeline.base import PipelineStep
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.logging import logger
    from datatrove.utils.word_tokenizers import WhitespaceTokenizer
    from py3langid import langid
except ImportError as missing:
    raise SystemExit(f"error: the package {missing.name} is not installed; pip install -e '.[corpus]'") from missing

TABLES = yaml.safe_load(Path(__file__).with_name("corpora.yaml").read_text(encoding="utf-8"))
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060\ufeff\ufffe\uffff]")
_BLANKS = re.compile(r"[ \t\u00a0\u2000-\u200a\u202f\u205f\u3000]+")
_DIFFERENT = "{measure}: {:,}, not the published {count:,} ({published})"
_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
_ELEMENTS = "|".join(TABLES["markup_elements"].split())
_ATTRIBUTE = r"""\s+(?:[a-z][\w:.-]{0,80}\s*=\s*(?:"[^"<>]{0,2000}"|'[^'<>]{0,2000}'|[^\s"'<>=]{1,2000})|BARE)"""
_ATTRIBUTE = _ATTRIBUTE.replace("BARE", "(?:" + "|".join(TABLES["markup_bare_attributes"].split()) + r")\b")
_MARKUP = re.compile(rf"(?is)<!--(?:(?!<!--).)*?-->|</(?:{_ELEMENTS})\s*>|<(?:{_ELEMENTS})(?:{_ATTRIBUTE})*\s*/?>")
_BOILERPLATE = re.compile(rf"(?im)^(?!.{{200}})({'|'.join(TABLES['boilerplate'])})(\n|\Z)")
_WIKI_TAIL = re.compile(rf"(?i)\n[ =]*({'|'.join(TABLES['wiki_tail'])})[ =]*(\n(?s:.*)|\Z)")
_GPT_CHARACTERS = str.maketrans({"—": "-", "–": "-", "―": "-", "…": "...", "´": "'"})
_GPT_RUNS = re.compile(r"([-~!\";?+,()/*\[\]{}|_])\1*")


def _whitespace(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(_BLANKS.sub(" ", line).strip() for line in text.split("\n"))).strip("\n")


def _join_lines(text: str) -> str:
    paragraphs = re.split(r"\n[ \t]*\n\s*", text)
    return "\n".join(" ".join(line.strip() for line in paragraph.split("\n")).strip() for paragraph in paragraphs)


def _gpt_standard(text: str) -> str:
    text = _GPT_RUNS.sub(r" \g<0> ", text.translate(_GPT_CHARACTERS))
    return re.sub(r"\s*\n\s*", " \n ", re.sub(r"[^\S\n]+", " ", text)).strip()


_spacy = cache(lambda: importlib.import_module("spacy").blank("en").tokenizer)  # only GPT-1's words need it
_langid = cache(lambda: langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE))
RULES: dict[str, Callable[[str], str]] = {
    "fix_text": lambda text: ftfy.fix_text(text),
    "control_characters": lambda text: _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n")),
    "markup": lambda text: html.unescape(_MARKUP.sub("", text)),
    "wiki_tail": lambda text: _WIKI_TAIL.sub("", text),
    "prose_lines": lambda text: "\n".join(line for line in text.split("\n")
                                          if not line.strip() or line.rstrip()[-1] in TABLES["line_ends"]),
    "boilerplate_lines": lambda text: _BOILERPLATE.sub("", text),
    "join_lines": _join_lines,
    "whitespace": _whitespace,
    "gpt_standard": _gpt_standard,
    "gpt_words": lambda text: " ".join(filter(None, (word.text.strip(" ").lower() for word in _spacy()(text)))),
}
"""Cleaning rules, applied in the order of --clean (docs/corpora.md)."""
QUALITY = {"gopher": filters.GopherQualityFilter, "gopher_repetition": filters.GopherRepetitionFilter}


class Words(WhitespaceTokenizer):
    """Split at blanks, and between characters of scripts without blanks: 20 times as fast as datatrove's spaCy."""

    def word_tokenize(self, text: str) -> list[str]:
        return re.findall(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+", text)


@dataclass(frozen=True)
class Source:
    """One corpus: inputs, cleaning, selection, published counts; `join_rows` rows (sentences) are one document."""

    name: str
    input: Sequence[str]
    title: str = ""
    json_key: str = "text"
    join_rows: int = 1
    clean: Sequence[str] = ()
    min_words: int = 1
    languages: Sequence[str] = ()
    expected: Sequence[dict[str, Any]] = ()


class Read(PipelineStep):
    """Read a task's share of every source, clean the documents, and select them by length and language."""

    def __init__(self, sources: list[Source], max_bad_records: int) -> None:
        super().__init__()
        self.sources, self.max_bad_records = sources, max_bad_records

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents. Raises DataError for a record that is no document, if it is one too many."""
        for source in self.sources:
            for number, text in enumerate(self._documents(source, InputShard(rank, world_size))):
                for rule in source.clean:
                    text = RULES[rule](text)
                if len(text.split()) < source.min_words:
                    self.stat_update("dropped_min_words")
                elif source.languages and (code := _langid().classify(text[:2000])[0]) not in source.languages:
                    self.stat_update(f"dropped_language_{code}")
                else:
                    yield Document(text, f"{rank}/{number}", metadata={"source": source.name})

    def _documents(self, source: Source, shard: InputShard) -> Iterator[str]:
        bad_records, rows = BadRecords(self.max_bad_records), list[str]()
        chunks = read_chunks(find_sources(source.input), [source.json_key], shard)
        for count, record in enumerate((one for chunk in chunks for one in parse_chunk(chunk, [source.json_key])), 1):
            if isinstance(record, BadRecord):
                bad_records.add(record, count)
                continue
            rows.append(record[source.json_key])
            _count(self, source.name, "read", rows[-1])
            if len(rows) == source.join_rows:
                yield "\n".join(rows)
                rows = []
        if rows:
            yield "\n".join(rows)


def _count(step: PipelineStep, source: str, when: str, text: str) -> dict[str, str]:
    for measure, value in (("records", 1), ("words", len(text.split())), ("bytes", len(text.encode()))):
        step.stat_update(f"{source} {measure}_{when}", value=value)
    return {"text": text}


def prepare(sources: list[Source], output: Path, options: argparse.Namespace) -> Counter[str]:
    """Run all stages and return the counts. Raises DataError for bad input, or a folder made with other settings."""
    for source in sources:
        if unknown := sorted(set(source.languages) - set(_langid().labels)):
            raise DataError(f"--languages {' '.join(unknown)}: not known to py3langid; it has codes such as en, de, zh")
    signature = source_signature(file for source in sources for file in find_sources(source.input))
    settings = json.dumps([*map(asdict, sources), options.quality, options.deduplicate, options.workers, signature])
    counts, minhash = Counter[str](), dedup.MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
    record = (work := output / "work") / "settings.json"
    if output.exists() and any(output.iterdir()) and not (record.exists() and record.read_text() == settings):
        raise DataError(f"{output}: complete, or made with other settings or input; choose another --output-dir")
    work.mkdir(parents=True, exist_ok=True)
    record.write_text(settings)
    logger.disable("datatrove")

    def stage(name: str, pipeline: list[PipelineStep], tasks: int = options.workers) -> None:
        print(f"{name} ...", flush=True)
        LocalPipelineExecutor(pipeline, tasks, options.workers, str(work / name), start_method="fork").run()
        # stats.json of datatrove lacks the tasks that an interrupted call had completed.
        for block in (one for file in (work / name / "stats").glob("*.json") for one in json.loads(file.read_text())):
            for label, value in block["stats"].items():
                if " " in label or label.startswith("dropped_") or label == "to_remove":
                    number = value["total"] if isinstance(value, dict) else value
                    counts[label.replace("to_remove", "dropped_duplicate")] += number

    filtered, text, *names = (str(work / name) for name in ("filtered", "text", "signatures", "pairs", "duplicates"))
    quality = [QUALITY[name](language=Words()) for name in options.quality]
    stage("filter", [Read(sources, options.max_bad_records), *quality, JsonlWriter(filtered)])
    if not os.path.isdir(filtered) or not os.listdir(filtered):
        dropped = ", ".join(f"{label} {count:,}" for label, count in counts.items() if label.startswith("dropped_"))
        raise DataError(f"no document is left ({dropped or 'the input holds no text'}); loosen the filters")
    if options.deduplicate:
        stage("sign", [JsonlReader(filtered), dedup.MinhashDedupSignature(names[0], minhash, Words())])
        stage("pair", [dedup.MinhashDedupBuckets(names[0], names[1], config=minhash)], minhash.num_buckets)
        stage("cluster", [dedup.MinhashDedupCluster(names[1], names[2], minhash)], 1)
    kept = [dedup.MinhashDedupFilter(names[2])] if options.deduplicate else []
    line = lambda writer, document: _count(writer, document.metadata["source"], "written", document.text)  # noqa: E731
    stage("write", [JsonlReader(filtered), *kept, JsonlWriter(text, "${source}-${rank}.jsonl.gz", adapter=line)])
    shutil.copytree(text, output, copy_function=os.replace, dirs_exist_ok=True)
    shutil.rmtree(work)
    return counts


def find_source(name: str, options: argparse.Namespace) -> Source:
    """Return a published corpus, or the one of --input; the command line's settings replace its own."""
    language = name.removeprefix("wikipedia-")
    table = TABLES["corpora"].get("wikipedia-LANG" if language != name else name, {})
    if not table and name:
        raise DataError(f"--corpus {name}: not known; there are {', '.join(TABLES['corpora'])}")
    given = {key: value for key, value in vars(options).items() if key in Source.__dataclass_fields__ and value}
    source = Source(**table | given | {"name": name or "part"})
    expected = [entry for entry in source.expected if entry.get("language", language) == language]
    return replace(source, input=[path.replace("{language}", language) for path in source.input], expected=expected)


def main() -> None:
    """Prepare a corpus as the command line says. Exits with status 2 if a published count differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--corpus", nargs="+", help="published corpora: " + ", ".join(TABLES["corpora"]))
    add("--input", nargs="+", help="files and globs: your own text, or a downloaded copy of the one --corpus")
    add("--output-dir", type=Path, required=True, help="folder for the text and corpus.json")
    add("--json-key", help="key or column with the text (default: text)")
    add("--clean", nargs="+", choices=RULES, help="cleaning rules in their order")
    add("--min-words", type=at_least(1), help="drop shorter documents")
    add("--languages", nargs="+", help="drop documents in other languages (ISO 639 codes)")
    add("--quality", nargs="+", default=[], choices=QUALITY, help="datatrove's filters")
    add("--deduplicate", action="store_true", help="drop near duplicates (MinHash of 5-word shingles)")
    add("--max-bad-records", type=at_least(0), default=0, help="unreadable records to skip in each task and source")
    add("--workers", type=at_least(1), default=1, help="processes, each with a share of the input")
    options = parser.parse_args()
    if not options.corpus and not options.input or options.input and len(options.corpus or []) > 1:
        parser.error("name --corpus, or --input, or --input with the one --corpus that it is a copy of")
    sources = [find_source(name, options) for name in options.corpus or [""]]
    counts = prepare(sources, options.output_dir, options)
    report = json.dumps({"sources": [asdict(source) for source in sources], "counts": counts}, indent=1)
    (options.output_dir / "corpus.json").write_text(report + "\n")
    print("\n".join(f"{label}: {count:,}" for label, count in sorted(counts.items())))
    pairs = [(counts[f"{source.name} {entry['measure']}"], entry) for source in sources for entry in source.expected]
    if wrong := [(n, entry) for n, entry in pairs if abs(n - entry["count"]) > entry["tolerance"] * entry["count"]]:
        raise DataError("; ".join(_DIFFERENT.format(number, **entry) for number, entry in wrong))


if __name__ == "__main__":
    run_command(main)
