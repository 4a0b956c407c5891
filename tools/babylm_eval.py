"""Run the challenge's own evaluation, babylm-org/babylm-eval, on the folders of `ctxlm convert babylm`.

    python tools/babylm_eval.py submission --pipeline babylm-eval/strict --backend causal --name my-model

The code and its data are yours to download (its README names both). `main` is judged on evaluation_data/full_eval, each
`chck_…` on evaluation_data/fast_eval. Results are RESULTS/NAME/FOLDER/..., as its scripts write them for a
repository's revisions. A data set that was judged is not judged again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ctxlm_ds.console import run_command
from ctxlm_ds.errors import ConfigError

BACKENDS = ("causal", "mlm", "mntp", "enc_dec_mask", "enc_dec_prefix")
TASKS = {
    "blimp_filtered": "blimp", "supplement_filtered": "blimp", "ewok_filtered": "ewok", "comps": "comps",
    "blimp_fast": "blimp", "supplement_fast": "blimp", "ewok_fast": "ewok", "entity_tracking": "entity_tracking",
    "entity_tracking_fast": "entity_tracking", "wug_adj_nominalization": "wug_adj", "wug_past_tense": "wug_past",
}  # fmt: skip
"""Task of each data set of pairs, as in its scripts/eval_zero_shot.sh and eval_zero_shot_fast.sh."""
READING = "reading/reading_data.csv"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("submission", type=Path, help="folder with main and chck_…")
    add("--pipeline", type=Path, required=True, help="folder strict of a copy of babylm-eval")
    add("--backend", choices=BACKENDS, required=True, help="how its code scores the model")
    add("--name", default="model", help="name of the model in the results (default: model)")
    add("--data", type=Path, help="default: evaluation_data of the pipeline")
    add("--results", type=Path, help="default: results of the pipeline")
    arguments = parser.parse_args(argv)
    pipeline, data = (
        arguments.pipeline.absolute(),
        (arguments.data or arguments.pipeline / "evaluation_data").absolute(),
    )
    results = (arguments.results or pipeline / "results").absolute()
    folders = [path for path in sorted(arguments.submission.glob("*")) if (path / "config.json").is_file()]
    if Path(arguments.name).stem != arguments.name:
        raise ConfigError(f"--name {arguments.name}: give a name without slashes and dots")
    if not folders:
        raise ConfigError(f"{arguments.submission}: no folders with models; write them with ctxlm convert babylm")
    if not (pipeline / "evaluation_pipeline").is_dir():
        raise ConfigError(f"--pipeline {pipeline}: has no evaluation_pipeline; give the folder strict of babylm-eval")
    jobs = [job for folder in folders for job in jobs_of(folder, data, arguments.backend)]
    if not jobs:
        raise ConfigError(f"--data {data}: none of its data sets are here; download evaluation_data")
    with TemporaryDirectory() as links:
        for folder, module, words, done in jobs:
            if any((results / arguments.name / folder.name / done).glob("*")):
                print(f"{folder.name}: {done} is judged already")
                continue
            # The pipeline takes the model's name in the results from the end of its path.
            model = Path(links) / folder.name / arguments.name
            model.parent.mkdir(exist_ok=True)
            if not model.exists():
                model.symlink_to(folder.absolute())
            revision = [] if folder.name == "main" else ["--revision_name", folder.name]
            command = [sys.executable, "-m", f"evaluation_pipeline.{module}.run", "--model_path_or_name", str(model)]
            print(f"{folder.name}: {done}", flush=True)
            if subprocess.run([*command, *words, *revision, "--output_dir", str(results)], cwd=pipeline).returncode:
                raise ConfigError(f"{folder.name}: {done} failed, see above; the same command continues")


def jobs_of(folder: Path, data: Path, backend: str) -> list[tuple[Path, str, list[str], str]]:
    """Return folder, module, arguments and folder of the results of each data set that is here."""
    place = data / ("full_eval" if folder.name == "main" else "fast_eval")
    jobs = []
    for path in sorted(place.glob("*")):
        if (task := TASKS.get(path.name)) is not None:
            words = ["--backend", backend, "--task", task, "--data_path", str(path), "--save_predictions"]
            jobs.append((folder, "sentence_zero_shot", words, f"zero_shot/{backend}/{task}/{path.name}"))
        elif (place / READING).is_file() and path.name == "reading":
            reads = "enc_dec" if backend.startswith("enc_dec") else backend
            words = ["--backend", reads, "--data_path", str(place / READING)]
            jobs.append((folder, "reading", words, f"zero_shot/{reads}/reading"))
        else:
            print(f"{path}: not a data set of the zero-shot scripts, left out")
    return jobs


if __name__ == "__main__":
    run_command(main)
