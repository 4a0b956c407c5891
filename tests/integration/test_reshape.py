"""`reshape` and `to-hf` on checkpoints of many ranks: the same bits, in the future ranks' files, in bounded memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ctxlm_ds.checkpoint import layout_free
from ctxlm_ds.checkpoint.layout_free import CheckpointReader, PieceWriter
from ctxlm_ds.checkpoint.manifest import hash_files, list_files, verify, write_manifest
from ctxlm_ds.checkpoint.reshape import reshape
from ctxlm_ds.checkpoint.target_layout import Layout, plan_pieces
from ctxlm_ds.checkpoint.tensor_file import TensorFileReader
from ctxlm_ds.errors import CheckpointError, ConfigError
from ctxlm_ds.export.huggingface import to_hf
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from tests.checkpoints import make_config, make_tokenizer
from tests.rank_files import KINDS, STEP, Values, checkpoint_of, random_states, write_as_ranks

TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"
SIZES = {"hidden_size": 32, "num_layers": 4, "num_attention_heads": 8, "intermediate_size": 64}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer("wordpiece", tmp_path_factory.mktemp("tokenizer") / "t")


@pytest.fixture(scope="module")
def config(tokenizer: Path) -> RunConfig:
    return make_config("bert_nsp", tokenizer, load_tokenizer(tokenizer).vocab_size, SIZES)


@pytest.fixture(scope="module")
def values(config: RunConfig) -> Values:
    return random_states(config)


def assert_holds(run: Path, values: Values) -> None:
    """A verified checkpoint with these weights and moments, bit for bit."""
    verify(checkpoint_of(run))
    reader = CheckpointReader(checkpoint_of(run))
    assert set(reader.names()) == set(values)
    assert reader.scalars() == {"optimizer_updates": STEP}
    for name, kinds in values.items():
        assert reader.kinds(name) == list(KINDS)
        for kind, value in kinds.items():
            assert torch.equal(reader.read_full(name, kind), value), (name, kind)


@pytest.fixture(scope="module")
def plain(config: RunConfig, values: Values, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a single rank."""
    return write_as_ranks(tmp_path_factory.mktemp("plain") / "run", config, values, Layout(), tokenizer)


