"""tools/corpus.py: cleaning rules, filters and duplicates through datatrove, published counts, bad input."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ctxlm_ds.errors import DataError
from tests.text import make_documents

pytest.importorskip("datatrove", reason="tools/corpus.py needs the extra `corpus`")
from tools import corpus

pytestmark = pytest.mark.long

GERMAN = "Die Bibliothek stand neben dem alten Markt, und niemand hatte ihre Türen seit jenem Winter geöffnet. " * 3
STOP_WORDS = {"the", "to", "of", "and", "that", "with"}
TEXTS = [text for text in make_documents(60, seed=3) if len(text) > 400 and len(STOP_WORDS & {*text.split()}) > 1][:30]


def write(path: Path, texts: list[str], key: str = "text") -> str:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str) -> tuple[list[str], dict[str, int]]:
    """Run the command; return the texts that it wrote and its counts."""
    monkeypatch.setattr(sys, "argv", ["corpus.py", "--output-dir", str(output), *arguments])
    corpus.main()
    lines = [line for path in sorted(output.glob("*.gz")) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert not (output / "work").exists()
    return [json.loads(line)["text"] for line in lines], json.loads((output / "corpus.json").read_text())["counts"]


def test_cleaning_rules() -> None:
    cases = {
        "fix_text": ("canâ€™t", "can't"),
        "control_characters": ("a\x00b\r\nc\u200b", "ab\nc"),
        "markup": ("a <b>bold</b> &amp; <!-- no <i> --> <!-- open", "a bold &  <!-- open"),
        "wiki_tail": ("References\nText.\n== References ==\nA book.", "References\nText."),
        "prose_lines": ("Heading\nA line.\n\n| cell\nIs it?", "A line.\n\nIs it?"),
        "boilerplate_lines": ("Read more about it\nText, read more.\nThis site uses cookies!", "Text, read more.\n"),
        "join_lines": ("a\nb\n\n  c\nd", "a b\nc d"),
        "whitespace": (" a \t b \n\n\n\nc\n", "a b\n\nc"),
        "gpt_standard": ("So—he said… (no)!\n\nYes", "So - he said... ( no ) ! \n Yes"),
    }
    assert {rule: corpus.RULES[rule](before) for rule, (before, _) in cases.items()} == {
        rule: after for rule, (_, after) in cases.items()
    }


@pytest.mark.parametrize(
    "text",
    ["Use List<String> or Map<Integer, Foo>.", "a<b and c>d", "if (a <b && c> d)", "x < 5, and y > 9", "p<0.05, n>30",
     "<me@host.org>", "<https://host.org/a>", "cat <input.txt >out.txt", "template<typename T> class A;",
     "#include <stdio.h>", "He wrote <3 and >:("],
)  # fmt: skip
def test_markup_leaves_what_is_no_element(text: str) -> None:
    assert corpus.RULES["markup"](text) == text


def test_markup_removes_elements_with_their_attributes() -> None:
    text = """<DIV class="a b" id=c>x</DIV ><a href='u?a=1' data-x="1">y</a><br/><input disabled type="text">z<p\n>"""
    assert corpus.RULES["markup"](text) == "xyz"


def test_gpt_words_are_those_of_spacy() -> None:
    spacy = pytest.importorskip("spacy", reason="GPT-1's words need the extra `gpt1`")
    raw = "She can't—won't!\n\nMr. Smith's U.K. dogs…\tCAN’T (he said): 3.5km/h;  Σίσυφος"
    text = corpus.RULES["gpt_standard"](raw)
    assert corpus.RULES["gpt_words"](text).startswith("she ca n't - wo n't ! \n mr. smith 's u.k.")
    assert corpus.RULES["gpt_words"](text) == " ".join(
        word for word in (token.text.strip(" ").lower() for token in spacy.blank("en")(text)) if word
    )


def test_filters_and_duplicates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near = TEXTS[7].rsplit(" ", 1)[0] + " changed."
    numbers = "He said 1234 5678 to it. " * 40
    first = write(tmp_path / "a.jsonl", [*TEXTS[:20], "too short", GERMAN, near, numbers], key="body")
    second = write(tmp_path / "b.jsonl", [TEXTS[3].upper().lower(), *TEXTS[20:]], key="body")
    flags = ["--input", first, second, "--json-key", "body", "--clean", "whitespace", "--languages", "en"]
    flags += ["--min-words", "5", "--quality", "gopher", "gopher_repetition", "--deduplicate"]
    one, counts = run(monkeypatch, tmp_path / "one", *flags)
    assert {text.lower() for text in one} >= {text.lower() for text in (*TEXTS[:3], *TEXTS[4:7], *TEXTS[8:])}
    assert len(one) == len(TEXTS) == counts["part records_written"]
    assert counts["part records_read"] == len(TEXTS) + 5
    assert (counts["dropped_min_words"], counts["dropped_language_de"], counts["dropped_duplicate"]) == (1, 1, 2)
    assert sum(count for label, count in counts.items() if label.startswith("dropped_")) == 5
    two, counts_of_two = run(monkeypatch, tmp_path / "two", *flags, "--workers", "2")
    assert (len(two), counts_of_two) == (len(one), counts)


def test_an_interrupted_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--input", write(tmp_path / "a.jsonl", TEXTS), "--deduplicate"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(corpus.dedup.MinhashDedupBuckets, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        run(patch, tmp_path / "out", *flags)
    monkeypatch.setattr(corpus.dedup.MinhashDedupSignature, "run", None)  # this stage is finished
    with pytest.raises(DataError, match="made with other settings"):
        run(monkeypatch, tmp_path / "out", *flags, "--min-words", "2")
    texts, counts = run(monkeypatch, tmp_path / "out", *flags)
    assert (texts, counts["part records_read"]) == (TEXTS, len(TEXTS))
    with pytest.raises(DataError, match="out: complete"):
        run(monkeypatch, tmp_path / "out", *flags)


def test_an_interrupted_stage_counts_the_tasks_that_were_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--input", *(write(tmp_path / f"{n}.jsonl", TEXTS[n::3]) for n in range(3)), "--workers", "3"]
    _, counts = run(monkeypatch, tmp_path / "at_a_go", *flags)
    read = corpus.Read.run

    def fail(step: Any, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        if rank == 2:
            raise RuntimeError("killed")
        return read(step, data, rank, world_size)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(corpus.Read, "run", fail)
        run(patch, tmp_path / "out", *flags)
    assert run(monkeypatch, tmp_path / "out", *flags)[1] == counts


def test_counts_are_compared_with_the_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", [*TEXTS[:20], "short"])
    expected = [
        {"measure": "records_read", "count": 20, "tolerance": 0.1, "published": "its paper"},
        {"measure": "records_written", "count": 9, "tolerance": 0.1, "published": "no one", "language": "de"},
    ]
    mine = {"title": "mine", "input": [path], "min_words": 5, "join_rows": 2, "expected": expected}
    monkeypatch.setitem(corpus.TABLES["corpora"], "wikipedia-LANG", mine)
    texts, counts = run(monkeypatch, tmp_path / "en", "--corpus", "wikipedia-en")
    assert texts[0] == f"{TEXTS[0]}\n{TEXTS[1]}"
    assert (counts["wikipedia-en records_read"], counts["wikipedia-en records_written"]) == (21, 10)
    monkeypatch.setitem(corpus.TABLES["corpora"], "wikipedia-LANG", mine | {"join_rows": 1})
    with pytest.raises(DataError, match=r"records_written: 20, not the published 9 \(no one\)"):
        run(monkeypatch, tmp_path / "de", "--corpus", "wikipedia-de")


def test_every_published_corpus_is_well_formed() -> None:
    for name, table in corpus.TABLES["corpora"].items():
        source = corpus.Source(**table | {"name": name})
        assert source.title and source.input and set(source.clean) <= set(corpus.RULES)
        for entry in source.expected:
            assert {"measure", "count", "tolerance", "published"} <= set(entry) <= {*entry, "language"}
            assert entry["measure"].removesuffix("_read").removesuffix("_written") in ("records", "words", "bytes")


def test_bad_input_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{broken\n')
    cases = {
        "bad.jsonl, line 2: not valid JSON": ["--input", str(bad)],
        "no document is left": ["--input", write(tmp_path / "short.jsonl", ["a b"]), "--min-words", "3"],
        "no such file": ["--input", str(tmp_path / "none.jsonl")],
        "--corpus wiki: not known": ["--corpus", "wiki"],
        "--languages xx: not known": ["--input", str(bad), "--languages", "xx"],
    }
    for number, (message, flags) in enumerate(cases.items()):
        with pytest.raises(DataError, match=message):
            run(monkeypatch, tmp_path / str(number), *flags)
    texts, _ = run(monkeypatch, tmp_path / "skipped", "--input", str(bad), "--max-bad-records", "1")
    assert texts == ["fine"]
