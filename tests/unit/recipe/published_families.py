"""Published values of the families after BERT, with their place in the source (test_published_values.py)."""

from __future__ import annotations

from tests.unit.recipe.published_settings import BERT, Values

# Sanh 2019 = arXiv:1910.01108; code = transformers' research projects, distillation/.
DISTILBERT: Values = {
    "model.family": "distilbert",
    "model.vocab_size": 30_522,  # training_configs/distilbert-base-uncased.json, as the other settings of the model
    "model.num_layers": 6,
    "model.hidden_size": 768,
    "model.num_attention_heads": 12,
    "model.intermediate_size": 3072,
    "model.max_position_embeddings": 512,
    "model.hidden_activation": "gelu",
    "model.layer_norm_eps": 1e-12,  # modeling_distilbert.py
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "model.initializer": "normal",  # modeling_distilbert.py
    "model.initializer_range": 0.02,
    "model.pre_layer_norm": False,
    "initialize_layers": "spread",  # extract_distilbert.py: 0, 2, 4, 7, 9, 11
    "teacher.model.family": "bert",  # section 4
    "teacher.model.num_layers": 12,
    "teacher.model.hidden_size": 768,
    "data.seq_length": 512,  # lm_seqs_dataset.py: max_model_input_size
    "data.sample_format": "doc_sentences",  # binarized_data.py: one text in a row
    "data.separate_sentences": False,  # binarized_data.py: one separator at the end
    "objective.name": "distillation",
    "objective.soft_target_weight": 5.0,  # README: --alpha_ce
    "objective.temperature": 2.0,  # train.py
    "objective.soft_targets": "tokens",  # train.py: restrict_ce_to_mask is off
    "objective.masked_lm_weight": 2.0,  # README: --alpha_mlm
    "objective.cosine_weight": 1.0,  # README: --alpha_cos
    "objective.mask_prob": 0.15,  # train.py: mlm_mask_prop
    "objective.count_smoothing": 0.7,  # train.py: mlm_smoothing
    "objective.keep_prob": 0.1,  # train.py: word_keep
    "objective.random_prob": 0.1,  # train.py: word_rand
    "objective.whole_word": False,
    "objective.masking": "dynamic",  # distiller.py: prepare_batch_mlm
    "objective.special_tokens": "distilbert",  # distiller.py: random_(vocab_size); train.py: token_probs
    "objective.count_rounding": "nearest",  # ours: distiller.py rounds up over all rows of a batch
    "optimizer.name": "adamw",  # distiller.py
    "optimizer.learning_rate": 5e-4,  # train.py
    "optimizer.betas": (0.9, 0.98),  # distiller.py
    "optimizer.eps": 1e-6,  # train.py
    "optimizer.weight_decay": 0.0,  # train.py
    "optimizer.gradient_clipping": 5.0,  # train.py: max_grad_norm
    "schedule.name": "linear",  # distiller.py
    "schedule.warmup_steps": None,
    "schedule.warmup_fraction": 0.05,  # train.py
    "schedule.total_steps": None,
    "schedule.final_learning_rate": 0.0,
    "schedule.decay_from": "warmup",  # get_linear_schedule_with_warmup
    "training.global_batch_size": 4000,  # section 4
    "training.max_steps": 6000,  # inferred: 3 epochs (train.py)
}
# Clark 2020 = arXiv:2003.10555; code = google-research/electra.
ELECTRA: Values = BERT | {
    "model.family": "electra",
    "model.vocab_size": 30_522,  # configure_pretraining.py: vocab_size
    "model.embedding_size": 128,  # table 6
    "model.generator_num_layers": 12,  # configure_pretraining.py: generator_layers 1.0
    "data.seq_length": 128,  # table 6; configure_pretraining.py: max_seq_length
    "data.sample_format": "doc_segments",  # build_pretraining_dataset.py: ExampleBuilder
    "data.short_seq_prob": 0.05,  # build_pretraining_dataset.py: random.random() < 0.05
    "data.one_segment_prob": 0.1,  # build_pretraining_dataset.py: random.random() < 0.1
    "data.num_duplicates": 1,  # pretrain_helpers.py: mask() of each batch
    "objective.name": "replaced_tokens",  # section 2
    "objective.keep_prob": 0.15,  # pretrain_helpers.py: tf.less(uniform, 0.85)
    "objective.random_prob": 0.0,  # pretrain_helpers.py: the mask token only
    "objective.masking": "dynamic",  # pretrain_helpers.py: mask()
    "objective.special_tokens": "never",  # pretrain_helpers.py: get_candidates_mask
    "objective.max_predictions": 19,  # configure_pretraining.py: int((0.15 + 0.005) * 128)
    "objective.generator_weight": 1.0,  # configure_pretraining.py: gen_weight
    "objective.discriminator_weight": 50.0,  # section 3.1; configure_pretraining.py: disc_weight
    "optimizer.learning_rate": 5e-4,  # table 6
    "schedule.total_steps": None,  # run_pretraining.py: num_train_steps, the steps of the run
    "schedule.start_step": 0,
    "training.global_batch_size": 128,  # table 6
    "training.max_steps": 1_000_000,  # table 6
}
# Jiao 2020 = arXiv:1909.10351; code = huawei-noah/Pretrained-Language-Model, TinyBERT/.
TINYBERT: Values = {
    "model.family": "tinybert",
    "model.vocab_size": 30_522,  # config.json of the released models
    "model.max_position_embeddings": 512,  # config.json of the released models
    "model.type_vocab_size": 2,  # config.json of the released models
    "model.fit_size": 768,  # transformer/modeling.py: TinyBertForPreTraining
    "model.hidden_activation": "gelu",  # config.json of the released models
    "model.layer_norm_eps": 1e-12,  # transformer/modeling.py: BertLayerNorm
    "model.hidden_dropout": 0.1,  # config.json of the released models
    "model.attention_dropout": 0.1,  # config.json of the released models
    "model.initializer": "normal",  # transformer/modeling.py: init_bert_weights
    "model.initializer_range": 0.02,  # config.json of the released models
    "data.seq_length": 128,  # pregenerate_training_data.py: max_seq_len
    "data.sample_format": "segment_pair",  # pregenerate_training_data.py: create_instances_from_document
    "data.short_seq_prob": 0.1,  # pregenerate_training_data.py
    "data.random_next_weights": "sentences",  # pregenerate_training_data.py: sample_doc
    "data.num_duplicates": 3,  # pregenerate_training_data.py: epochs_to_generate, a file for each epoch
    "objective.name": "tinybert",
    "objective.mask_prob": 0.0,  # README: no [MASK] corpus; pregenerate_training_data.py: masked_lm_prob
    "objective.layer_map": None,  # general_distill.py: layers_per_block
    "objective.embedding_weight": 1.0,  # general_distill.py: rep_loss
    "objective.hidden_weight": 1.0,  # general_distill.py: rep_loss
    "objective.attention_weight": 1.0,  # general_distill.py: att_loss
    "optimizer.name": "adamw",  # transformer/optimization.py: BertAdam
    "optimizer.learning_rate": 5e-5,  # general_distill.py: learning_rate
    "optimizer.betas": (0.9, 0.999),  # transformer/optimization.py: b1, b2
    "optimizer.eps": 1e-6,  # transformer/optimization.py: e
    "optimizer.weight_decay": 0.01,  # general_distill.py: optimizer_grouped_parameters
    "optimizer.decay_biases": False,  # general_distill.py: no_decay
    "optimizer.gradient_clipping": 1.0,  # transformer/optimization.py: max_grad_norm, there of each parameter
    "schedule.name": "linear",  # transformer/optimization.py: warmup_linear
    "schedule.warmup_steps": None,
    "schedule.warmup_fraction": 0.1,  # general_distill.py: warmup_proportion
    "schedule.total_steps": None,
    "schedule.start_step": 0,
    "schedule.final_learning_rate": 0.0,  # transformer/optimization.py: WarmupLinearSchedule
    "schedule.decay_from": "warmup",  # transformer/optimization.py: WarmupLinearSchedule
    "training.global_batch_size": 256,  # README: --train_batch_size
    "training.max_steps": 400_000,  # ours: about three epochs of English Wikipedia
}
TINYBERT_4: Values = {  # section 4.1
    "model.num_layers": 4, "model.hidden_size": 312, "model.num_attention_heads": 12, "model.intermediate_size": 1200,
}  # fmt: skip
# Raffel 2020 = arXiv:1910.10683; code = google-research/text-to-text-transfer-transformer, tensorflow/mesh.
T5: Values = {
    "model.family": "t5",
    "model.vocab_size": 32_128,  # config.json of the released models: 32,100 padded to a multiple of 128
    "model.hidden_size": 512,  # section 3.7, as the other sizes; bi_v1_small.gin
    "model.num_layers": 6,
    "model.num_decoder_layers": 6,
    "model.num_attention_heads": 8,
    "model.head_size": 64,
    "model.intermediate_size": 2048,
    "model.hidden_activation": "relu",  # section 2.1
    "model.gated": False,
    "model.tied_head": True,  # section 2.1
    "model.relative_buckets": 32,  # section 2.1
    "model.relative_reach": 128,  # section 2.1
    "model.layer_norm_eps": 1e-6,  # transformer.py: sublayer_rms_norm
    "model.hidden_dropout": 0.1,  # section 2.1 and 3.1.2
    "model.attention_dropout": 0.1,
    "data.seq_length": 512,  # section 3.1.2
    "data.sample_format": "chunks",  # preprocessors.py: reduce_concat_tokens, split_tokens
    "objective.name": "span_corruption",  # section 3.3.4
    "objective.noise_density": 0.15,  # objectives/span.gin
    "objective.mean_span_length": 3.0,  # objectives/span.gin
    "objective.z_loss": 1e-4,  # operative_config.gin: Unitransformer.z_loss
    "optimizer.name": "adafactor",  # section 3.1.2
    "optimizer.learning_rate": 1e-2,  # section 3.1.2: 1 / sqrt(10,000)
    "optimizer.weight_decay": 0.0,  # optimize.py: none
    "optimizer.gradient_clipping": 0.0,  # optimize.py: none but Adafactor's
    "schedule.name": "inverse_sqrt",  # section 3.1.2
    "schedule.warmup_shape": "constant",  # section 3.1.2: the first 10,000 steps have 0.01
    "schedule.warmup_steps": 10_000,
    "training.global_batch_size": 2048,  # section 3.7: 2^11
    "training.max_steps": 1_000_000,  # section 3.7
}
T5_BASE: Values = {  # section 3.7; bi_bert_base.gin
    "model.num_layers": 12, "model.num_decoder_layers": 12, "model.hidden_size": 768, "model.num_attention_heads": 12,
    "model.intermediate_size": 3072,
}  # fmt: skip
T5_1_1: Values = {  # released_checkpoints.md; t5.1.1.base.gin
    "model.intermediate_size": 2048, "model.hidden_activation": "gelu_tanh", "model.gated": True,
    "model.tied_head": False, "model.hidden_dropout": 0.0, "model.attention_dropout": 0.0,
}  # fmt: skip
# Lewis 2020 = arXiv:1910.13461; Liu 2020 = arXiv:2001.08210; code = facebookresearch/fairseq, its issue 1899.
BART: Values = {
    "model.family": "bart",
    "model.vocab_size": 50_265,  # config.json of the released models
    "model.hidden_size": 768,  # models/bart/model.py: bart_base
    "model.num_layers": 6,  # section 2.1
    "model.num_decoder_layers": 6,  # section 2.1
    "model.num_attention_heads": 12,  # models/bart/model.py: bart_base
    "model.intermediate_size": 3072,  # models/bart/model.py: bart_base
    "model.max_position_embeddings": 1024,  # models/bart/model.py: max_source_positions
    "model.hidden_activation": "gelu",  # section 2.1
    "model.layer_norm_eps": 1e-5,  # torch's LayerNorm
    "model.hidden_dropout": 0.1,  # config.json of the released models
    "model.attention_dropout": 0.1,  # config.json of the released models
    "model.activation_dropout": 0.1,  # config.json of the released models
    "model.scale_embedding": False,  # models/bart/model.py: no_scale_embedding
    "data.seq_length": 512,  # tasks/denoising.py: tokens_per_sample
    "data.sample_format": "doc_sentences",  # tasks/denoising.py: complete_doc
    "data.separate_sentences": False,  # tasks/denoising.py: StripTokenDataset
    "objective.name": "text_infilling",  # section 5.1
    "objective.mask_ratio": 0.3,  # section 5.1
    "objective.span_lambda": 3.0,  # section 2.2
    "objective.whole_word": True,  # denoising_dataset.py: mask_whole_words
    "objective.replace_length": 1,  # section 2.2
    "objective.random_ratio": 0.1,  # issue 1899: --mask-random
    "objective.permute_ratio": 1.0,  # section 5.1
    "objective.sentence_end": ".",  # denoising_dataset.py: full_stop_index
    "optimizer.name": "adamw",  # issue 1899
    "optimizer.learning_rate": 4e-4,  # issue 1899
    "optimizer.betas": (0.9, 0.98),  # as Liu 2019
    "optimizer.eps": 1e-6,  # as Liu 2019
    "optimizer.weight_decay": 0.01,  # issue 1899
    "optimizer.decay_biases": True,  # fairseq's Adam
    "optimizer.gradient_clipping": 0.1,  # issue 1899: --clip-norm
    "schedule.name": "linear",  # issue 1899: polynomial_decay
    "schedule.warmup_steps": 10_000,  # issue 1899
    "training.global_batch_size": 8000,  # section 5.1
    "training.max_steps": 500_000,  # section 5.1
}
BART_LARGE: Values = {  # section 5.1; models/bart/model.py: bart_large
    "model.num_layers": 12, "model.num_decoder_layers": 12, "model.hidden_size": 1024,
    "model.num_attention_heads": 16, "model.intermediate_size": 4096,
}  # fmt: skip
MBART: Values = {
    "model.family": "mbart",
    "model.vocab_size": 250_027,  # config.json of facebook/mbart-large-cc25
    "model.attention_dropout": 0.0,  # config.json of facebook/mbart-large-cc25
    "model.activation_dropout": 0.0,  # config.json of facebook/mbart-large-cc25
    "model.scale_embedding": True,  # models/bart/model.py: mbart_large
    "data.separate_sentences": True,  # Liu 2020, section 2.2
    "data.blend": "temperature",  # Liu 2020, section 2.1
    "data.temperature": 1 / 0.7,  # Liu 2020, section 2.1: alpha
    "objective.mask_ratio": 0.35,  # Liu 2020, section 2.2
    "objective.span_lambda": 3.5,  # Liu 2020, section 2.2
    "objective.sentence_end": None,  # denoising_dataset.py: eos without GPT-2's vocabulary
    "objective.language_tokens": True,  # Liu 2020, section 2.2
    "objective.token_languages": ("ja_XX", "my_MM", "zh_CN"),  # ours: of no_whole_word_mask_langs no list is published
}
# Warner 2024 = arXiv:2412.13663; code and yamls = AnswerDotAI/ModernBERT, branch pretraining_documentation.
MODERNBERT: Values = {
    "model.family": "modernbert",
    "model.vocab_size": 50_368,  # yamls: vocab_size
    "model.num_layers": 22,  # section 2.1.3
    "model.hidden_size": 768,  # section 2.1.3
    "model.num_attention_heads": 12,  # yamls
    "model.intermediate_size": 1152,  # section 2.1.3: 2,304 before the gate
    "model.max_position_embeddings": 1024,  # yamls: max_seq_len
    "model.hidden_activation": "gelu",  # yamls: hidden_act, head_pred_act
    "model.layer_norm_eps": 1e-5,  # yamls: norm_kwargs
    "model.hidden_dropout": 0.1,  # yamls: attn_out_dropout_prob
    "model.attention_dropout": 0.0,  # yamls: attention_probs_dropout_prob
    "model.initializer": "truncated_normal",  # initialization.py: full_megatron
    "model.initializer_range": 0.02,  # configuration_bert.py: init_std
    "model.global_attention_every": 3,  # yamls: global_attn_every_n_layers
    "model.local_attention": 128,  # yamls: sliding_window
    "model.global_rotary_base": 10_000.0,  # yamls: rotary_emb_base
    "model.local_rotary_base": 10_000.0,  # yamls: rotary_emb_base of the first phase
    "data.seq_length": 1024,  # yamls: max_seq_len
    "data.sample_format": "doc_sentences",  # text_data.py: each sample is a piece of one document
    "data.separate_sentences": False,  # text_data.py
    "data.packing": True,  # yamls: sequence_packing
    "data.max_sequences_per_row": 16,  # ours
    "objective.name": "masked_lm",  # section 2.2.2
    "objective.mask_prob": 0.3,  # yamls: mlm_probability
    "objective.keep_prob": 0.1,  # sequence_packer.py: mlm_masking
    "objective.random_prob": 0.1,  # sequence_packer.py: mlm_masking
    "objective.masking": "dynamic",  # sequence_packer.py: new masks for each batch
    "objective.special_tokens": "roberta",  # sequence_packer.py: every token but the padding
    "objective.count_rounding": "probabilistic",  # nearest to sequence_packer.py: each token by itself
    "optimizer.name": "stable_adamw",  # yamls: decoupled_stableadamw
    "optimizer.learning_rate": 8e-4,  # yamls: lr
    "optimizer.betas": (0.9, 0.98),  # yamls: betas
    "optimizer.eps": 1e-6,  # yamls: eps
    "optimizer.weight_decay": 0.0125,  # yamls: weight_decay 1e-5 a step at the peak, 1e-5 / 8e-4
    "optimizer.decay_biases": False,  # yamls: filter_bias_norm_wd
    "optimizer.gradient_clipping": 0.0,  # yamls have none; main.py: StableAdamW takes its place
    "schedule.name": "constant",  # yamls: warmup_stable_decay with t_decay 0
    "schedule.warmup_steps": 3815,  # yamls: 3 billion tokens
    "schedule.warmup_fraction": None,
    "training.global_batch_size": 4608,  # yamls
    "training.batch_ramp": (768, 768, 48_828_125),  # yamls: 50 billion tokens, from 96 for each of 8 GPUs
    "training.max_steps": 382_742,  # yamls: 1.719 trillion tokens
}
MODERNBERT_PHASE_2: Values = MODERNBERT | {  # modernbert-base-context-extension.yaml
    "initialize_moments": True,  # load_path, restart_override
    "model.max_position_embeddings": 8192, "model.global_rotary_base": 160_000.0, "data.seq_length": 8192,
    "data.max_sequences_per_row": 64, "optimizer.learning_rate": 3e-4, "optimizer.weight_decay": 0.0333,
    "schedule.warmup_steps": 0, "training.global_batch_size": 576, "training.batch_ramp": None,
    "training.max_steps": 52_982,
}  # fmt: skip
ONE_MINUS_SQRT: Values = {  # yamls: one_minus_sqrt over the whole phase, alpha_f 0.001
    "schedule.name": "wsd", "schedule.decay_fraction": 1.0, "schedule.decay_shape": "one_minus_sqrt",
    "schedule.final_learning_rate": 3e-7, "training.max_steps": 10_596,
}  # fmt: skip
MODERNBERT_LARGE: Values = {  # section 2.1.3 and modernbert-large-pretrain.yaml; 900 billion tokens: section 2.2.2
    "model.num_layers": 28, "model.hidden_size": 1024, "model.num_attention_heads": 16,
    "model.intermediate_size": 2624, "optimizer.learning_rate": 5e-4, "optimizer.weight_decay": 0.02,
    "schedule.warmup_steps": 3270, "training.global_batch_size": 4928, "training.batch_ramp": (448, 448, 9_765_625),
    "training.max_steps": 182_754,
}  # fmt: skip
MODERNBERT_LARGE_RESTART: Values = {  # section 2.2.2: 800 billion tokens
    "initialize_moments": True,  # inferred
    "optimizer.learning_rate": 5e-5, "schedule.warmup_steps": 0, "training.batch_ramp": None,
    "training.max_steps": 158_533,
}  # fmt: skip
MODERNBERT_LARGE_PHASE_2: Values = MODERNBERT_LARGE | MODERNBERT_LARGE_RESTART | {
    # modernbert-large-context-extension.yaml
    "training.global_batch_size": 616, "training.max_steps": 49_542,
}  # fmt: skip
# Yang 2019 = arXiv:1906.08237; code = zihangdai/xlnet.
XLNET: Values = {
    "model.family": "xlnet",
    "model.vocab_size": 32_000,  # data_utils.py: VOCAB_SIZE
    "model.hidden_activation": "gelu_tanh",  # modeling.py: gelu
    "model.layer_norm_eps": 1e-12,  # tf.contrib.layers.layer_norm
    "model.hidden_dropout": 0.1,  # appendix, hyperparameters of pretraining
    "model.attention_dropout": 0.1,  # appendix, hyperparameters of pretraining
    "model.initializer_range": 0.02,  # train.py: init_std
    "model.mem_len": 384,  # README
    "data.seq_length": 512,  # README; appendix
    "data.sample_format": "text_and_pair",  # data_utils.py: create_tfrecords
    "data.both_directions": True,  # README: bi_data
    "data.num_duplicates": 20,  # README: num_passes
    "objective.name": "permutation_lm",
    "objective.num_predictions": 85,  # README: num_predict
    "objective.context_tokens": 6,  # README: mask_alpha
    "objective.predicted_tokens": 1,  # README: mask_beta
    "objective.max_span_length": 5,  # data_utils.py: max_gram
    "objective.perm_size": 256,  # README
    "optimizer.name": "adamw",  # model_utils.py: AdamWeightDecayOptimizer
    "optimizer.learning_rate": 4e-4,  # appendix
    "optimizer.betas": (0.9, 0.999),  # model_utils.py
    "optimizer.eps": 1e-6,  # appendix
    "optimizer.weight_decay": 0.01,  # appendix
    "optimizer.decay_biases": False,  # model_utils.py: exclude_from_weight_decay
    "optimizer.gradient_clipping": 1.0,  # train.py: clip
    "schedule.name": "linear",  # appendix
    "schedule.warmup_steps": 40_000,  # appendix
    "schedule.warmup_fraction": None,
    "schedule.total_steps": None,
    "schedule.final_learning_rate": 4e-7,  # train.py: min_lr_ratio 0.001
    "schedule.decay_from": "warmup",  # model_utils.py: global_step - warmup_steps
    "training.global_batch_size": 8192,  # appendix
    "training.max_steps": 500_000,  # appendix
}
# Peters 2018 = arXiv:1802.05365; code = github.com/allenai/bilm-tf; options = bin/train_elmo.py.
ELMO: Values = {
    "model.family": "elmo",
    "model.vocab_size": 793_471,  # README, with <S>, </S> and <UNK>
    "model.inputs": "characters",  # section 3.4, as the sizes
    "model.projection_size": 512,
    "model.cell_size": 4096,
    "model.num_layers": 2,
    "model.cell_clip": 3.0,  # options, to model.filters
    "model.projection_clip": 3.0,
    "model.residual": True,
    "model.dropout": 0.1,
    "model.num_sampled": 8192,
    "model.character_size": 16,
    "model.max_characters": 50,
    "model.filters": [(1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024)],
    "model.num_highways": 2,
    "data.seq_length": 20,  # options: unroll_steps
    "data.sample_format": "bidirectional_lanes",  # data.py: BidirectionalLMDataset
    "objective.name": "bidirectional_lm",
    "objective.inputs": "characters",
    "objective.max_characters": 50,
    "optimizer.name": "adagrad",  # training.py
    "optimizer.learning_rate": 0.2,
    "optimizer.eps": 1e-12,  # ours: TensorFlow's has none
    "optimizer.weight_decay": 0.0,
    "optimizer.initial_accumulator": 1 / 20**2,  # training.py: 1, of 20 times the loss
    "optimizer.gradient_clipping": 10 / 20,  # options: 10, of 20 times the loss
    "schedule.name": "constant",
    "training.global_batch_size": 3 * 128,  # options
    "training.max_steps": 10 * (768_648_884 // (3 * 128 * 20)),  # options and training.py
}
ELMO_SMALL: Values = {  # the name of the release, elmo_2x1024_128_2048cnn_1xhighway
    "model.projection_size": 128,
    "model.cell_size": 1024,
    "model.num_highways": 1,
}