@pytest.fixture(scope="module")
def many(config: RunConfig, values: Values, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of 256 ranks: tp 8 x dp 32 under ZeRO-3, every parameter in up to 256 pieces."""
    layout = Layout(tensor_parallel_size=8, data_parallel_size=32, zero_stage=3)
    run = write_as_ranks(tmp_path_factory.mktemp("many") / "run", config, values, layout, tokenizer)
    assert len(list(checkpoint_of(run).glob("weights-*.safetensors"))) == 256
    return run


LAYOUTS = [
    Layout(), Layout(2, 1, 3, 0), Layout(8, 1, 2, 1), Layout(4, 2, 2, 1), Layout(2, 4, 1, 0), Layout(1, 1, 5, 3),
    Layout(2, 1, 2, 2),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_and_back_is_the_same_bits(plain: Path, values: Values, layout: Layout, tmp_path: Path) -> None:
    result = reshape(plain, tmp_path / "there", layout)
    assert (result.step, result.source) == (STEP, checkpoint_of(plain))
    assert_holds(tmp_path / "there", values)
    reshape(checkpoint_of(tmp_path / "there"), tmp_path / "back", Layout())
    assert_holds(tmp_path / "back", values)
    for name in ("weights-00000.safetensors", "moments-00000.safetensors", "index.json", "config.yaml", "state.json"):
        assert (checkpoint_of(tmp_path / "back") / name).read_bytes() == (checkpoint_of(plain) / name).read_bytes() or (
            name.endswith(".safetensors")
            and equal_tensors(checkpoint_of(tmp_path / "back") / name, checkpoint_of(plain) / name)
        )


def equal_tensors(one: Path, other: Path) -> bool:
    """Only the room kept for the header may differ."""
    left, right = load_file(one), load_file(other)
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_the_new_run_says_its_layout_and_keeps_the_rest(plain: Path, tmp_path: Path) -> None:
    reshape(plain, tmp_path / "new", Layout(4, 2, 1, 1))
    folder = checkpoint_of(tmp_path / "new")
    assert (folder.parent / "latest").read_text().strip() == folder.name
    before, after = (load_config(checkpoint_of(run) / "config.yaml") for run in (plain, tmp_path / "new"))
    assert (after.parallel.tensor_parallel_size, after.parallel.pipeline_parallel_size) == (4, 2)
    assert after.model_copy(update={"parallel": before.parallel}) == before
    for name in ("state.json", "tokenizer/tokenizer.json"):
        assert (folder / name).read_bytes() == (checkpoint_of(plain) / name).read_bytes()
    assert (tmp_path / "new" / "metrics.jsonl").is_file()


def test_each_future_rank_finds_its_part_in_its_own_files(plain: Path, config: RunConfig, tmp_path: Path) -> None:
    layout = Layout(4, 2, 2, 1)
    reshape(plain, tmp_path / "new", layout)
    folder = checkpoint_of(tmp_path / "new")
    reader = CheckpointReader(folder)
    shapes = {name: reader.shape(name) for name in reader.names()}
    for rank, pieces in plan_pieces(config, shapes, layout):
        opened: set[str] = set()
        alone = CheckpointReader(folder)
        for name, shard, start, length in pieces:
            alone.read(name, "weight", start, length, shard)
            opened.update(alone._open)
        assert opened <= {f"weights-{rank:05d}.safetensors"}


def test_many_ranks_to_one_and_to_others(many: Path, values: Values, tmp_path: Path) -> None:
    assert_holds(many, values)
    reshape(many, tmp_path / "one", Layout())
    assert_holds(tmp_path / "one", values)
    reshape(many, tmp_path / "other", Layout(4, 4, 16, 1))
    assert_holds(tmp_path / "other", values)
    assert len(list(checkpoint_of(tmp_path / "other").glob("weights-*.safetensors"))) > 200


def test_many_ranks_export_to_the_same_file(plain: Path, many: Path, tmp_path: Path) -> None:
    for name, run in (("plain", plain), ("many", many)):
        to_hf(run, tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "many")]
    assert files[0] == files[1]


class Watch:
    """Largest read, and most files open at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.largest_read = self.open = self.most_open = 0
        read, opened, closed = TensorFileReader.read_into, TensorFileReader.open, TensorFileReader.close

        def read_into(file: TensorFileReader, key: str, length: int, first: int, target: torch.Tensor) -> None:
            self.largest_read = max(self.largest_read, target.numel())
            read(file, key, length, first, target)

        def open_file(file: TensorFileReader) -> None:
            opened(file)
            self.open += 1
            self.most_open = max(self.most_open, self.open)

        def close(file: TensorFileReader) -> None:
            closed(file)
            self.open -= 1

        monkeypatch.setattr(TensorFileReader, "read_into", read_into)
        monkeypatch.setattr(TensorFileReader, "open", open_file)
        monkeypatch.setattr(TensorFileReader, "close", close)


def test_memory_and_handles_stay_bounded(
    many: Path, values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of hundreds of files 64 are open; no tensor is larger than one rank's piece of one parameter."""
    watch = Watch(monkeypatch)
    sizes: list[int] = []
    add = PieceWriter.add

    def counted(writer: PieceWriter, name: str, kind: str, shape: Any, start: int, part: Any, shard: Any) -> None:
        sizes.append(part.numel())
        add(writer, name, kind, shape, start, part, shard)

    monkeypatch.setattr(PieceWriter, "add", counted)
    reshape(many, tmp_path / "new", Layout(2, 1, 4, 3))
    largest = max(kinds["weight"].numel() for kinds in values.values())
    assert max(sizes) <= -(-largest // 8) and watch.largest_read <= max(sizes)
    assert 1 < watch.most_open <= layout_free.OPEN_FILES
    assert watch.open == 0


def test_large_pieces_are_read_and_written_in_parts(plain: Path, values: Values, tmp_path: Path) -> None:
    """Python's own memory (the index, the plan) stays small beside tensors of any size."""
    tracemalloc.start()
    reshape(plain, tmp_path / "new", Layout(2, 1, 2, 1))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 60 * 2**20
    assert_holds(tmp_path / "new", values)


def test_parts_of_a_piece(plain: Path, values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctxlm_ds.checkpoint.target_layout.MAX_PIECE_ELEMENTS", 1000)
    watch = Watch(monkeypatch)
    reshape(plain, tmp_path / "new", Layout())
    assert watch.largest_read == 1000
    assert_holds(tmp_path / "new", values)


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        (Layout(3), ConfigError, "3 does not divide model.num_attention_heads 8"),
        (Layout(1, 5, 1, 1), ConfigError, "5 stages for model.num_layers 4"),
        (Layout(1, 2, 1, 2), ConfigError, "2 does not go with parallel.pipeline_parallel_size 2"),
        (Layout(1, 1, 0), ConfigError, "--data-parallel-size: 0 is not a number of ranks"),
        (Layout(1, 1, 1, 4), ConfigError, "--zero-stage: 4"),
    ],
)
def test_impossible_layouts_are_refused(
    plain: Path, layout: Layout, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        reshape(plain, tmp_path / "new", layout)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_overwritten(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    for output, message in [
        (tmp_path / "file", "is never overwritten"),
        (tmp_path / "full", "is never overwritten"),
        (checkpoint_of(plain), "is never overwritten"),
        (plain / "inside", "lie in each other"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            reshape(plain, output, Layout())
    (tmp_path / "empty").mkdir()
    reshape(plain, tmp_path / "empty", Layout())


def test_a_full_disk_is_said_before_anything_is_written(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 17 * 2**20

    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage)
    with pytest.raises(CheckpointError, match=r"needs 0\.01 GB and .* has 0\.02 GB left"):
        reshape(plain, tmp_path / "new", Layout(8, 1, 32, 3))
    assert list(tmp_path.iterdir()) == []


def copy_of(run: Path, folder: Path) -> Path:
    shutil.copytree(checkpoint_of(run), folder)
    return folder


def renew_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    write_manifest(folder, STEP, hash_files(folder, list_files(folder)))


def test_a_damaged_source_is_named(plain: Path, tmp_path: Path) -> None:
    copy = copy_of(plain, tmp_path / "copy")
    content = bytearray((copy / "moments-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "moments-00000.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="moments-00000.safetensors: sha256"):
        reshape(copy, tmp_path / "new", Layout())
    assert not (tmp_path / "new").exists()


def test_a_recipe_of_another_model_is_refused(plain: Path, tmp_path: Path) -> None:
    copy = copy_of(plain, tmp_path / "copy")
    settings = yaml.safe_load((copy / "config.yaml").read_text())
    settings["model"]["num_layers"] = 5
    (copy / "config.yaml").write_text(yaml.safe_dump(settings))
    renew_manifest(copy)
    with pytest.raises(CheckpointError, match="encoder.4.attention.qkv.weight is missing"):
        reshape(copy, tmp_path / "new", Layout())


def test_imported_weights_are_no_run(plain: Path, tmp_path: Path) -> None:
    copy = copy_of(plain, tmp_path / "copy")
    (copy / "state.json").unlink()
    renew_manifest(copy)
    with pytest.raises(CheckpointError, match="holds imported weights and no run to go on with"):
        reshape(copy, tmp_path / "new", Layout())


def test_the_tool(plain: Path, values: Values, tmp_path: Path) -> None:
    sizes = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--data-parallel-size", "2"]
    command = [sys.executable, str(TOOL), "reshape", "--checkpoint", str(plain), "--output", str(tmp_path / "new")]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "tp 2 x pp 2 x dp 2, ZeRO 1: 8 ranks" in done.stdout
    assert_holds(tmp_path / "new", values)
    done = subprocess.run([*command, "--tensor-parallel-size", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("error:") == 1 and "Traceback" not in done.stderr


KILLED = """
import os, signal, sys
from pathlib import Path
from ctxlm_ds.checkpoint import reshape, checkpoint_copy
from ctxlm_ds.checkpoint.pieces import PieceWriter
count, add = 0, PieceWriter.add
def killed(*arguments):
    global count
    count += 1
    if count == 50:
        os.kill(os.getpid(), signal.SIGKILL)
    add(*arguments)
PieceWriter.add = killed
reshape.reshape(Path(sys.argv[1]), Path(sys.argv[2]), reshape.Layout(2, 1, 2, 1))
"""


def test_a_kill_leaves_nothing_under_the_name(plain: Path, values: Values, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(plain), str(tmp_path / "new")]
    assert subprocess.run(command, check=False).returncode == -9
    assert not (tmp_path / "new").exists()
    left = list(tmp_path.rglob("manifest.json"))
    assert left == []
    reshape(plain, tmp_path / "new", Layout(2, 1, 2, 1))
    assert_holds(tmp_path / "new", values)
