"""From real text (the standard library's docstrings) through real tokenizers and datasets to rows and masks:
statistics against the published definitions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxlm_ds.data.dataset.reader import IndexedDataset
from ctxlm_ds.data.formats.base import SequenceTemplate
from ctxlm_ds.data.formats.pairs import SegmentPair
from ctxlm_ds.data.formats.running_text import DocSentences
from ctxlm_ds.data.index.build import FEWEST_DOCUMENTS, build_rows
from ctxlm_ds.data.index.index import RowSource, SampleReader
from ctxlm_ds.data.index.record import SAMPLE_DTYPE
from ctxlm_ds.data.preprocess.job import PreprocessConfig, preprocess
from ctxlm_ds.data.sample import NO_LABEL
from ctxlm_ds.objectives.base import Objective, build_objective
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.base import Tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.integration.route import tool, write_recipe
from tests.ragged import one_sample
from tests.real_text import docstrings
from tests.sample_data import read_samples, run_config, sample_of, write_dataset
from tests.text import make_documents


@dataclass
class Route:
    """A corpus, its tokenizer and its datasets."""

    corpus: Path
    folder: Path
    tokenizer: Tokenizer
    sentences: Path
    documents: Path

    def rows(self, config: RunConfig, prefix: Path | None = None) -> tuple[RowSource, Objective]:
        objective = build_objective(config.objective, self.tokenizer)
        return build_rows([prefix or self.sentences], self.tokenizer, config.row_settings), objective


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More documents than an excerpt has, of four paragraphs each."""
    paragraphs = [text.split("\n") for text in docstrings(80)]
    texts = ["\n".join(lines[at : at + 4]) for lines in paragraphs for at in range(0, len(lines), 4)]
    assert len(texts) > FEWEST_DOCUMENTS
    path = tmp_path_factory.mktemp("docstrings") / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def make_route(corpus: Path, folder: Path, kind: str) -> Route:
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    tokenizer = train_tokenizer(kind, texts, 2000, folder / "tokenizer")

    def dataset(name: str, **settings: Any) -> Path:
        made = preprocess([str(corpus)], folder / "tokenizer", folder / name, PreprocessConfig(**settings))
        return Path(made[0].prefix)

    return Route(corpus, folder, tokenizer, dataset("sentences", split_sentences=True), dataset("documents"))


@pytest.fixture(scope="module")
def bert(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Route:
    return make_route(corpus, tmp_path_factory.mktemp("bert"), "wordpiece")


@pytest.fixture(scope="module")
def roberta(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Route:
    return make_route(corpus, tmp_path_factory.mktemp("roberta"), "bpe")


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_frames_are_those_of_transformers(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Special tokens, and BERT's token types, as transformers' own tokenizer puts them around one text and two."""
    from transformers import AutoTokenizer

    route: Route = request.getfixturevalue(family)
    theirs = AutoTokenizer.from_pretrained(route.folder / "tokenizer")
    first, second = make_documents(2, seed=5)
    a, b = (list(ids) for ids in route.tokenizer.encode_batch([first, second]))
    prefix = write_dataset(tmp_path / "d", [[a, b]], metadata={"tokenizer_fingerprint": route.tokenizer.fingerprint})
    dataset, template = IndexedDataset(prefix), SequenceTemplate.of(route.tokenizer)
    length, end = len(a) + len(b), len(a)
    records = np.array(
        [(0, end, 0, 0, end + 2, NO_LABEL), (0, end, end, length, length + 3 + template.double_separator, 0)],
        dtype=SAMPLE_DTYPE,
    )
    one = one_sample(read_samples(SampleReader(records, dataset, template, DocSentences()), np.array([0])), 0)
    two = one_sample(read_samples(SampleReader(records, dataset, template, SegmentPair()), np.array([1])), 0)
    assert one.input_ids.tolist() == theirs(first)["input_ids"]
    expected = theirs(first, second, return_token_type_ids=True, return_special_tokens_mask=True)
    assert two.input_ids.tolist() == expected["input_ids"]
    assert two.special_mask.tolist() == [bool(flag) for flag in expected["special_tokens_mask"]]
    if family == "bert":
        assert two.token_type_ids.tolist() == expected["token_type_ids"]


def test_unsplit_documents_give_the_text_in_order(roberta: Route) -> None:
    config = run_config(data={"sample_format": "full_sentences"}, objective={"name": "masked_lm"})
    index = roberta.rows(config, roberta.documents)[0].indexes[0]
    lengths = index.records["num_tokens"]
    assert (lengths[:-1] >= 63).all()  # 63 where a separator would have been the last token
    samples = [sample_of(index, number) for number in range(len(index.records))]
    ids = np.concatenate([sample.input_ids[~sample.special_mask] for sample in samples])
    text = roberta.tokenizer.decode(ids)
    first = json.loads(roberta.corpus.read_text().splitlines()[0])["text"]
    assert text.startswith(first[:200])


@pytest.fixture
def recipe(bert: Route, tmp_path: Path) -> Path:
    validation = [{"name": "again", "path": str(bert.sentences)}]
    return write_recipe(
        tmp_path / "r.yaml",
        {
            "tokenizer": {"path": str(bert.folder / "tokenizer")},
            "model": {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64},
            "data": {"train": [str(bert.sentences)], "validation": validation, "seq_length": 64},
        },
    )


def test_build_samples_command(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "indexes"
    done = tool("build_samples.py", "--config", recipe, "--set", f"data.sample_index_dir={folder}", "--show", 2)
    for word in ("segment_pair", "B follows A", "again (held out)", "padding", "[CLS]", "→", "row "):
        assert word in done.stdout, done.stdout
    assert len(list(folder.iterdir())) == 2
    again = tool("build_samples.py", "--config", recipe, "--set", f"data.sample_index_dir={folder}")
    assert "building the sample index" not in again.stderr
    for option in ("data.packing=true", "objective.masking=static"):
        tool("build_samples.py", "--config", recipe, "--set", f"data.sample_index_dir={folder}", option)
    assert len(list(folder.iterdir())) == 5


def test_build_samples_refuses_what_cannot_be(bert: Route, recipe: Path) -> None:
    wrong = tool("build_samples.py", "--config", recipe, "--set", f"data.train=[{bert.documents}]", check=False)
    assert wrong.returncode == 2 and "--split-sentences" in wrong.stderr and "Traceback" not in wrong.stderr
    assert not list(bert.folder.glob("documents*.samples-*"))
    for words in (("--workers", -1), ("--workers", 0), ("--show", -3)):
        wrong = tool("build_samples.py", "--config", recipe, *words, check=False)
        assert wrong.returncode == 2 and f"{words[0]}: {words[1]} is too small" in wrong.stderr


def test_inspect_dataset_shows_the_objective(bert: Route, recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "indexes"
    words = ("--objective", "--config", recipe, "--set", f"data.sample_index_dir={folder}", "data.packing=true")
    done = tool("inspect_dataset.py", bert.sentences, *words, "--show", 3)
    assert done.stdout.count("positions, ") == 3
    assert "[MASK→" in done.stdout and "\x1b[" not in done.stdout
    assert "rows of only the first" in done.stdout and not folder.exists()
    missing = tool("inspect_dataset.py", bert.sentences, "--objective", check=False)
    assert missing.returncode == 2 and "--config" in missing.stderr
