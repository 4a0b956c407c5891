"""Published settings of BERT, LAMB, MosaicBERT, RoBERTa, SpanBERT, ALBERT, GPT and UniLM, each with its source."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

BERT: Values = {
    "model.family": "bert",
    "model.vocab_size": 30_522,  # vocab.txt of uncased_L-12_H-768_A-12
    "model.max_position_embeddings": 512,  # modeling.py: BertConfig
    "model.type_vocab_size": 2,  # bert_config.json of the released models
    "model.hidden_activation": "gelu",  # A.2
    "model.layer_norm_eps": 1e-12,  # tf.contrib.layers.layer_norm
    "model.hidden_dropout": 0.1,  # A.2
    "model.attention_dropout": 0.1,  # A.2
    "model.initializer": "truncated_normal",  # modeling.py: create_initializer
    "model.initializer_range": 0.02,  # modeling.py: BertConfig
    "model.pre_layer_norm": False,  # modeling.py: transformer_model
    "data.sample_format": "segment_pair",  # A.1
    "data.short_seq_prob": 0.1,  # create_pretraining_data.py
    "data.num_duplicates": 10,  # create_pretraining_data.py: dupe_factor
    "objective.name": "masked_lm_nsp",  # section 3.1
    "objective.mask_prob": 0.15,  # A.1
    "objective.keep_prob": 0.1,  # A.1
    "objective.random_prob": 0.1,  # A.1
    "objective.whole_word": False,  # create_pretraining_data.py: do_whole_word_mask
    "objective.masking": "static",  # create_pretraining_data.py writes the masks
    "objective.special_tokens": "bert",  # create_pretraining_data.py: vocab_words[randint(0, len - 1)]
    "objective.count_rounding": "nearest",  # create_pretraining_data.py: int(round(...))
    "optimizer.name": "adamw",  # A.2
    "optimizer.learning_rate": 1e-4,  # A.2
    "optimizer.betas": (0.9, 0.999),  # A.2
    "optimizer.eps": 1e-6,  # optimization.py
    "optimizer.weight_decay": 0.01,  # A.2
    "optimizer.decay_biases": False,  # optimization.py: exclude_from_weight_decay
    "optimizer.gradient_clipping": 1.0,  # optimization.py: clip_by_global_norm
    "schedule.name": "linear",  # A.2
    "schedule.warmup_steps": 10_000,  # A.2
    "schedule.warmup_fraction": None,
    "schedule.total_steps": 1_000_000,  # A.2
    "schedule.final_learning_rate": 0.0,  # optimization.py: end_learning_rate
    "schedule.decay_from": "start",  # optimization.py: global_step, warmup included
}
BERT_PHASE_1: Values = BERT | {
    "data.seq_length": 128,  # A.2
    "objective.max_predictions": 20,  # create_pretraining_data.py
    "schedule.start_step": 0,
    "training.global_batch_size": 1024,  # J. Devlin's slides: 1,024 sequences of 128
    "training.max_steps": 900_000,  # A.2: nine tenths of 1,000,000
}
BERT_PHASE_2: Values = BERT | {
    "data.seq_length": 512,  # A.2
    "objective.max_predictions": 77,  # README: max_seq_length x masked_lm_prob
    "schedule.start_step": 900_000,  # inferred
    "training.global_batch_size": 256,  # A.2
    "training.max_steps": 100_000,  # A.2: a tenth of 1,000,000
}
# DeepLearningExamples, PyTorch/LanguageModeling/BERT.
LAMB: Values = {
    "model.initializer": "normal",  # modeling.py: init_bert_weights
    "optimizer.name": "lamb",  # You 2019
    "schedule.name": "polynomial",  # schedulers.py: PolyWarmUpScheduler
    "schedule.power": 0.5,  # schedulers.py: degree
    "schedule.warmup_steps": None,
    "schedule.start_step": 1,  # run_pretraining.py: each phase begins again; schedulers.py: counts before the update
}
LAMB_PHASE_1: Values = BERT_PHASE_1 | LAMB | {
    "optimizer.learning_rate": 6e-3,  # scripts/run_pretraining.sh
    "schedule.warmup_fraction": 0.2843,  # scripts/run_pretraining.sh
    "schedule.total_steps": 7038,  # run_pretraining.py: args.max_steps of the phase
    "training.global_batch_size": 65_536,  # scripts/run_pretraining.sh: 8 x 8,192
    "training.max_steps": 7038,  # scripts/run_pretraining.sh
}  # fmt: skip
LAMB_PHASE_2: Values = BERT_PHASE_2 | LAMB | {
    "initialize_moments": True,  # run_pretraining.py: loads the optimizer, with group['step'].zero_()
    "objective.max_predictions": 80,  # scripts/run_pretraining.sh
    "optimizer.learning_rate": 4e-3,  # scripts/run_pretraining.sh
    "schedule.warmup_fraction": 0.128,  # scripts/run_pretraining.sh
    "schedule.total_steps": 1563,  # run_pretraining.py: args.max_steps of the phase
    "training.global_batch_size": 32_768,  # scripts/run_pretraining.sh: 8 x 4,096
    "training.max_steps": 1563,  # scripts/run_pretraining.sh
}  # fmt: skip
# Liu 2019 = arXiv:1907.11692; code = fairseq.
ROBERTA: Values = {
    "model.family": "roberta",
    "model.vocab_size": 50_265,  # gpt2_bpe/dict.txt: 50,260 entries, 4 special tokens, <mask>
    "model.max_position_embeddings": 512,  # table 9 and base.yaml: max_positions
    "model.hidden_activation": "gelu",  # roberta/model.py: activation_fn
    "model.layer_norm_eps": 1e-5,  # torch.nn.LayerNorm
    "model.hidden_dropout": 0.1,  # table 9
    "model.attention_dropout": 0.1,  # table 9
    "model.initializer": "normal",  # transformer_sentence_encoder.py: init_bert_params
    "model.initializer_range": 0.02,  # transformer_sentence_encoder.py: init_bert_params
    "model.pre_layer_norm": False,  # roberta/model.py: encoder_normalize_before
    "data.seq_length": 512,  # base.yaml: tokens_per_sample
    "data.sample_format": "full_sentences",  # section 4.2; base.yaml: sample_break_mode complete
    "objective.name": "masked_lm",  # section 4.2: no next-sentence loss
    "objective.mask_prob": 0.15,  # mask_tokens_dataset.py
    "objective.keep_prob": 0.1,  # mask_tokens_dataset.py: leave_unmasked_prob
    "objective.random_prob": 0.1,  # mask_tokens_dataset.py: random_token_prob
    "objective.whole_word": False,  # mask_tokens_dataset.py: mask_whole_words
    "objective.masking": "dynamic",  # section 4.1
    "objective.special_tokens": "roberta",  # mask_tokens_dataset.py: masks any item, weights[: nspecial] = 0
    "objective.count_rounding": "probabilistic",  # mask_tokens_dataset.py: + rng.random()
    "optimizer.name": "adamw",  # table 9
    "optimizer.learning_rate": 6e-4,  # table 9
    "optimizer.betas": (0.9, 0.98),  # table 9
    "optimizer.eps": 1e-6,  # table 9
    "optimizer.weight_decay": 0.01,  # table 9
    "optimizer.decay_biases": True,  # fairseq/optim/adam.py: one group of all parameters
    "optimizer.gradient_clipping": 0.0,  # table 9
    "schedule.name": "linear",  # table 9
    "schedule.warmup_steps": 24_000,  # table 9
    "schedule.warmup_fraction": None,
    "schedule.total_steps": None,  # table 9: max steps
    "schedule.start_step": 0,
    "schedule.final_learning_rate": 0.0,  # polynomial_decay_schedule.py
    "schedule.decay_from": "warmup",  # polynomial_decay_schedule.py: num_updates - warmup
    "training.global_batch_size": 8192,  # table 9
    "training.max_steps": 500_000,  # table 9
}
# Radford 2018; code = finetune-transformer-lm.
GPT1: Values = {
    "model.family": "gpt1",
    "model.vocab_size": 40_478,  # model/encoder_bpe_40000.json
    "model.max_position_embeddings": 512,  # section 4.1
    "model.hidden_activation": "gelu_tanh",  # train.py: gelu
    "model.layer_norm_eps": 1e-5,  # train.py: _norm
    "model.hidden_dropout": 0.1,  # section 4.1
    "model.attention_dropout": 0.1,  # section 4.1
    "model.initializer": "normal",  # section 4.1
    "model.initializer_range": 0.02,  # section 4.1
    "model.position_initializer_range": None,  # train.py: one table for words and positions
    "data.seq_length": 512,  # section 4.1
    "data.sample_format": "blocks",  # section 4.1
    "data.reset_at_documents": True,  # ours
    "objective.name": "causal_lm",  # section 3.1
    "optimizer.name": "adamw",  # section 4.1
    "optimizer.learning_rate": 2.5e-4,  # section 4.1
    "optimizer.betas": (0.9, 0.999),  # train.py: b1, b2
    "optimizer.eps": 1e-8,  # train.py: e
    "optimizer.weight_decay": 0.01,  # section 4.1
    "optimizer.decay_biases": False,  # section 4.1: all non bias or gain weights
    "optimizer.gradient_clipping": 1.0,  # train.py: max_grad_norm
    "schedule.name": "cosine",  # section 4.1
    "schedule.warmup_steps": 2000,  # section 4.1
    "schedule.warmup_fraction": None,
    "schedule.total_steps": None,
    "schedule.start_step": 0,
    "schedule.final_learning_rate": 0.0,  # section 4.1
    "schedule.decay_from": "start",  # opt.py: warmup_cosine
    "training.global_batch_size": 64,  # section 4.1
    "training.max_steps": 3_000_000,  # inferred
}
# Radford 2019; code = openai/gpt-2; training of Brown 2020 = arXiv:2005.14165.
GPT2: Values = GPT1 | {
    "model.family": "gpt2",
    "model.vocab_size": 50_257,  # section 2.3
    "model.max_position_embeddings": 1024,  # section 2.3
    "model.position_initializer_range": 0.01,  # src/model.py: wpe
    "data.seq_length": 1024,  # section 2.3
    "data.reset_at_documents": False,  # Brown 2020, appendix B
    "optimizer.learning_rate": 6e-4,  # Brown 2020, table 2.1
    "optimizer.betas": (0.9, 0.95),  # Brown 2020, appendix B
    "optimizer.weight_decay": 0.1,  # Brown 2020, appendix B
    "schedule.warmup_steps": 715,  # Brown 2020, appendix B: 375 million tokens
    "schedule.total_steps": 495_911,  # Brown 2020, appendix B: 260 billion tokens
    "schedule.final_learning_rate": 6e-5,  # Brown 2020, appendix B: a tenth
    "schedule.decay_from": "warmup",  # Brown 2020 does not say
    "training.global_batch_size": 512,  # section 2.3; Brown 2020, table 2.1: half a million tokens
    "training.max_steps": 572_205,  # Brown 2020, table 2.1: 300 billion tokens
}
# Liu 2024 = arXiv:2402.14905; code = facebookresearch/MobileLLM.
LLAMA_125M: Values = {
    "model.family": "llama",
    "model.vocab_size": 32_000,  # configs/125M/config.json, as the other settings of the model
    "model.hidden_size": 576,
    "model.num_layers": 30,
    "model.num_attention_heads": 9,
    "model.num_key_value_heads": 3,
    "model.intermediate_size": 1536,
    "model.max_position_embeddings": 2048,
    "model.hidden_activation": "silu",
    "model.layer_norm_eps": 1e-5,
    "model.hidden_dropout": 0.0,  # utils/modeling_llama.py has none
    "model.attention_dropout": 0.0,  # transformers' default
    "model.initializer": "normal",  # utils/modeling_llama.py
    "model.initializer_range": 0.02,
    "model.tie_word_embeddings": True,  # pretrain.sh: --share_embedding
    "model.rotary_base": 10_000.0,
    "model.rotary_scaling": "none",
    "data.seq_length": 2048,  # pretrain.sh: --model_max_length
    "data.sample_format": "blocks",  # README: amber-data-prep
    "data.reset_at_documents": False,  # inferred
    "objective.name": "causal_lm",
    "optimizer.name": "adamw",  # process_args.py: adamw_torch
    "optimizer.learning_rate": 2e-3,  # pretrain.sh: 5e-4 for a quarter of the GPUs
    "optimizer.betas": (0.9, 0.95),  # pretrain.sh
    "optimizer.eps": 1e-8,  # pretrain.sh
    "optimizer.weight_decay": 0.1,  # pretrain.sh
    "optimizer.decay_biases": False,  # transformers.Trainer
    "optimizer.gradient_clipping": 1.0,  # transformers.TrainingArguments
    "schedule.name": "cosine",  # pretrain.sh
    "schedule.warmup_steps": 1000,  # pretrain.sh
    "schedule.warmup_fraction": None,
    "schedule.final_learning_rate": 0.0,  # get_cosine_schedule_with_warmup
    "schedule.decay_from": "warmup",  # get_cosine_schedule_with_warmup
    "training.global_batch_size": 1024,  # section 4.1: 32 GPUs with 32 rows
    "training.max_steps": 480_000,  # section 4.1, pretrain.sh
}
# config.json of meta-llama/Llama-3.2-1B; Llama 2 = Touvron 2023, arXiv:2307.09288; Llama 3 = arXiv:2407.21783.
LLAMA_1B: Values = LLAMA_125M | {
    "model.vocab_size": 128_256,
    "model.hidden_size": 2048,
    "model.num_layers": 16,
    "model.num_attention_heads": 32,
    "model.num_key_value_heads": 8,
    "model.intermediate_size": 8192,
    "model.max_position_embeddings": 8192,  # original_max_position_embeddings
    "model.rotary_base": 500_000.0,
    "data.seq_length": 4096,  # Llama 2, table 1
    "data.reset_at_documents": True,  # Llama 3, section 3.2
    "data.max_sequences_per_row": 64,  # ours
    "optimizer.learning_rate": 3e-4,  # Llama 2, table 1: 7B
    "optimizer.eps": 1e-5,  # Llama 2, section 2.2
    "schedule.warmup_steps": 2000,  # Llama 2, section 2.2
    "schedule.final_learning_rate": 3e-5,  # Llama 2, section 2.2: a tenth
    "training.global_batch_size": 1024,  # Llama 2, table 1: 4M tokens
    "training.max_steps": 476_837,  # Llama 2, table 1: 2 trillion tokens
    "training.activation_checkpointing": True,  # ours
}
# Joshi 2020 = arXiv:1907.10529; code = facebookresearch/SpanBERT, pretraining/.
SPANBERT: Values = BERT | {
    "model.vocab_size": 28_996,  # fairseq/models/pair_bert.py: cased_bert_pair
    "model.initializer": "normal",  # fairseq/models/pair_bert.py: init_bert_weights
    "data.seq_length": 512,  # section 3.3; README: --tokens-per-sample
    "data.sample_format": "doc_sentences",  # fairseq/data/no_nsp_span_bert_dataset.py: break mode doc
    "data.num_duplicates": 1,  # ours: dynamic masks
    "data.separate_sentences": False,  # fairseq/data/no_nsp_span_bert_dataset.py: [CLS] sentences [SEP]
    "objective.name": "masked_lm",  # README: --no-nsp
    "objective.whole_word": True,  # section 3.1: complete words
    "objective.spans": "geometric",  # section 3.1
    "objective.span_prob": 0.2,  # section 3.1; README: --geometric-p
    "objective.max_span_length": 10,  # section 3.1; README: --span-upper
    "objective.replace_spans": True,  # section 3.1; README: --replacement-method span
    "objective.random_tokens": "corpus",  # fairseq/data/masking.py: np.random.choice(tokens)
    "objective.boundary_weight": 1.0,  # section 3.2; README: --pair-loss-weight
    "objective.masking": "dynamic",  # section 4.2
    "objective.special_tokens": "spanbert",  # fairseq/data/masking.py: tokens of the corpus, no test for [UNK]
    "objective.count_rounding": "up",  # fairseq/data/masking.py: math.ceil
    "optimizer.eps": 1e-8,  # README: --adam-eps
    "optimizer.decay_biases": True,  # fairseq/optim/adam.py: one group of all parameters
    "schedule.total_steps": None,  # README: --total-num-update, the steps of the run
    "schedule.final_learning_rate": 1e-9,  # README: --min-lr
    "schedule.start_step": 0,
    "training.global_batch_size": 256,  # README: 32 devices, --max-tokens 4096
    "training.max_steps": 2_400_000,  # README: --max-update
}
del SPANBERT["data.short_seq_prob"]  # one segment in a row
# Lan 2020 = arXiv:1909.11942; code = google-research/albert.
ALBERT: Values = BERT | {
    "model.family": "albert",
    "model.vocab_size": 30_000,  # section 4.1
    "model.embedding_size": 128,  # table 1
    "model.num_groups": 1,  # table 1: all layers share
    "model.layers_per_group": 1,  # modeling.py: inner_group_num
    "model.hidden_activation": "gelu_tanh",  # modeling.py: gelu
    "data.seq_length": 512,  # section 4.1
    "data.sample_format": "sentence_order",  # section 3.1
    "data.num_duplicates": 40,  # create_pretraining_data.py: dupe_factor
    "objective.name": "masked_lm_sop",  # section 3.1
    "objective.whole_word": True,  # create_pretraining_data.py: do_whole_word_mask
    "objective.word_starts": "albert",  # create_pretraining_data.py: _is_start_piece_sp
    "objective.spans": "ngram",  # section 4.1
    "objective.max_span_length": 3,  # section 4.1
    "objective.max_predictions": 20,  # README: --max_predictions_per_seq
    "optimizer.name": "lamb",  # section 4.1
    "optimizer.learning_rate": 1.76e-3,  # section 4.1
    "schedule.warmup_steps": 3125,  # README: --num_warmup_steps
    "schedule.total_steps": None,  # README: --num_train_steps, the steps of the run
    "schedule.start_step": 0,
    "training.global_batch_size": 4096,  # section 4.1
    "training.max_steps": 125_000,  # section 4.1
}
# Portes 2023 = arXiv:2312.17482; code and yaml = mosaicml/examples, examples/benchmarks/bert.
MOSAIC: Values = {
    "model.attention_dropout": 0.0,  # yaml: attention_probs_dropout_prob
    "model.initializer": "normal",  # transformers: BertPreTrainedModel
    "data.sample_format": "doc_sentences",  # src/text_data.py: a document in a row
    "data.separate_sentences": False,  # src/text_data.py: one separator at the end
    "data.packing": True,  # ours: the original cuts documents at the end of a row
    "data.num_duplicates": 1,  # text_data.py: masks of each batch
    "objective.name": "masked_lm",  # src/mosaic_bert.py: BertForMaskedLM
    "objective.mask_prob": 0.3,  # yaml: mlm_probability
    "objective.masking": "dynamic",  # text_data.py: DataCollatorForLanguageModeling
    "objective.count_rounding": "probabilistic",  # ours: the original masks every token with this probability
    "objective.max_predictions": None,
    "optimizer.learning_rate": 5e-4,  # yaml: lr
    "optimizer.betas": (0.9, 0.98),  # yaml: betas
    "optimizer.weight_decay": 0.02,  # yaml: weight_decay / lr
    "optimizer.decay_biases": True,  # main.py: model.parameters()
    "optimizer.gradient_clipping": 0.0,  # yaml: no such algorithm
    "schedule.warmup_steps": None,
    "schedule.warmup_fraction": 0.06,  # yaml: t_warmup
    "schedule.total_steps": None,
    "schedule.final_learning_rate": 1e-5,  # yaml: alpha_f x lr
    "schedule.decay_from": "warmup",  # Composer: LinearWithWarmupScheduler
    "training.global_batch_size": 4096,  # yaml: global_train_batch_size
    "training.max_steps": 70_000,  # yaml: max_duration / global_train_batch_size
}
MOSAIC_BASE: Values = {k: v for k, v in BERT_PHASE_1.items() if k != "data.short_seq_prob"} | MOSAIC

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
