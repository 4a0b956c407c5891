"""The next step that a conversion prints.

Uploads to a stand-in for the Hub's HTTP interface, from `ctxlm convert to-hf --push`; facts of model cards.
"""

from __future__ import annotations

import base64
import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctxlm_ds.apps.convert.convert_checkpoint import add_facts, card_facts, loading_call, main
from ctxlm_ds.errors import ConfigError, ExportError
from ctxlm_ds.export.huggingface import Conversion
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import make_config, make_tokenizer, random_weights, write_run
from tests.integration.route import Finished, call_here


@pytest.mark.parametrize(("pipeline", "call"), [
    ("fill-mask", 'transformers.pipeline("fill-mask", model="out")'),
    (None, 'transformers.T5ForConditionalGeneration.from_pretrained("out")'),
])  # fmt: skip
def test_a_model_without_a_pipeline_is_loaded_by_its_class(pipeline: str | None, call: str) -> None:
    assert loading_call(Conversion(Path("run"), Path("out"), "T5ForConditionalGeneration", pipeline, 1, [])) == call


TOKEN = "hf_aToken"
CARD = "---\nlibrary_name: transformers\ntags:\n- ctxlm_ds\n---\n\n# tiny\n"


class Hub:
    """What was uploaded: files by repository, and which of these are private."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}

    def answer(self, path: str, body: bytes, token: str) -> tuple[int, dict[str, Any]]:
        """The Hub's answers, as its documentation has them: create, ask how to upload, commit."""
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        parts = path.partition("?")[0].split("/")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.files.setdefault(name, {})
            self.private.setdefault(name, asked.get("visibility") == "private" or asked.get("private") is True)
            return 200, {"url": f"https://huggingface.co/{name}", "name": name}
        name, action = "/".join(parts[3:5]), parts[5] if len(parts) > 5 else ""
        if action == "preupload":
            files = json.loads(body)["files"]
            how = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": one["path"], **how} for one in files]}
        if action == "commit":
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    self.files[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return 200, {"commitUrl": f"https://huggingface.co/{name}/commit/1", "commitOid": "1" * 40, "success": True}
        return 200, {"id": name, "sha": "0" * 40, "siblings": []}


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = hub.answer(self.path, body, self.headers.get("Authorization", ""))
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_HEAD = _answer

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def export(endpoint: str, *words: object, token: str = TOKEN) -> Finished:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("HF_TOKEN", token)
        # As from HF_ENDPOINT and HF_HUB_OFFLINE in a new process.
        patch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        return call_here(main, "convert", "to-hf", *words)


def test_an_export_is_uploaded_with_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wordpiece_folder = make_tokenizer("wordpiece", tmp_path / "wordpiece")
    config = make_config("bert_nsp", wordpiece_folder, load_tokenizer(wordpiece_folder).vocab_size)
    run, out, hub = write_run(tmp_path / "run", config, random_weights(config)), tmp_path / "hf", Hub()
    facts = ("--license", "apache-2.0", "--language", "en", "de", "--dataset", "wikimedia/wikipedia")
    words = ("--checkpoint", run, "--output", out)
    with serving(hub) as endpoint:
        done = export(endpoint, *words, *facts, "--push", "me/tiny", "--private")
        assert done.returncode == 0, done.stderr
        assert f"uploaded as {endpoint}/me/tiny" in done.stdout and "Traceback" not in done.stderr
        assert hub.private == {"me/tiny": True}
        assert hub.files["me/tiny"] == {
            str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
        }
        header = yaml.safe_load(hub.files["me/tiny"]["README.md"].decode().split("---\n")[1])
        assert (header["license"], header["language"]) == ("apache-2.0", ["en", "de"])
        assert header["datasets"] == ["wikimedia/wikipedia"] and "ctxlm_ds" in header["tags"]
        done = export(endpoint, *words, "--push", "me/again", token="hf_other")
        assert done.returncode == 2 and "me/again: the Hub refuses the upload" in done.stderr
    done = export(endpoint, *words, "--push", "me/again")
    assert done.returncode == 2 and "me/again: the Hub cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr and "me/again" not in hub.files
    for name, token, message in (("me/tiny", None, "no token of the Hub"), ("a/b/c", TOKEN, "give USER/MODEL")):
        monkeypatch.setattr("huggingface_hub.get_token", lambda token=token: token)
        done = call_here(main, "convert", "to-hf", "--checkpoint", run, "--output", tmp_path / "no", "--push", name)
        assert done.returncode == 2 and message in done.stderr and not (tmp_path / "no").exists()


def test_facts_that_are_not_given_stay(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD)
    add_facts(tmp_path, {})
    assert (tmp_path / "README.md").read_text() == CARD
    add_facts(tmp_path, {"license": "mit", "datasets": ["a/b"]})
    add_facts(tmp_path, {"language": ["cs"]})
    text = (tmp_path / "README.md").read_text()
    header = yaml.safe_load(text.split("---\n")[1])
    assert (header["license"], header["language"], header["datasets"]) == ("mit", ["cs"], ["a/b"])
    assert header["tags"] == ["ctxlm_ds"] and text.endswith("# tiny\n") and "\n- ctxlm_ds\n" in text
    with pytest.raises(ExportError, match="has no model card"):
        add_facts(tmp_path / "empty", {"license": "mit"})


@pytest.mark.parametrize(("license", "languages"), [("Apache 2", []), (None, ["English"])])
def test_what_the_hub_does_not_know_is_refused(license: str | None, languages: list[str]) -> None:
    with pytest.raises(ConfigError, match="--license" if license else "--language"):
        card_facts(Namespace(license=license, language=languages, dataset=[]))
