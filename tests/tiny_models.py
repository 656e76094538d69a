"""A tiny random model of each causal architecture that the installed transformers knows.

Sizes go into the constructor of the configuration class. Many classes compute further settings
there, for example the kind of each layer. tests/architectures.py judges each model."""

import inspect

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 274
PAD, BOS, EOS = 1, 2, 0

# The value of a setting, in each configuration class that has this setting.
SIZES = {
    # Tokens.
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS,
    "decoder_start_token_id": BOS, "sep_token_id": EOS, "cls_token_id": BOS,
    # Width.
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "emb_dim": 32, "embedding_size": 32,
    "input_embedding_size": 32, "output_embedding_size": 32, "hidden_size_per_layer_input": 8,
    # Width of the feed-forward part.
    "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "ffn_hidden_size": 48, "d_inner": 48,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "feed_forward_size": 48, "dff": 48, "dim_ff": 48,
    "intermediate_size_mlp": 48, "mlp_dim": 48, "dense_intermediate_size": 48,
    "prefix_dense_intermediate_size": 48, "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16, "shared_experts_intermediate_size": 16,
    "shared_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    # Layers.
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "depth": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 2,
    # Heads of attention.
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "dim_head": 8,
    "d_head": 8, "attention_head_size": 8, "kv_channels": 8, "rotary_dim": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "o_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "index_head_dim": 8, "index_n_heads": 32,
    "index_topk": 8, "hidden_size_global": 32, "adapter_rank": 8, "laurel_rank": 8,
    "hc_lowrank": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
    # Reach.
    "max_position_embeddings": 128, "n_positions": 128, "max_seq_len": 128, "n_ctx": 128,
    "max_target_positions": 128, "context_length": 128, "original_max_position_embeddings": 128,
    "sliding_window": 12, "attention_window_size": 12, "sliding_window_size": 12,
    "attention_chunk_size": 12, "window_size": 12, "local_attention": 24,
    # Mixtures of experts.
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "moe_top_k": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "zero_expert_num": 2,
    # Recurrent layers.
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_d_head": 16, "n_mamba_heads": 4,
    "mamba_chunk_size": 8, "chunk_size": 8, "time_step_rank": 4, "mamba_dt_rank": 4,
    "n_groups": 1, "mamba_d_ssm": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_heads": 4,
    "linear_head_dim": 8, "lru_width": 32, "block_size": 8,
    # Parts for images and sound.
    "image_size": 16, "patch_size": 4, "crop_size": 16, "num_position_embeddings": 16,
    "position_embedding_size": 16, "mm_posemb_size": 16, "mm_embed_dim": 32,
    "output_proj_dims": 32, "out_hidden_size": 32, "vision_output_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32, "audio_embed_dim": 32,
    "backbone_hidden_size": 32, "output_channels": 32, "num_mel_bins": 16,
    "adapter_in_dim": 32, "adapter_out_dim": 32, "adapter_input_size": 32,
    "downsample_hidden_size": 8, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32,
    "nemo_conv_channels": 8, "num_blocks": 2,
    # Random numbers large enough that each token changes the predictions.
    "initializer_range": 0.3, "init_std": 0.3,
    # Models that read a whole text, or that answer to one, become decoders.
    "is_decoder": True, "is_encoder_decoder": False, "causal": True,
}

SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}
CONV_AND_FULL = {"layer_types": ["conv", "full_attention"]}
# The last two layers take keys and values from the first two.
SHARED_KEYS = {"num_hidden_layers": 4, "num_kv_shared_layers": 2,
               "layer_types": 2 * ["sliding_attention", "full_attention"]}
# The attention in the second layer and in the fourth layer has the same weights.
SHARED_ATTENTION = {"num_hidden_layers": 4,
                    "layers_block_type": 2 * ["linear_attention", "hybrid"]}

