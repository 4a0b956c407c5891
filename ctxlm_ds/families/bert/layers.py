"""TinyBERT (Jiao 2020) as a list of layers."""

from __future__ import annotations

from ctxlm_ds.families.bert.config import CLASSES, PROJECTED, TinyBertSection
from ctxlm_ds.models.layers import LayerDescription, ModelBuild
from ctxlm_ds.models.parts.comparison import projection
from ctxlm_ds.models.parts.encoder import encoder_layers, encoder_trunk
from ctxlm_ds.models.parts.heads import SequenceClassifier
from ctxlm_ds.models.parts.transformer import initial_weights


def tinybert_layers(model: TinyBertSection, build: ModelBuild) -> list[LayerDescription]:
    """List the layers: embeddings with token types, blocks, BERT's masked-LM head; or projection and classifier."""
    if "predicted_logits" in build.outputs:
        return encoder_layers(model, build)
    layers = encoder_trunk(model, build)
    if PROJECTED in build.outputs:
        layers.append(projection(model.hidden_size, model.fit_size, initial_weights(model), build))
    if CLASSES in build.outputs:
        head = {
            "width": model.hidden_size, "num_classes": model.num_classes, "init": initial_weights(model),
            "build": build,
        }  # fmt: skip
        reads = ("hidden", "sequence_ids", "cls_positions")
        layers.append(LayerDescription("classifier_head", SequenceClassifier, reads, (CLASSES,), head))
    return layers
