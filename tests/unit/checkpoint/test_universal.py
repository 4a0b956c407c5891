"""What is not a universal checkpoint of the recipe's model is refused by name, and nothing in it is executed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ctxlm_ds.checkpoint.chunk_index import ChunkWriter, merge_index
from ctxlm_ds.checkpoint.manifest import hash_files, list_files, write_manifest
from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.checkpoint.universal import cut_marks, from_universal, to_universal
from ctxlm_ds.errors import CheckpointError, ConfigError
from ctxlm_ds.parallel.placement import COLUMNS, ROWS, VOCABULARY, Split
from ctxlm_ds.recipe import choices
from ctxlm_ds.recipe.load import dump_config
from ctxlm_ds.recipe.schema import RunConfig, TokenizerConfig
from ctxlm_ds.recipe.yaml_source import read_yaml
from tests.checkpoints import make_config, make_tokenizer
from tests.rank_files import STEP, Layout, Values, checkpoint_of, random_states, write_as_ranks
from tests.real_disks import memory_disk

TOOL = Path(__file__).parents[3] / "tools" / "convert_checkpoint.py"
TAG = f"global_step{STEP}"
NAME = "encoder.1.mlp.up.weight"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    tokenizer = make_tokenizer("wordpiece", tmp_path_factory.mktemp("tokenizer") / "t")
    return make_config("bert", tokenizer)


@pytest.fixture(scope="module")
def values(config: RunConfig) -> Values:
    return random_states(config)


@pytest.fixture(scope="module")
def run(config: RunConfig, values: Values, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours") / "run"
    return write_as_ranks(folder, config, values, Layout(2, 1, 2, 1), Path(str(config.tokenizer.path)))


@pytest.fixture(scope="module")
def written(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("universal") / "out"
    to_universal(run, folder)
    return folder


@pytest.fixture
def universal(written: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(written, tmp_path / "universal")
    return tmp_path / "universal"


@pytest.fixture
def recipe(config: RunConfig, tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(dump_config(config))
    return tmp_path / "recipe.yaml"


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("file", [f"zero/{NAME}/fp32.pt", f"zero/{NAME}/step.pt", "mp_rank_00_model_states.pt"])
def test_nothing_in_a_pickle_is_run(universal: Path, recipe: Path, tmp_path: Path, file: str) -> None:
    mark = tmp_path / "executed"
    torch.save({"param": Malicious(mark)}, universal / TAG / file)
    with pytest.raises(CheckpointError, match="holds more than tensors and plain values"):
        from_universal(universal, tmp_path / "new", recipe)
    assert not mark.exists() and not (tmp_path / "new").exists()
    # The file does what it is meant to where it is trusted.
    torch.load(universal / TAG / file, weights_only=False)
    assert mark.exists()


def _save(file: str, value: object) -> Callable[[Path], object]:
    return lambda folder: torch.save(value, folder / TAG / file)


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: shutil.rmtree(f / TAG / "zero"), "no folder `zero`, so this is not DeepSpeed's universal format"),
    (lambda f: (f / "latest_universal").write_text("../../etc"), "does not name a folder next to it"),
    (lambda f: (f / "latest_universal").write_text(""), "does not name a folder next to it"),
    (lambda f: shutil.rmtree(f / TAG / "zero" / NAME), f"{NAME} is missing"),
    (lambda f: (f / TAG / "zero" / "adapter").mkdir(), "adapter is unknown"),
    (lambda f: (f / TAG / "zero" / NAME / "fp32.pt").unlink(), "fp32.pt: missing"),
    (lambda f: os.truncate(f / TAG / "zero" / NAME / "exp_avg.pt", 300), "exp_avg.pt: cannot be read"),
    (lambda f: (f / TAG / "zero" / NAME / "exp_avg.pt").write_bytes(b""), "exp_avg.pt: (cannot be read|holds more)"),
    (_save(f"zero/{NAME}/fp32.pt", {"param": torch.zeros(3, 3)}), r"shape \(3, 3\), the recipe's model has \(48, 32\)"),
    (_save(f"zero/{NAME}/fp32.pt", {"param": torch.zeros(48, 32).long()}), "holds no tensor of numbers"),
    (_save(f"zero/{NAME}/fp32.pt", [1, 2]), "holds no tensor of numbers"),
    (_save(f"zero/{NAME}/step.pt", 41), f"{NAME} has had 41 updates, others 40"),
    (_save(f"zero/{NAME}/step.pt", float("inf")), "inf is not a number of updates"),
    (_save(f"zero/{NAME}/step.pt", torch.tensor(1.5)), "1.5 is not a number of updates"),
    (_save("mp_rank_00_model_states.pt", {"global_steps": "many"}), "global_steps, skipped_steps"),
    (_save("mp_rank_00_model_states.pt", [1]), "holds no state of a run"),
    (_save("mp_rank_00_model_states.pt", {"global_steps": 1, "ctxlm_ds": torch.zeros(2)}), "is not the state of a run"),
    (_save("mp_rank_00_model_states.pt", {"global_steps": 1, "ctxlm_ds": [1]}), "is not the state of a run"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=range(len(DAMAGE)))
def test_damage_is_named(
    universal: Path, recipe: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(universal)
    with pytest.raises(CheckpointError, match=message):
        from_universal(universal, tmp_path / "new", recipe)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "universal"]


def test_a_recipe_that_does_not_fit_is_refused(universal: Path, config: RunConfig, tmp_path: Path) -> None:
    wide = config.model.model_copy(update={"vocab_size": 7})
    broad = config.model.model_copy(update={"intermediate_size": 64})
    deep = config.model.model_copy(update={"num_layers": 3})
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"model": wide}, CheckpointError, "114 rows of word_embeddings.weight, the recipe's model has 7"),
        ({"model": broad}, CheckpointError, r"shape \(48, 32\), the recipe's model has \(64, 32\)"),
        ({"model": deep}, CheckpointError, "encoder.2.attention.qkv.weight is missing"),
        ({"tokenizer": TokenizerConfig()}, ConfigError, "tokenizer.path is not set"),
    ]
    for changes, error, message in cases:
        (tmp_path / "recipe.yaml").write_text(dump_config(config.model_copy(update=changes)))
        with pytest.raises(error, match=message):
            from_universal(universal, tmp_path / "new", tmp_path / "recipe.yaml")


def test_moments_that_were_never_made_are_zeros(universal: Path, recipe: Path, tmp_path: Path, values: Values) -> None:
    """DeepSpeed writes none for a parameter that never had a gradient."""
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        (universal / TAG / "zero" / NAME / f"{kind}.pt").unlink()
    from_universal(universal, tmp_path / "new", recipe)
    reader = CheckpointReader(checkpoint_of(tmp_path / "new"))
    assert torch.equal(reader.read_full(NAME), values[NAME]["weight"])
    assert not reader.read_full(NAME, "exp_avg").any()
    assert torch.equal(reader.read_full("mlm_bias.bias", "exp_avg"), values["mlm_bias.bias"]["exp_avg"])


def test_a_checkpoint_whose_recipe_an_earlier_version_wrote_is_exported(run: Path, tmp_path: Path) -> None:
    """It held the settings of every objective and format."""
    shutil.copytree(run, tmp_path / "old")
    folder = checkpoint_of(tmp_path / "old")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("data:\n", "data:\n  reset_at_documents: true\n"))
    write_manifest(folder, STEP, hash_files(folder, list_files(folder)))
    to_universal(tmp_path / "old", tmp_path / "out")
    assert (tmp_path / "out" / "latest_universal").read_text() == TAG


def test_weights_alone_are_not_exported(config: RunConfig, values: Values, tmp_path: Path) -> None:
    writer = ChunkWriter(tmp_path, 0)
    for name, kinds in values.items():
        writer.add(name, "weight", kinds["weight"].shape, 0, kinds["weight"].flatten())
    merge_index(tmp_path, [writer.write().value], {})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    write_manifest(tmp_path, 0, hash_files(tmp_path, list_files(tmp_path)))
    with pytest.raises(CheckpointError, match="holds weights alone"):
        to_universal(tmp_path, tmp_path.parent / "universal-of-weights")


def test_matrices_with_one_moment_are_not_exported(config: RunConfig, values: Values, tmp_path: Path) -> None:
    muon = config.model_copy(update={"optimizer": choices.OPTIMIZER.make("muon")})
    folder = write_as_ranks(tmp_path / "run", muon, values, Layout(2, 1, 2, 1), Path(str(config.tokenizer.path)))
    with pytest.raises(CheckpointError, match=r"optimizer\.name muon, which does not keep two moments"):
        to_universal(folder, tmp_path / "out")


def test_what_is_there_is_never_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    for output in (tmp_path / "file", tmp_path / "full", checkpoint_of(run)):
        with pytest.raises(CheckpointError, match="would be overwritten"):
            to_universal(run, output)
    (tmp_path / "empty").mkdir()
    to_universal(run, tmp_path / "empty")


def test_a_full_disk_is_one_error_that_leaves_nothing(run: Path, tmp_path: Path) -> None:
    with memory_disk(tmp_path / "disk", "200k") as disk:
        with pytest.raises(CheckpointError, match="cannot be written .*; free space there"):
            to_universal(run, disk.folder / "new")
        assert list(disk.folder.iterdir()) == []


def test_a_damaged_source_is_named(run: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint_of(run), tmp_path / "copy")
    content = bytearray((tmp_path / "copy" / "moments-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "copy" / "moments-00000.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="moments-00000.safetensors: sha256"):
        to_universal(tmp_path / "copy", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("form", "kind"), [("tensor", torch.Tensor), ("int", int), ("auto", torch.Tensor)])
def test_the_form_of_the_step_count(run: Path, tmp_path: Path, form: str, kind: type) -> None:
    to_universal(run, tmp_path / "out", form)
    step = torch.load(tmp_path / "out" / TAG / "zero" / NAME / "step.pt", weights_only=True)
    assert isinstance(step, kind) and float(step) == STEP


def test_marks_for_deepspeeds_cuts() -> None:
    assert cut_marks(Split("rows", (4, 4, 4)), 1) == {"cat_dim": 0, "param_n_sub_params": 3}
    assert cut_marks(COLUMNS, 2) == {"cat_dim": 1}
    assert cut_marks(VOCABULARY, 2) == {"cat_dim": 0, "vocab_tensor": True}
    assert cut_marks(VOCABULARY, 1) == cut_marks(ROWS, 2) == cut_marks(None, 2) == {"cat_dim": 0}
    with pytest.raises(CheckpointError, match=r"unequal blocks \(8, 4, 4\)"):
        cut_marks(Split("rows", (8, 4, 4)), 2)


@pytest.mark.long
def test_the_tool_there_and_back_without_deepspeed(run: Path, recipe: Path, tmp_path: Path) -> None:
    script = (
        "import json, runpy, sys\nfor sys.argv in json.loads(sys.argv[1]):\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "assert not {'deepspeed', 'megatron'} & {*sys.modules}"
    )
    there = (TOOL, "to-universal", "--checkpoint", run, "--output", tmp_path / "u")
    back = (TOOL, "from-universal", "--checkpoint", tmp_path / "u", "--output", tmp_path / "new", "--config", recipe)
    words = json.dumps([[*map(str, command)] for command in (there, back)])
    command = [sys.executable, "-c", script, words]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "load_universal" in out and f"next: --set run_dir={tmp_path / 'new'}" in out
    assert (checkpoint_of(tmp_path / "new").parent / "latest").read_text() == f"step-{STEP:08d}\n"
    before, after = (CheckpointReader(checkpoint_of(folder)) for folder in (run, tmp_path / "new"))
    assert all(torch.equal(before.read_full(name, k), after.read_full(name, k))
               for name in before.names() for k in before.kinds(name))  # fmt: skip
    assert after.scalars == before.scalars and after.names() == before.names()
    for file in ("state.json", "config.yaml"):  # a JSON file is a YAML file
        texts = [(checkpoint_of(folder) / file).read_text() for folder in (run, tmp_path / "new")]
        assert read_yaml(texts[0], file).data == read_yaml(texts[1], file).data