# Further settings of one architecture. The key is the `model_type` of the configuration class.
FURTHER = {
    "afmoe": SLIDING_AND_FULL,
    "bailing_hybrid": LINEAR_AND_FULL,
    "bamba": {"attn_layer_indices": [1]},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, **SLIDING_AND_FULL},
    "cohere2_moe": {"logit_scale": 1.0, "mlp_layer_types": ["dense", "sparse"],
                    **SLIDING_AND_FULL},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16, "swa_head_dim": 12, "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense", "sparse"]},
    "exaone4": SLIDING_AND_FULL,
    "exaone_moe": SLIDING_AND_FULL,
    "flint": {"mlp_only_layers": [0], **SLIDING_AND_FULL},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3_text": SLIDING_AND_FULL,
    "gemma3n_text": {"activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], **SHARED_KEYS},
    "gemma4_audio": {"subsampling_conv_channels": [8, 4], "output_proj_dims": 32},
    "gemma4_text": {"global_head_dim": 16, "enable_moe_block": True, "top_k_experts": 2,
                    **SHARED_KEYS},
    "gemma4_unified_text": {"global_head_dim": 16, **SHARED_KEYS},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": LINEAR_AND_FULL,
    "inkling_text": {"logits_mup_width_multiplier": 1.0,
                     "layer_types": ["hybrid_sliding", "hybrid"],
                     "mlp_layer_types": ["dense", "sparse"]},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LINEAR_AND_FULL,
    "kolibri1": SLIDING_AND_FULL,
    "laguna": SLIDING_AND_FULL,
    "lfm2": {"block_multiple_of": 8, **CONV_AND_FULL},
    "lfm2_moe": CONV_AND_FULL,
    "lfm3": {"num_hidden_layers": 3,
             "layer_types": ["conv", "sliding_attention", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0], "moe_layers": [1]},
    "longcat_flash": {"head_dim": 4},
    "mellum": SLIDING_AND_FULL,
    "olmo3": SLIDING_AND_FULL,
    "phimoe": {"initializer_range": 0.6},
    "qwen3_5_text": LINEAR_AND_FULL,
    "qwen3_5_moe_text": LINEAR_AND_FULL,
    "qwen3_next": LINEAR_AND_FULL,
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "ple_layer_ids": [1], "heads_per_ngram": 2,
        "ngram_vocab_size_base": 32, "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1},
    "smollm3": {"no_rope_layers": [1, 0]},
    "zamba": SHARED_ATTENTION,
    "zamba2": {"num_key_value_heads": 4, "use_shared_attention_adapter": True, **SHARED_ATTENTION},
    "zaya": {"router_hidden_size": 16, "num_experts_per_tok": 1,
             "layer_types": ["hybrid_sliding", "hybrid"]},
}

# The model type of a part whose configuration class is open.
PARTS = {
    ("fuyu", "text_config"): "persimmon",
    ("gemma3", "vision_config"): "siglip_vision_model",
    ("got_ocr2", "text_config"): "qwen2",
}

# There is no tiny model of these. gemma3n needs the package timm, gemma4_assistant and musicgen
# cannot be built alone, and a run refuses the others at its start, whatever their sizes are.
CANNOT = ("blt", "cohere_compass_text", "deepseek_v4", "gemma3n", "gemma4_assistant",
          "gemma4_unified_assistant", "hy_v4", "mamba2", "minimax_m3_vl_text", "mllama", "moshi",
          "moss_transcribe_diarize", "musicgen", "musicgen_melody", "recurrent_gemma", "reformer",
          "roc_bert", "xlm", "xlstm", "xmod")


def names() -> list[str]:
    """The model types of which there are tiny models, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - set(CANNOT))


def small(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A tiny configuration of a class, with tiny parts."""
    known = inspect.signature(config_class.__init__).parameters
    chosen = {}
    for key, value in SIZES.items():
        if key in known:
            chosen[key] = value
    if "kv_lora_rank" in known:
        # Attention over a latent vector has a key head for each query head.
        chosen["num_key_value_heads"] = SIZES["num_attention_heads"]
    for key, part_class in config_class.sub_configs.items():
        if (config_class.model_type, key) in PARTS:
            part_class = CONFIG_MAPPING[PARTS[config_class.model_type, key]]
        chosen[key] = small(part_class)
    chosen.update(FURTHER.get(config_class.model_type, {}))
    return config_class(**chosen)


def tiny_config(name: str) -> PreTrainedConfig:
    """The tiny configuration of a model type."""
    return small(CONFIG_MAPPING[name])


def enlarge(model: PreTrainedModel) -> None:
    """Draws the matrices again that are zero or almost zero.

    Some classes ignore `initializer_range`. With small matrices, attention changes almost nothing.
    With a router of zeros, all experts of a mixture are equal."""
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and parameter.dim() >= 2 and parameter.std() < 0.1:
            torch.nn.init.normal_(parameter, std=SIZES["initializer_range"])


def tiny_model(name: str) -> PreTrainedModel:
    """A tiny random model of a model type. It is the same model in each call."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name)).eval()
    enlarge(model)
    return model
