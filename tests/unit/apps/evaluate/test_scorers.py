"""Scores equal those of a plain loop over transformers' model: one forward pass of full logits for each mask."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertModel,
    ElectraForPreTraining,
    XLNetLMHeadModel,
)

from ctxlm_ds.apps.evaluate import scorers
from ctxlm_ds.apps.evaluate.scorers import open_scorer
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.registry import FAMILIES
from tests.unit.apps.evaluate.conftest import Export

SENTENCES = [
    "The river walked slowly.", "the river walked.", "a mountain was reading unhappy books", "", "best",
    "the worst times was the best times.",
]  # fmt: skip
MASKED = ("bert", "roberta", "xlm_roberta", "albert", "distilbert", "tinybert", "modernbert", "megatron_bert", "unilm")
CAUSAL = ("gpt2", "gpt1", "llama")
ENCODER_DECODERS = ("t5", "bart", "mbart")
OTHERS = ("electra", "elmo", "xlnet")


def loaded(folder: Path, auto_class: Any) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(folder), auto_class.from_pretrained(folder).eval()


@torch.no_grad()
def log_probs(model: Any, ids: list[int], **inputs: Any) -> torch.Tensor:
    """All log-probabilities [s, v] of one unpadded input."""
    return model(input_ids=torch.tensor([ids]), **inputs).logits[0].double().log_softmax(-1)


def tokens_of(tokenizer: Any, text: str) -> tuple[list[int], list[int], list[int | None]]:
    """The ids of a text, the places of those that are no special tokens, and the number of each one's word."""
    found = tokenizer(text, return_special_tokens_mask=True)
    return found.input_ids, [at for at, one in enumerate(found.special_tokens_mask) if not one], found.word_ids()


def masked_values(tokenizer: Any, model: Any, text: str, whole_word: bool = False) -> list[float]:
    """The log-probability of each token behind a mask; with `whole_word` its word's later tokens are masked, too."""
    ids, places, words = tokens_of(tokenizer, text)
    values = []
    for at in places:
        given = list(ids)
        for other in places:
            if other == at or (whole_word and other > at and words[other] == words[at]):
                given[other] = tokenizer.mask_token_id
        values.append(float(log_probs(model, given)[at, ids[at]]))
    return values


@pytest.mark.parametrize("family", MASKED)
def test_each_token_is_masked_alone(export: Export, family: str) -> None:
    folder = export(family)
    plain = loaded(folder, AutoModelForMaskedLM)
    wanted = [sum(masked_values(*plain, text)) for text in SENTENCES]
    np.testing.assert_allclose(open_scorer(folder).scores(SENTENCES), wanted, rtol=1e-5)
    assert wanted[3] == 0.0 and len(set(wanted)) == len(wanted)


def test_the_definitions_of_masked_models(export: Export) -> None:
    folder = export("roberta")
    plain = loaded(folder, AutoModelForMaskedLM)
    values = [masked_values(*plain, text) for text in SENTENCES]
    means = [np.mean(each) if each else 0.0 for each in values]
    np.testing.assert_allclose(open_scorer(folder, "minicons").scores(SENTENCES), means, rtol=1e-5)
    wanted = [sum(masked_values(*plain, text, whole_word=True)) for text in SENTENCES]
    np.testing.assert_allclose(open_scorer(folder, "word-l2r").scores(SENTENCES), wanted, rtol=1e-5)
    assert abs(wanted[0] - sum(values[0])) > 0.1
    (found,) = open_scorer(folder).tokens(SENTENCES[:1])
    np.testing.assert_allclose(found.values, values[0], rtol=1e-5)
    assert "".join(SENTENCES[0][start:end] for start, end in found.spans) == SENTENCES[0].replace(" ", "")


def with_beginning(folder: Path, output: Path) -> Path:
    """Copy an export of which the tokenizer adds its first and last token."""
    from tokenizers.processors import TemplateProcessing

    tokenizer, model = loaded(folder, AutoModelForCausalLM)
    name, number = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{name} $A {name}", None, [(name, number)])
    tokenizer.save_pretrained(output)
    model.save_pretrained(output)
    assert AutoTokenizer.from_pretrained(output)("a").input_ids[0] == number
    return output


def causal_values(model: Any, ids: list[int]) -> list[float]:
    """The log-probability of each token but the first."""
    return [float(log_probs(model, ids[:at])[-1, ids[at]]) for at in range(1, len(ids))]


