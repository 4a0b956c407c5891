"""BERT (Devlin 2018) and RoBERTa (Liu 2019) as a list of layers."""

from __future__ import annotations

from collections.abc import Sequence

from ctxlm_ds.families.base import TransformerSection
from ctxlm_ds.kernels.dispatch import KernelSet
from ctxlm_ds.models.embeddings import InputEmbeddings, WordEmbeddings
from ctxlm_ds.models.heads import EncoderHeads, VocabularyBias
from ctxlm_ds.models.layer_list import LayerDescription
from ctxlm_ds.models.transformer import FinalLayerNorm, TransformerLayer
from ctxlm_ds.parallel.context import ParallelContext

WORD_EMBEDDINGS = "word_embeddings"


def encoder_layers(
    config: TransformerSection,
    terms: Sequence[str],
    kernels: KernelSet,
    parallel: ParallelContext,
    activation_checkpointing: bool,
    compile_layers: bool,
) -> list[LayerDescription]:
    """First layer's input: Batch.model_inputs(); last layer's output: logits by term, masked_lm [b, p, v] first.

    `terms` are the objective's loss terms; next_sentence adds pooler and classifier. `config.vocab_size` is set.
    """
    shared = {"config": config, "kernels": kernels, "parallel": parallel}
    table = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "kernels": kernels, "parallel": parallel,
    }  # fmt: skip
    encoder = [
        LayerDescription(
            f"encoder.{index}", TransformerLayer, shared, recompute=activation_checkpointing, compile=compile_layers,
            block=True,
        )  # fmt: skip
        for index in range(config.num_layers)
    ]
    final_norm = [LayerDescription("final_layer_norm", FinalLayerNorm, shared)] if config.pre_layer_norm else []
    heads = {**shared, "next_sentence": "next_sentence" in terms}
    return [
        LayerDescription(WORD_EMBEDDINGS, WordEmbeddings, table, tie_key=WORD_EMBEDDINGS),
        LayerDescription("embeddings", InputEmbeddings, shared),
        *encoder,
        *final_norm,
        LayerDescription("heads", EncoderHeads, heads),
        LayerDescription(WORD_EMBEDDINGS, WordEmbeddings, table, tie_key=WORD_EMBEDDINGS, call_kwargs={"decode": True}),
        LayerDescription("mlm_bias", VocabularyBias, {"vocab_size": config.vocab_size, "parallel": parallel}),
    ]
