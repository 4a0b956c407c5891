"""Vectors of words beside a plain version of bilm-tf's convolution and highway layers."""

from __future__ import annotations

import numpy as np
import torch

from ctxlm_ds.families.elmo.config import CHARACTERS, ELMO, ElmoSection
from ctxlm_ds.families.elmo.layers import CharacterEncoder
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.spec import ModelBuild

ROWS, LENGTH = 2, 3
MODEL = ElmoSection.model_validate(ELMO.tiny()["model"] | {"vocab_size": 50, "num_highways": 2})


def encoder() -> CharacterEncoder:
    torch.manual_seed(1)
    module = CharacterEncoder(MODEL, ModelBuild((), KernelSet({}, "cpu", torch.float32))).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def plain(module: CharacterEncoder, word: list[int]) -> np.ndarray:
    weights = {name: value.detach().numpy() for name, value in module.named_parameters()}
    table = np.concatenate([np.zeros((1, MODEL.character_size)), weights["table.weight"]])
    characters, parts = table[word], []
    for number, (width, _) in enumerate(MODEL.filters):
        kernel, bias = weights[f"filters.{number}.weight"], weights[f"filters.{number}.bias"]
        places = [np.einsum("wd,fdw->f", characters[p : p + width], kernel) for p in range(len(word) - width + 1)]
        parts.append(np.maximum(np.max(np.stack(places) + bias, axis=0), 0))
    x = np.concatenate(parts)
    for number in range(MODEL.num_highways):
        carry, transform = (
            weights[f"highways.{number}.{part}.weight"] @ x + weights[f"highways.{number}.{part}.bias"]
            for part in ("carry", "transform")
        )
        gate = 1 / (1 + np.exp(-carry))
        x = gate * np.maximum(transform, 0) + (1 - gate) * x
    return weights["projection.weight"] @ x + weights["projection.bias"]


def test_vectors_are_those_of_bilm_tf() -> None:
    module = encoder()
    torch.manual_seed(2)
    streams = [torch.randint(CHARACTERS + 1, (ROWS, LENGTH, MODEL.max_characters)) for _ in range(2)]
    flat = module(*(ids.flatten(1) for ids in streams))
    for ids, vectors, same in zip(streams, module(*streams), flat, strict=True):
        assert torch.equal(vectors, same)
        wanted = [[plain(module, word) for word in row] for row in ids.tolist()]
        np.testing.assert_allclose(vectors.detach().numpy(), np.array(wanted), rtol=1e-9, atol=1e-12)


def test_no_character_has_the_vector_zero() -> None:
    module = encoder()
    assert not module.table(torch.zeros(1, dtype=torch.long)).any()
    assert torch.equal(module.table(torch.tensor([1, CHARACTERS])), module.table.weight[[0, -1]])