@pytest.mark.parametrize("family", CAUSAL)
def test_a_causal_model_scores_all_but_its_first_token(export: Export, family: str) -> None:
    folder = export(family)
    tokenizer, model = loaded(folder, AutoModelForCausalLM)
    wanted = [sum(causal_values(model, tokenizer(text).input_ids)) for text in SENTENCES]
    np.testing.assert_allclose(open_scorer(folder).scores(SENTENCES), wanted, rtol=1e-5)


def test_the_definitions_of_causal_models(export: Export, tmp_path: Path) -> None:
    plain, folder = export("gpt2"), with_beginning(export("gpt2"), tmp_path / "with")
    tokenizer, model = loaded(plain, AutoModelForCausalLM)
    bare = [tokenizer(text).input_ids for text in SENTENCES]
    end = [tokenizer.eos_token_id]
    values = [causal_values(model, [*end, *ids, *end]) for ids in bare]
    # The last token is special: it is scored by minicons alone.
    np.testing.assert_allclose(open_scorer(folder).scores(SENTENCES), [sum(one[:-1]) for one in values], rtol=1e-5)
    np.testing.assert_allclose(open_scorer(folder, "minicons").scores(SENTENCES), [*map(np.mean, values)], rtol=1e-5)
    spaced = [sum(causal_values(model, [*end, *tokenizer(f" {text}").input_ids])) for text in SENTENCES]
    for one in (plain, folder):
        np.testing.assert_allclose(open_scorer(one, "lm-eval").scores(SENTENCES), spaced, rtol=1e-5)


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_a_decoder_predicts_what_the_encoder_does_not_see(export: Export, family: str) -> None:
    tokenizer, model = loaded(export(family), AutoModelForSeq2SeqLM)
    is_t5 = tokenizer.mask_token is None
    mask = tokenizer.convert_tokens_to_ids("<extra_id_0>") if is_t5 else tokenizer.mask_token_id
    first = [mask] if is_t5 else [tokenizer.bos_token_id, mask]
    start = model.config.decoder_start_token_id
    wanted: dict[str, list[float]] = {"mask": [], "prefix": [], "infill": []}

    def value(given: list[int], read: list[int], target: int) -> float:
        return float(log_probs(model, given, decoder_input_ids=torch.tensor([read]))[-1, target])

    for text in SENTENCES:
        ids, places, _ = tokens_of(tokenizer, text)
        gapped = [[*ids[:at], mask, *ids[at + 1 :]] for at in places]
        wanted["mask"].append(sum(value(one, first, ids[at]) for one, at in zip(gapped, places, strict=True)))
        begin = tokenizer.eos_token_id if family == "mbart" else start
        reads = [[start, mask] if is_t5 else [begin, *ids[:at]] for at in places]
        parts = zip(gapped, reads, places, strict=True)
        wanted["infill"].append(sum(value(one, read, ids[at]) for one, read, at in parts))
        alone = [mask, tokenizer.eos_token_id] if is_t5 else [tokenizer.cls_token_id, mask, tokenizer.eos_token_id]
        bare, read = tokenizer(text, add_special_tokens=False).input_ids, [mask, mask] if is_t5 else first
        wanted["prefix"].append(sum(value(alone, [*read, *bare[:at]], token) for at, token in enumerate(bare)))
    for way, scores in wanted.items():
        np.testing.assert_allclose(open_scorer(export(family), way=way).scores(SENTENCES), scores, rtol=1e-5)


