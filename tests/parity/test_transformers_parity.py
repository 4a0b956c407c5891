"""Models against transformers' beside the contract: packed rows, padding as a random token, pre-LN, activations."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

from ctxlm_ds.data.fields import IGNORE_LABEL
from ctxlm_ds.data.sample import Batch
from ctxlm_ds.export.base import export_of
from ctxlm_ds.export.key_maps import KeyMap
from ctxlm_ds.models.layers import LayerSequence
from ctxlm_ds.parallel.context import ParallelContext
from ctxlm_ds.parallel.cross_entropy import classification_sums
from ctxlm_ds.recipe.sections import ModelSection
from tests.encoder_batches import PAD_ID, batch_of, random_batch, random_rows, tiny_model
from tests.parity.mapping import Ids, copy_weights, hf_inputs, hf_model, key_map_of, our_model, randomize
from tools.benchmark.transformers_sides import their_labels

SEQ_LENGTH = 20
LENGTHS = [[20], [13], [4], [9]]
BERT = ("predicted_logits", "sentence_logits")
MASKED_LM = ("predicted_logits",)
MODELS = {
    "bert": (tiny_model(), BERT),
    "bert without next sentence": (tiny_model(), MASKED_LM),
    "bert tanh": (tiny_model(hidden_activation="gelu_tanh"), BERT),
    "roberta": (tiny_model(family="roberta", layer_norm_eps=1e-5), MASKED_LM),
}


def terms_of(outputs: tuple[str, ...]) -> tuple[str, ...]:
    """The loss terms of these outputs."""
    return ("masked_lm", "next_sentence") if outputs == BERT else ("masked_lm",)


def pair(config: ModelSection, outputs: tuple[str, ...]) -> tuple[LayerSequence, nn.Module, KeyMap]:
    """Our model and theirs with the same weights, in evaluation mode."""
    theirs = hf_model(config, outputs).eval()
    randomize(theirs)
    ours = our_model(config, outputs).eval()
    key_map = key_map_of(config, outputs)
    copy_weights(theirs, ours, key_map)
    return ours, theirs, key_map


def our_loss(model: LayerSequence, batch: Batch) -> Tensor:
    """Each term's mean over its labels, added."""
    total = torch.zeros(())
    labels = [batch.fields[name] for name in ("masked_lm_labels", "next_sentence_labels") if name in batch.fields]
    for logits, wanted in zip(model.run(batch.fields).values(), labels, strict=True):
        loss_sum, _, count = classification_sums([logits], [wanted], ParallelContext())
        total = total + loss_sum / count
    return total


def their_logits(model: nn.Module, batch: Batch, config: ModelSection) -> list[Tensor]:
    """Masked-LM logits at the prediction slots [b, p, v], then next-sentence logits [b, 1, 2] where there are any."""
    result = model(**hf_inputs(batch, config))
    return list(export_of(config.family).their_outputs(result, batch.fields).values())


def compare_gradients(ours: nn.Module, theirs: nn.Module, key_map: KeyMap) -> None:
    """Every parameter's gradient; of ours stacked from theirs."""
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        row = next(row for row in key_map.rows if row.ours == name)
        pieces = [gradients.pop(piece) for piece in row.theirs]
        if row.ours == "embeddings.position_embeddings.weight" and len(row.theirs) > 1:
            expected, token_types = pieces
            torch.testing.assert_close(parameter.grad.sum(0, keepdim=True), token_types, rtol=1e-5, atol=1e-5)
        else:
            expected = torch.cat(pieces)
        assert expected.abs().max() > 0, name
        assert torch.allclose(parameter.grad, expected, rtol=1e-5, atol=1e-5), name
    assert gradients.keys() <= {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}


