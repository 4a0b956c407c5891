"""UniLM, XLNet and ELECTRA score as a plain loop over transformers' model; models without a score are refused."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, BertModel, ElectraForPreTraining, XLNetLMHeadModel

from ctxlm_ds.apps.evaluate.scorers import open_scorer
from ctxlm_ds.errors import ConfigError
from ctxlm_ds.registry import FAMILIES
from tests.unit.apps.evaluate.conftest import Export
from tests.unit.apps.evaluate.test_scoring import (
    CAUSAL,
    ENCODER_DECODERS,
    MASKED,
    SENTENCES,
    loaded,
    log_probs,
    masked_values,
    tokens_of,
)

OTHERS = ("electra", "elmo", "xlnet")


def test_every_family_is_compared() -> None:
    """A new family comes with a comparison: here, in test_scoring.py, or (ELMo) with its family's tests."""
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