def test_a_sentence_that_is_too_long_ends_no_computation(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = open_scorer(export("bert"))
    monkeypatch.setattr(scorers, "BLOCK", 1)
    monkeypatch.setattr(scorers.LanguageModel, "log_probs", None)
    with pytest.raises(DataError, match=r"the the .*has 82 tokens, the model reads at most \d\d; shorten"):
        scorer.scores(["the", "the " * 80])


def test_every_family_is_compared() -> None:
    """A new family comes with a comparison: here, or (ELMo) with its family's tests."""
    assert {*MASKED, *CAUSAL, *ENCODER_DECODERS, *OTHERS} == set(FAMILIES.shipped_names())


def test_a_unilm_reads_from_both_sides_or_from_the_left(export: Export) -> None:
    tokenizer, model = loaded(export("unilm"), AutoModelForMaskedLM)
    wanted = []
    for text in SENTENCES:
        ids, places, _ = tokens_of(tokenizer, text)
        total, length = 0.0, len(ids)
        for at in places:  # the complete text, of which no position sees what is behind it
            given = [*ids[:at], tokenizer.mask_token_id, *ids[at + 1 :]]
            seen = torch.tensor([[[[key <= query for key in range(length)] for query in range(length)]]])
            types = torch.full((1, length), 2)
            total += float(log_probs(model, given, attention_mask=seen, token_type_ids=types)[at, ids[at]])
        wanted.append(total)
    np.testing.assert_allclose(open_scorer(export("unilm"), way="left-to-right").scores(SENTENCES), wanted, rtol=1e-5)


def permuted(model: Any, ids: list[int], at: int, hidden: Any, types: list[int]) -> float:
    """The log-probability of a token that sees what `hidden(query, key)` does not hide."""
    length = len(ids)
    mask = torch.tensor([[[float(hidden(query, key)) for key in range(length)] for query in range(length)]])
    slot = torch.tensor([[[float(place == at) for place in range(length)]]])
    row = {"perm_mask": mask, "target_mapping": slot, "token_type_ids": torch.tensor([types])}
    return float(log_probs(model, ids, **row)[0, ids[at]])


def test_an_xlnet_predicts_in_order_or_hides_a_token(export: Export) -> None:
    tokenizer, model = loaded(export("xlnet"), XLNetLMHeadModel)
    ordered, alone = [], []
    for text in SENTENCES:
        ids, places, _ = tokens_of(tokenizer, text)
        types = tokenizer(text, return_token_type_ids=True).token_type_ids
        assert places == list(range(len(ids) - 2)) and types[-1] == 2
        alone.append(sum(permuted(model, ids, at, lambda _, key, at=at: key == at, types) for at in places))
        ordered.append(sum(permuted(model, ids, at, lambda query, key: key >= query, types) for at in places[1:]))
    np.testing.assert_allclose(open_scorer(export("xlnet")).scores(SENTENCES), ordered, rtol=1e-5)
    found = open_scorer(export("xlnet"), way="pseudo-likelihood", batch_tokens=64).scores(SENTENCES)
    np.testing.assert_allclose(found, alone, rtol=1e-5)


def test_an_electra_scores_by_either_model_or_by_both(export: Export) -> None:
    folder = export("electra")
    tokenizer, discriminator = loaded(folder, ElectraForPreTraining)
    generator = AutoModelForMaskedLM.from_pretrained(folder / "generator").eval()
    wanted: dict[str, list[float]] = {"pseudo-likelihood": [], "original": [], "electric": []}
    for text in SENTENCES:
        ids, places, _ = tokens_of(tokenizer, text)
        drawn = masked_values(tokenizer, generator, text)
        with torch.no_grad():
            replaced = discriminator(torch.tensor([ids])).logits[0].double()[places].sigmoid().tolist()
        wanted["pseudo-likelihood"].append(sum(drawn))
        wanted["original"].append(sum(math.log(1 - one) for one in replaced))
        odds = [math.log((1 - one) / one) for one in replaced]
        wanted["electric"].append(sum(drawn) + sum(odds))
    for way, scores in wanted.items():
        np.testing.assert_allclose(open_scorer(folder, way=way).scores(SENTENCES), scores, rtol=1e-5, atol=1e-5)
    assert open_scorer(folder).way == "pseudo-likelihood"
    np.testing.assert_allclose(
        open_scorer(folder / "generator").scores(SENTENCES), wanted["pseudo-likelihood"], rtol=1e-5
    )


def test_what_has_no_score_is_refused(export: Export, tmp_path: Path) -> None:
    alone = shutil.copytree(export("tinybert"), tmp_path / "tinybert")
    BertModel.from_pretrained(alone).save_pretrained(alone)
    with pytest.raises(ConfigError, match=r"no weights of cls\..*no language model's output layer"):
        open_scorer(alone)
    electra = shutil.copytree(export("electra"), tmp_path / "electra")
    shutil.rmtree(electra / "generator")
    with pytest.raises(ConfigError, match=r"no folder generator, whose model --way electric needs"):
        open_scorer(electra, way="electric")
    assert open_scorer(electra, way="original").scores(SENTENCES[:1]) < 0
    for family, options, known in (
        ("gpt2", {"definition": "word-l2r"}, "babylm, lm-eval, minicons"),
        ("bart", {"definition": "minicons"}, "babylm"), ("xlnet", {"way": "mask"}, "left-to-right, pseudo-likelihood"),
        ("elmo", {"way": "mask"}, "both, forward, backward"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"--.* is scored by {known}$"):
            open_scorer(export(family), **options)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_scorer(tmp_path / "none")