def test_pad_as_a_random_token_gets_the_gradient_of_its_look_up() -> None:
    """With `special_tokens: bert` a token to predict may become [PAD], inside a sequence.

    google-research/bert looks it up as any other token. transformers' padding_idx drops the gradient of the look-up;
    that part is the only difference, and positions that are padding contribute nothing to it.
    """
    config, outputs = MODELS["bert"]
    ours, theirs, key_map = pair(config, outputs)
    batch = random_batch(LENGTHS, config, SEQ_LENGTH, terms_of(outputs))
    drawn = torch.zeros_like(batch.fields["input_ids"], dtype=torch.bool)
    for row, position in ((0, 5), (0, 11), (1, 3)):
        drawn[row, position] = True
    batch.fields["input_ids"][drawn] = PAD_ID
    our_value = our_loss(ours, batch)
    our_value.backward()

    table, looked_up = theirs.bert.embeddings.word_embeddings, []
    assert table.padding_idx == PAD_ID

    def keep(module: nn.Module, ids: tuple[Tensor, ...], vectors: Tensor) -> None:
        vectors.retain_grad()
        looked_up.append(vectors)

    table.register_forward_hook(keep)
    their_value = theirs(**hf_inputs(batch, config), **their_labels(batch.fields)).loss
    their_value.backward()
    torch.testing.assert_close(our_value, their_value, rtol=1e-5, atol=0)
    of_look_ups = looked_up[0].grad
    assert (of_look_ups[batch.fields["sequence_ids"] == 0] == 0).all()
    dropped = of_look_ups[drawn].sum(0)
    assert dropped.abs().max() > 1e-3
    gradient, expected = ours.get_parameter("word_embeddings.weight").grad, table.weight.grad.clone()
    assert not torch.allclose(gradient[PAD_ID], expected[PAD_ID], rtol=1e-5, atol=1e-5)
    expected[PAD_ID] += dropped
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)

    theirs.zero_grad()
    table.padding_idx = None
    theirs(**hf_inputs(batch, config), **their_labels(batch.fields)).loss.backward()
    compare_gradients(ours, theirs, key_map)


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_give_the_logits_of_their_sequences_alone(name: str) -> None:
    config, outputs = MODELS[name]
    _, theirs, key_map = pair(config, outputs)
    packed_model, single_model = our_model(config, outputs, packing=True).eval(), our_model(config, outputs).eval()
    for model in (packed_model, single_model):
        copy_weights(theirs, model, key_map)
        model.double()
    rows = random_rows([[7, 5, 8], [6, 3]], config.vocab_size or 0, seed=3)
    packed = batch_of(rows, SEQ_LENGTH, terms_of(outputs), slots=8)
    alone = batch_of([[example] for row in rows for example in row], SEQ_LENGTH, terms_of(outputs), slots=4)
    packed_logits, alone_logits = packed_model.run(packed.fields).values(), single_model.run(alone.fields).values()
    for term, got, wanted in zip(terms_of(outputs), packed_logits, alone_logits, strict=True):
        field = f"{term}_labels"
        got, wanted = got[packed.fields[field] != IGNORE_LABEL], wanted[alone.fields[field] != IGNORE_LABEL]
        assert len(got) > 0
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12 * max(1.0, wanted.abs().max().item()))


def test_pre_layer_norm_is_transformers_roberta_prelayernorm() -> None:
    config = tiny_model(family="roberta", pre_layer_norm=True, layer_norm_eps=1e-5)
    settings = export_of("roberta").their_settings(config, Ids())
    their_config = transformers.RobertaPreLayerNormConfig(**settings)
    theirs = transformers.RobertaPreLayerNormForMaskedLM(their_config).eval()
    randomize(theirs)
    base = theirs.roberta_prelayernorm
    base.embeddings.token_type_embeddings.weight.data.zero_()
    ours = our_model(config, MASKED_LM).eval()
    modules = {
        "word_embeddings": base.embeddings.word_embeddings,
        "embeddings.position_embeddings": base.embeddings.position_embeddings,
        "embeddings.layer_norm": base.embeddings.LayerNorm,
        "final_layer_norm": base.LayerNorm,
        "heads.mlm_transform": theirs.lm_head.dense,
        "heads.mlm_layer_norm": theirs.lm_head.layer_norm,
    }
    for index, layer in enumerate(base.encoder.layer):
        modules |= {
            f"encoder.{index}.attention_layer_norm": layer.attention.LayerNorm,
            f"encoder.{index}.attention.output": layer.attention.output.dense,
            f"encoder.{index}.mlp_layer_norm": layer.intermediate.LayerNorm,
            f"encoder.{index}.mlp.up": layer.intermediate.dense,
            f"encoder.{index}.mlp.down": layer.output.dense,
        }
    values = {f"{name}.{leaf}": value for name, module in modules.items() for leaf, value in module.named_parameters()}
    values["mlm_bias.bias"] = theirs.lm_head.bias
    for index, layer in enumerate(base.encoder.layer):
        attention = layer.attention.self
        for leaf in ("weight", "bias"):
            parts = [getattr(part, leaf) for part in (attention.query, attention.key, attention.value)]
            values[f"encoder.{index}.attention.qkv.{leaf}"] = torch.cat(parts)
    ours.load_state_dict(values)
    batch = random_batch(LENGTHS, config, SEQ_LENGTH, terms_of(MASKED_LM))
    (got,), (wanted,) = ours.run(batch.fields).values(), their_logits(theirs, batch, config)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "settings"), [
    ("gpt2", {"hidden_activation": "gelu"}), ("gpt2", {"hidden_activation": "relu", "intermediate_size": 48}),
    ("gpt1", {"hidden_activation": "relu"}),
])  # fmt: skip
def test_logits_of_decoders_with_other_activations(family: str, settings: dict[str, object]) -> None:
    config = tiny_model(**{"family": family, "intermediate_size": 128, **settings})
    ours, theirs, _ = pair(config, ("logits",))
    places = torch.arange(SEQ_LENGTH).expand(2, -1)
    ids = torch.randint(2, 61, places.shape, generator=torch.Generator().manual_seed(0))
    (got,) = ours.run({
        "input_ids": ids, "position_ids": places, "sequence_ids": torch.ones_like(ids),
        "sequence_starts": torch.tensor([[0, SEQ_LENGTH]] * 2),
    }).values()  # fmt: skip
    torch.testing.assert_close(got, theirs(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
