"""Checkpoints become plain Hugging Face folders and come back bit for bit; folders that cannot be converted say why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from ctxlm_ds.checkpoint.reader import CheckpointReader
from ctxlm_ds.errors import CheckpointError, ExportError
from ctxlm_ds.export.hf_config import model_files
from ctxlm_ds.export.huggingface import ForeignWeights, cut_vocabulary, from_hf, to_hf, write_plain_folder
from ctxlm_ds.recipe.schema import RunConfig
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.checkpoints import (
    SIZES,
    WORDS,
    change_json,
    change_weights,
    make_config,
    random_weights,
    write_checkpoint,
    write_random_run,
    write_run,
)

CLASSES = {
    "bert_nsp": BertForPreTraining, "bert": BertForMaskedLM, "roberta": RobertaForMaskedLM,
    "albert": AlbertForPreTraining, "modernbert": ModernBertForMaskedLM,
}  # fmt: skip
CONFIGS = {"roberta": RobertaConfig, "albert": AlbertConfig, "modernbert": ModernBertConfig}
ALBERT = {"num_hidden_layers": 40, "num_hidden_groups": 2, "inner_group_num": 2, "embedding_size": 16}
"""More layers than tensors: they share their weights."""


@pytest.fixture(params=list(CLASSES))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokenizer_folder(kind: str, wordpiece_folder: Path, byte_bpe_folder: Path) -> Path:
    return byte_bpe_folder if kind in ("roberta", "modernbert") else wordpiece_folder


def hf_folder(kind: str, tokenizer_folder: Path, folder: Path, **settings: object) -> Path:
    """A model of transformers' own with random weights, saved by transformers, its tokenizer beside it."""
    torch.manual_seed(3)
    vocab_size = load_tokenizer(tokenizer_folder).vocab_size
    values = {"vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 48, "initializer_range": 0.3}  # fmt: skip
    if kind == "roberta":
        values |= {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
    if kind == "albert":
        values |= ALBERT
    if kind == "modernbert":
        ids = load_tokenizer(tokenizer_folder)
        values |= {"num_hidden_layers": 5, "local_attention": 8, "pad_token_id": ids.pad_id}
        values |= {name: ids.cls_id for name in ("bos_token_id", "cls_token_id")}
        values |= {name: ids.sep_id for name in ("eos_token_id", "sep_token_id")}
    rows = 40 + (load_tokenizer(tokenizer_folder).pad_id + 1 if kind == "roberta" else 0)
    config_class = CONFIGS.get(kind, BertConfig)
    model = CLASSES[kind](config_class(**{**values, "max_position_embeddings": rows, **settings}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    if kind == "roberta":
        model.roberta.embeddings.token_type_embeddings.weight.data.zero_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder


def test_hugging_face_to_ours_and_back_is_bitwise(kind: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    size = load_tokenizer(tokenizer_folder).vocab_size + 5
    original = hf_folder(kind, tokenizer_folder, tmp_path / "original", vocab_size=size)
    imported = from_hf(original, tmp_path / "ours")
    exported = to_hf(tmp_path / "ours", tmp_path / "back")
    assert imported.hf_class == exported.hf_class == CLASSES[kind].__name__
    assert all(c.relative < 1e-5 for c in imported.comparisons + exported.comparisons)
    before, after = load_file(original / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value.view(torch.int32), after[name].view(torch.int32)), name
    assert config_values(original) == config_values(tmp_path / "back")


def test_a_model_without_its_head_gets_a_fresh_one(kind: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    original, bare = hf_folder(kind, tokenizer_folder, tmp_path / "original"), tmp_path / "bare"
    shutil.copytree(original, bare)
    (bare / "model.safetensors").unlink()
    AutoModel.from_pretrained(original).save_pretrained(bare)
    with pytest.raises(ExportError, match="ctxlm convert from-hf --new-head gives it fresh heads"):
        from_hf(bare, tmp_path / "refused")
    heads = []
    for name in ("ours", "again"):
        done = from_hf(bare, tmp_path / name, new_head=True)
        assert all(comparison.relative < 1e-5 for comparison in done.comparisons)
        to_hf(tmp_path / name, tmp_path / f"{name}-hf")
        before, after = (load_file(folder / "model.safetensors") for folder in (original, tmp_path / f"{name}-hf"))
        (prefix,) = {name.partition(".")[0] for name in before if "embeddings" in name} - {"cls", "lm_head"}
        heads.append({name: value for name, value in after.items() if not name.startswith(f"{prefix}.")})
        assert all(torch.equal(before[name], after[name]) for name in after.keys() - heads[-1].keys())
    assert heads[0].keys() == heads[1].keys() != set()
    assert all(torch.equal(value, heads[1][name]) for name, value in heads[0].items())
    drawn = [name for name, value in heads[0].items() if value.dim() == 2]
    assert drawn and all(
        heads[0][name].std() > 0.01 and not torch.equal(heads[0][name], before[name]) for name in drawn
    )


def config_values(folder: Path) -> dict:
    """All settings as transformers reads them, defaults included."""
    return {key: value for key, value in AutoConfig.from_pretrained(folder).to_dict().items() if key != "_name_or_path"}


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_dtype(dtype: str, torch_dtype: torch.dtype, tmp_path: Path, wordpiece_folder: Path) -> None:
    config = make_config("bert", wordpiece_folder)
    weights = random_weights(config)
    conversion = to_hf(write_run(tmp_path / "run", config, weights), tmp_path / "hf", dtype)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch_dtype}
    assert tensors["cls.predictions.bias"].equal(weights["mlm_bias.bias"].to(torch_dtype))
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").dtype == torch_dtype
    rounding = [c for c in conversion.comparisons if "rounding" in c.name]
    assert rounding and all(1e-6 < c.relative < c.bound for c in rounding)


def test_fp16_overflow_is_an_error_and_leaves_nothing(tmp_path: Path, wordpiece_folder: Path) -> None:
    config = make_config("bert", wordpiece_folder)
    weights = random_weights(config)
    weights["encoder.1.mlp.up.weight"][0, 0] = 1e5
    run = write_run(tmp_path / "run", config, weights)
    with pytest.raises(ExportError, match=r"encoder.layer.1.intermediate.dense.weight is not finite in fp16 .*100000"):
        to_hf(run, tmp_path / "out" / "hf", "fp16")
    assert list((tmp_path / "out").iterdir()) == []


def test_shards_hold_every_tensor_once_and_load(tmp_path: Path, wordpiece_folder: Path) -> None:
    run = write_random_run(tmp_path / "run", "bert_nsp", wordpiece_folder)
    to_hf(run, tmp_path / "one")
    to_hf(run, tmp_path / "many", max_shard_bytes=30_000)
    whole = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    count = len(files)
    assert count > 2 and files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    found = {}
    for file in files:
        assert (tmp_path / "many" / file).stat().st_size < 35_000
        for name, value in load_file(tmp_path / "many" / file).items():
            assert index["weight_map"][name] == file and name not in found
            found[name] = value
    assert all(found[name].equal(value) for name, value in whole.items()) and found.keys() == whole.keys()
    model, info = BertForPreTraining.from_pretrained(tmp_path / "many", output_loading_info=True)
    assert not info["missing_keys"] and model.cls.predictions.bias.equal(whole["cls.predictions.bias"])
    from_hf(tmp_path / "many", tmp_path / "ours")
    shutil.copy(tmp_path / "one" / "model.safetensors", tmp_path / "many")  # as transformers saves again
    (tmp_path / "many" / files[0]).unlink()
    assert [path.name for path in model_files(tmp_path / "many")] == ["model.safetensors"]
    assert not BertForPreTraining.from_pretrained(tmp_path / "many", output_loading_info=True)[1]["missing_keys"]


def test_a_run_gives_its_newest_and_falls_back_past_a_damaged_one(tmp_path: Path, wordpiece_folder: Path) -> None:
    config = make_config("bert", wordpiece_folder)
    weights = random_weights(config)
    run = write_run(tmp_path / "run", config, weights, steps=(100, 200))
    assert to_hf(run, tmp_path / "hf").source.name == "step-00000200"
    assert load_file(tmp_path / "hf" / "model.safetensors")["cls.predictions.bias"].equal(weights["mlm_bias.bias"])
    damage(run / "checkpoints" / "step-00000200" / "weights-00001.safetensors")
    assert to_hf(run, tmp_path / "hf").source.name == "step-00000100"
    halved = load_file(tmp_path / "hf" / "model.safetensors")["cls.predictions.bias"]
    assert halved.equal(weights["mlm_bias.bias"] * 0.5)
    damage(run / "checkpoints" / "step-00000100" / "index.json")
    with pytest.raises(CheckpointError, match=r"step-00000200.*weights-00001.*step-00000100.*index\.json"):
        to_hf(run, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def damage(path: Path) -> None:
    """Change one byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def test_a_failed_verification_leaves_nothing(tmp_path: Path, wordpiece_folder: Path) -> None:
    """A tokenizer whose settings transformers reads otherwise than the run did."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(wordpiece_folder, tokenizer)
    change_json(tokenizer / "tokenizer_config.json", do_lower_case=False)
    run = write_random_run(tmp_path / "run", "bert", tokenizer)
    with pytest.raises(ExportError, match="exported tokenizer gives"):
        to_hf(run, tmp_path / "out" / "hf")
    assert list((tmp_path / "out").iterdir()) == []


def test_only_an_earlier_export_is_replaced(tmp_path: Path, wordpiece_folder: Path) -> None:
    run = write_random_run(tmp_path / "run", "bert", wordpiece_folder)
    other = tmp_path / "other"
    other.mkdir()
    to_hf(run, other)
    to_hf(run, other)
    shutil.rmtree(other)
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    for output in (other, run, tmp_path, run / "checkpoints" / "step-00000100"):
        with pytest.raises(CheckpointError, match="give another --output"):
            to_hf(run, output)
    original = hf_folder("bert", wordpiece_folder, tmp_path / "original")
    for output in (other, original, run / "checkpoints" / "step-00000100"):
        with pytest.raises(CheckpointError, match="give another --output"):
            from_hf(original, output)
    assert (other / "thesis.tex").read_text() == "years of work"


def test_a_roberta_whose_padding_is_zero_has_its_own_offset(tmp_path: Path, wordpiece_folder: Path) -> None:
    tokenizer = load_tokenizer(wordpiece_folder)
    to_hf(write_random_run(tmp_path / "run", "roberta", wordpiece_folder), tmp_path / "hf")
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (tokenizer.pad_id, raw["max_position_embeddings"], raw["bos_token_id"]) == (0, 41, tokenizer.cls_id)
    from_hf(tmp_path / "hf", tmp_path / "back")


def test_a_non_zero_token_type_row_is_folded_into_the_positions(
    tmp_path: Path, byte_bpe_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = hf_folder("roberta", byte_bpe_folder, tmp_path / "original")
    change_weights(original, lambda t: t["roberta.embeddings.token_type_embeddings.weight"].normal_(0.0, 0.5))
    imported = from_hf(original, tmp_path / "ours")
    assert "is added to every position of the position table" in caplog.text
    assert all(c.relative < 1e-5 for c in imported.comparisons)
    tensors = load_file(original / "model.safetensors")
    table = CheckpointReader(tmp_path / "ours").read_full("embeddings.position_embeddings.weight")
    row = tensors["roberta.embeddings.token_type_embeddings.weight"]
    assert table.equal(tensors["roberta.embeddings.position_embeddings.weight"] + row)


def test_a_second_token_type_row_is_left_out_with_a_warning(
    tmp_path: Path, byte_bpe_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = hf_folder("roberta", byte_bpe_folder, tmp_path / "original", type_vocab_size=2)
    from_hf(original, tmp_path / "ours")
    assert "only row 0" not in caplog.text
    change_weights(original, lambda t: t["roberta.embeddings.token_type_embeddings.weight"][1].fill_(0.5))
    from_hf(original, tmp_path / "ours")
    assert "only row 0" in caplog.text


def test_names_of_the_hub_files_are_understood(tmp_path: Path, wordpiece_folder: Path) -> None:
    """bert-base-uncased: TensorFlow's LayerNorm names, a buffer, NSP heads under a declared BertForMaskedLM."""
    original = hf_folder("bert_nsp", wordpiece_folder, tmp_path / "original")
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(original / "model.safetensors").items()
    }
    tensors["bert.embeddings.position_ids"] = torch.arange(40)[None]
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    save_file(tensors, original / "model.safetensors", metadata={"format": "pt"})
    change_json(original / "config.json", architectures=["BertForMaskedLM"], position_embedding_type="absolute")
    conversion = from_hf(original, tmp_path / "ours")
    assert conversion.hf_class == "BertForPreTraining" and all(c.relative < 1e-5 for c in conversion.comparisons)


def test_an_untied_decoder_is_refused(tmp_path: Path, wordpiece_folder: Path) -> None:
    original = hf_folder("bert", wordpiece_folder, tmp_path / "original")
    shape = load_file(original / "model.safetensors")["bert.embeddings.word_embeddings.weight"].shape
    change_weights(original, lambda t: t.update({"cls.predictions.decoder.weight": torch.randn(shape)}))
    with pytest.raises(ExportError, match="untied"):
        from_hf(original, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(("family", "objective", "sample_format"), [
    ("albert", "masked_lm_sop", "sentence_order"), ("xlnet", "permutation_lm", "segment_pair"),
])  # fmt: skip
def test_an_exported_tokenizer_pads_and_numbers_segments_for_its_model(
    family: str, objective: str, sample_format: str, tmp_path: Path
) -> None:
    """A short text in a padded batch has the answer that it has alone; a pair has two token types."""
    train_tokenizer(family, iter([f"{' '.join(WORDS)} {number}" for number in range(200)]), 60, tmp_path / "tok")
    sizes = {**SIZES, "embedding_size": 16} if family == "albert" else SIZES
    vocab_size = load_tokenizer(tmp_path / "tok").vocab_size
    config = RunConfig.model_validate({
        "model": {"family": family, "vocab_size": vocab_size, **sizes}, "objective": {"name": objective},
        "data": {"sample_format": sample_format, "seq_length": 32}, "tokenizer": {"path": str(tmp_path / "tok")},
    })  # fmt: skip
    to_hf(write_checkpoint(tmp_path / "step-00000100", config, random_weights(config)), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert {0, 1} <= set(tokenizer("river", "the books")["token_type_ids"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    texts = ["river", "the mountain was reading a times worst"]
    with torch.no_grad():
        batch = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        alone = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(batch, alone, rtol=1e-5, atol=1e-5)


SHAPE = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
         "max_position_embeddings": 40, "layer_norm_eps": 1e-12}  # fmt: skip


def weights_of(kind: str, tokenizer: Path, folder: Path) -> ForeignWeights:
    config = make_config(kind, tokenizer)
    return ForeignWeights(folder, "bert", SHAPE, random_weights(config))


@pytest.mark.parametrize(("kind", "hf_class"), [("bert", "BertForMaskedLM"), ("bert_nsp", "BertForPreTraining")])
def test_the_heads_among_the_tensors_choose_the_class(
    kind: str, hf_class: str, wordpiece_folder: Path, tmp_path: Path
) -> None:
    weights = weights_of(kind, wordpiece_folder, tmp_path / "source")
    tokenizer = load_tokenizer(wordpiece_folder)
    assert write_plain_folder(weights, tokenizer, tmp_path / "hf").hf_class == hf_class
    # An earlier import is replaced, another folder is not.
    write_plain_folder(weights, tokenizer, tmp_path / "hf")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(CheckpointError, match="would be overwritten"):
        write_plain_folder(weights, tokenizer, tmp_path / "other")


def test_settings_that_fit_no_section_are_refused(wordpiece_folder: Path, tmp_path: Path) -> None:
    weights = weights_of("bert", wordpiece_folder, tmp_path)
    wrong_values = (({"num_attention_heads": 5}, "does not divide"), ({"layer_norm_eps": -1}, "no model of this"))
    for change, words in wrong_values:
        wrong = ForeignWeights(tmp_path / "source", "bert", SHAPE | change, weights.tensors)
        with pytest.raises(ExportError, match=words):
            write_plain_folder(wrong, load_tokenizer(wordpiece_folder), tmp_path / "hf")


def test_vocabularies_are_cut_and_never_grown(tmp_path: Path) -> None:
    table = "word_embeddings.weight"
    tensors = {table: torch.arange(8.0)[:, None], "other": torch.ones(8)}
    cut_vocabulary(tensors, 5, tmp_path)
    assert tensors[table].shape == (5, 1) and tensors["other"].shape == (8,)
    with pytest.raises(ExportError, match=f"{table} has 5 rows, the tokenizer 6 ids: if .*resize_token_embeddings"):
        cut_vocabulary(tensors, 6, tmp_path)
