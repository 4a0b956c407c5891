"""What babylm-eval is called with for each folder of a submission; a package with its interface records it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError
from tools.babylm_eval import main

RUN = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
for name in ("model_path_or_name", "revision_name", "backend", "task", "data_path", "output_dir"):
    parser.add_argument(f"--{name}")
parser.add_argument("--save_predictions", action="store_true")
args = parser.parse_args()
model, data = pathlib.Path(args.model_path_or_name), pathlib.Path(args.data_path)
place = [args.task, data.stem] if args.task else ["reading"]
output = pathlib.Path(args.output_dir, model.stem, args.revision_name or "main", "zero_shot", args.backend, *place)
output.mkdir(parents=True)
found = json.loads((model / "config.json").read_text())
(output / "predictions.json").write_text(json.dumps([found, data.parent.name, args.save_predictions]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for module in ("sentence_zero_shot", "reading"):
        (tmp_path / "strict" / "evaluation_pipeline" / module).mkdir(parents=True)
        (tmp_path / "strict" / "evaluation_pipeline" / module / "run.py").write_text(RUN)
    for name in ("main", "chck_1M"):
        (tmp_path / "submission" / name).mkdir(parents=True)
        (tmp_path / "submission" / name / "config.json").write_text(json.dumps(name))
    return tmp_path


def judge(folder: Path, name: str = "mine", backend: str = "enc_dec_mask") -> None:
    main([str(folder / "submission"), "--pipeline", str(folder / "strict"), "--backend", backend, "--name", name])


def test_each_folder_is_judged_once_on_its_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder / "strict" / "evaluation_data"
    for place in ("full_eval/blimp_filtered", "full_eval/reading", "full_eval/vqa_filtered", "fast_eval/blimp_fast"):
        (data / place).mkdir(parents=True)
    (data / "full_eval" / "reading" / "reading_data.csv").touch()
    judge(folder)
    results = folder / "strict" / "results" / "mine"
    found = {str(path.parent.relative_to(results)): json.loads(path.read_text()) for path in results.rglob("*.json")}
    assert found == {
        "main/zero_shot/enc_dec_mask/blimp/blimp_filtered": ["main", "full_eval", True],
        "main/zero_shot/enc_dec/reading": ["main", "reading", False],
        "chck_1M/zero_shot/enc_dec_mask/blimp/blimp_fast": ["chck_1M", "fast_eval", True],
    }
    assert "vqa_filtered: not a data set of the zero-shot scripts" in capsys.readouterr().out
    judge(folder)
    assert capsys.readouterr().out.count("is judged already") == 3


def test_a_failed_evaluation_is_one_error(folder: Path) -> None:
    (folder / "strict" / "evaluation_data" / "full_eval" / "blimp_filtered").mkdir(parents=True)
    (folder / "strict" / "evaluation_pipeline" / "sentence_zero_shot" / "run.py").write_text("import no_such_package")
    with pytest.raises(ConfigError, match="main: zero_shot/enc_dec_mask/blimp/blimp_filtered failed, see above"):
        judge(folder)


def test_what_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="none of its data sets are here"):
        judge(folder)
    with pytest.raises(ConfigError, match="without slashes and dots"):
        judge(folder, name="my.model")
    (folder / "submission" / "main" / "config.json").unlink()
    (folder / "submission" / "chck_1M" / "config.json").unlink()
    with pytest.raises(ConfigError, match="no folders with models"):
        judge(folder)
