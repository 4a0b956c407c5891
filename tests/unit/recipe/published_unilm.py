"""Published values of UniLM, with their place in the source (test_published_values.py)."""

from __future__ import annotations

from tests.unit.recipe.published_settings import Values

# Dong 2019 = arXiv:1905.03197; code = microsoft/unilm, unilm-v1.
UNILM: Values = {
    "model.family": "unilm",
    "model.vocab_size": 28_996,  # section 2.4
    "model.max_position_embeddings": 512,  # 2.4
    "model.type_vocab_size": 6,  # run_seq2seq.py: new_segment_ids
    "model.hidden_activation": "gelu",  # 2.4
    "model.layer_norm_eps": 1e-5,  # modeling.py: BertLayerNorm
    "model.hidden_dropout": 0.1,  # 2.4
    "model.attention_dropout": 0.1,  # 2.4
    "model.initializer": "normal",  # modeling.py: init_bert_weights
    "model.initializer_range": 0.02,  # modeling.py: BertConfig
    "data.seq_length": 512,  # 2.4
    "data.sample_format": "segment_pair",  # 2.4: processed in the same way as BERT's
    "data.short_seq_prob": 0.1,  # google-research/bert create_pretraining_data.py
    "data.random_next_prob": 1 / 6,  # 2.3 and 2.4: half of the bidirectional third
    "objective.name": "unified_lm",
    "objective.left_to_right_prob": 1 / 6,  # 2.4
    "objective.right_to_left_prob": 1 / 6,  # 2.4
    "objective.sequence_to_sequence_prob": 1 / 3,  # 2.4
    "objective.mask_prob": 0.15,  # 2.4
    "objective.keep_prob": 0.1,  # 2.4
    "objective.random_prob": 0.1,  # 2.4
    "objective.spans": "skipgram",  # 2.4
    "objective.max_span_length": 3,  # 2.4: a bigram or a trigram
    "objective.span_prob": 0.2,  # 2.4
    "objective.special_tokens": "bert",  # loader_utils.py: get_random_word
    "objective.masking": "dynamic",  # seq2seq_loader.py masks what it reads
    "optimizer.name": "adamw",  # optimization.py
    "optimizer.learning_rate": 3e-5,  # 2.4
    "optimizer.betas": (0.9, 0.999),  # 2.4
    "optimizer.eps": 1e-6,  # optimization.py
    "optimizer.weight_decay": 0.01,  # 2.4
    "optimizer.decay_biases": False,  # run_seq2seq.py: no_decay
    "optimizer.gradient_clipping": 1.0,  # optimization.py: max_grad_norm
    "schedule.name": "linear",  # 2.4
    "schedule.warmup_steps": 40_000,  # 2.4
    "training.global_batch_size": 330,  # 2.4
    "training.max_steps": 770_000,  # 2.4
}
