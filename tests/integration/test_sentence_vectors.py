"""docs/sentence-vectors.md as written: mteb judges an export before and after sentence-transformers trains it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.downstream_models import write_bert
from tests.integration.route import ROOT

TOPICS = ["river", "mountain", "film", "town"]


@pytest.mark.soak
def test_the_page_trains_and_judges_local_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pairs of one topic are alike, which the words tell."""
    pytest.importorskip("mteb", reason="mteb is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = [f"the {topic} {word}" for topic in TOPICS for word in ("was old", "is quiet", "opened", "walked")]
    both = [(first, second) for first in texts for second in texts]
    pairs = [{"sentence1": first, "sentence2": second, "score": float(first.split()[1] == second.split()[1])}
             for first, second in both]  # fmt: skip
    for name, rows in (("train", pairs[::2]), ("test", pairs[1::2])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_bert(tmp_path / "hf", sorted({word for text in texts for word in text.split()}))
    page = (ROOT / "docs" / "sentence-vectors.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(code, "sentence-vectors.md", "exec"), {"__name__": "page"})
    before, after = map(float, re.findall(r"MyPairs: (\S+) before, (\S+) after", capsys.readouterr().out)[0])
    assert after > before + 0.1 and (tmp_path / "tuned" / "model.safetensors").is_file()
