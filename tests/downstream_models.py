"""Tiny models in Hugging Face's form, and examples, for tests of downstream tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ctxlm_ds.apps.downstream.examples import Example
from ctxlm_ds.apps.downstream.task import TaskDescription

WORDS = ["the", "a", "good", "bad", "film", "was", "very", "Paris", "Ann", "met", "in", "who", "where"]
WORDS += ["##s", "un", "##known", ".", ",", "?"]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}


def write_bert(folder: Path, words: Iterable[str] = WORDS, **settings: Any) -> Path:
    """Write a BERT of 3 layers with a WordPiece tokenizer of a few words; returns the folder."""
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    tokenizer = BertTokenizerFast(vocab={word: at for at, word in enumerate(vocabulary)}, do_lower_case=False)
    tokenizer.model_max_length = settings.get("max_position_embeddings", 32)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = BertConfig(vocab_size=len(vocabulary), **({"max_position_embeddings": 32, **SHAPE} | settings))
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


def hidden_states(folder: Path, words: list[str]) -> tuple[Any, list[int | None]]:
    """Return hidden states [layers, tokens, width] of one sentence as transformers' documentation computes them."""
    from transformers import AutoModel, AutoTokenizer

    encoded = AutoTokenizer.from_pretrained(folder)(words, is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder).eval()(**encoded, output_hidden_states=True).hidden_states
    return torch.stack(states)[:, 0].numpy(), encoded.word_ids(0)


def word_tokenizer(words: Iterable[str] = WORDS, eos: bool = True) -> Any:
    """Return a tokenizer of complete words for T5 and GPT-2; `eos`: each text ends with </s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<pad>", "</s>", "<unk>", *words]
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if eos:
        backend.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def write_t5(folder: Path, words: Iterable[str] = WORDS, **settings: Any) -> Path:
    """Write a T5 of 2 + 2 layers without dropout, with a tokenizer of a few words; returns the folder."""
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer = word_tokenizer(words)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    shape = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    config = T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **(shape | settings))
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def write_gpt2(folder: Path, words: Iterable[str] = WORDS, **settings: Any) -> Path:
    """Write a GPT-2 of 2 layers without dropout, with a tokenizer of a few words; returns the folder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = word_tokenizer(words, eos=False)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"), 0.0)
    config = GPT2Config(vocab_size=len(tokenizer), eos_token_id=1, bos_token_id=1, **(shape | dropout | settings))
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def sentiment(count: int = 24) -> tuple[TaskDescription, list[Example]]:
    """Return a task that the word `good` or `bad` decides, and examples of it."""
    columns = {"text": "text", "label": "label"}
    task = TaskDescription(kind="classification", format="tsv", train="train.tsv", dev="dev.tsv", columns=columns)
    texts = [f"the film was {'very ' * (at % 3)}{'good' if at % 2 else 'bad'} ." for at in range(count)]
    labels = ["good" if at % 2 else "bad" for at in range(count)]
    return task, [
        Example(f"train.tsv:{at}", text, label=label, identifier=str(at))
        for at, (text, label) in enumerate(zip(texts, labels, strict=True))
    ]


def write_rows(path: Path, examples: Iterable[Example]) -> None:
    """Write examples as a tsv file with the columns text and label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text\tlabel\n" + "".join(f"{one.text}\t{one.label}\n" for one in examples))


def write_task(folder: Path, train: Iterable[Example], dev: Iterable[Example], **more: Any) -> list[str]:
    """Write mine.yaml, the task of `sentiment`, and its files; returns the options that name them."""
    description = sentiment(0)[0].model_dump(exclude_defaults=True) | more
    (folder / "mine.yaml").write_text(json.dumps(description))
    for name, examples in (("train", train), ("dev", dev)):
        write_rows(folder / "data" / f"{name}.tsv", examples)
    return ["--task", str(folder / "mine.yaml"), "--data", str(folder / "data")]


def causal_export(folder: Path) -> Path:
    """Export a GPT-2 of random weights with a byte-level tokenizer; returns the folder of the export."""
    from ctxlm_ds.export.huggingface import to_hf
    from tests.checkpoints import make_config, make_tokenizer, random_weights, write_run

    tokenizer = make_tokenizer("gpt2", folder / "tokenizer")
    size = len(json.loads((tokenizer / "vocab.json").read_text()))
    config = make_config("gpt2", tokenizer, size, {"max_position_embeddings": 96})
    to_hf(write_run(folder / "run", config, random_weights(config)), folder / "hf")
    return folder / "hf"
