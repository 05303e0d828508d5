"""Configurations of tiny models, several of each family: what `transformers` calls them and what they stress.

A case is a name and the arguments of its config class. Names become names of tests: letters, digits and underscores.
"""

SEQUENCE = 24  # Longer than the original length of scaled rotations, shorter than max_position_embeddings.

DENSE = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0)

YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
# Its original length is max_position_embeddings: below SEQUENCE it scales, above it does not.
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)


def long_rope(half, original=16):
    return dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=original,
                short_factor=[1.0 + 0.1 * i for i in range(half)], long_factor=[1.5 + 0.7 * i for i in range(half)])


def dense(**changes):
    return {**DENSE, **changes}


LLAMA_LIKE = {
    "tied": dict(tie_word_embeddings=True),
    "untied": dict(tie_word_embeddings=False),
    "one_kv_head": dict(num_key_value_heads=1),
    "wide_heads": dict(head_dim=16),
}
ROPES = {"linear": LINEAR, "dynamic_short": DYNAMIC, "yarn": YARN, "llama3": LLAMA3,
         "yarn_truncate": {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}}

EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=24)
MLA = dict(num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
           n_shared_experts=1, n_routed_experts=6, num_hidden_layers=3, first_k_dense_replace=1, **EXPERTS)
MSCALE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=32, beta_slow=1)
MLA_ROPES = {
    "yarn_mscale": {**MSCALE, "mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn_mscale_all": {**MSCALE, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn_no_mscale": MSCALE,
}


def cases():
    """(name, model_type, arguments of the config class)."""
    result = []

    def add(name, model_type, arguments):
        result.append((name, model_type, arguments))

    for name, changes in LLAMA_LIKE.items():
        for family in ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "starcoder2", "ernie4_5", "exaone4"):
            if name == "wide_heads" and family in ("qwen2", "granite", "olmo2", "starcoder2", "exaone4"):
                continue  # Their heads are hidden size / heads.
            add(f"{family}_{name}", family, dense(**changes))
    for name, rope in ROPES.items():
        add(f"llama_{name}", "llama", dense(rope_parameters=rope))
        add(f"qwen3_{name}", "qwen3", dense(rope_parameters=rope))
    add("llama_dynamic", "llama", dense(rope_parameters=DYNAMIC, max_position_embeddings=16))
    add("llama_bias", "llama", dense(attention_bias=True, mlp_bias=True))
    add("llama_attention_bias", "llama", dense(attention_bias=True))
    add("llama_mlp_bias", "llama", dense(mlp_bias=True))
    add("llama_padded_rows", "llama", dense(vocab_size=101))
    add("mistral_window", "mistral", dense(sliding_window=7))
    add("mistral_no_window", "mistral", dense(sliding_window=None, head_dim=12))
    add("mistral_yarn", "mistral", dense(sliding_window=9, rope_parameters=YARN))
    add("qwen2_window", "qwen2", dense(use_sliding_window=True, sliding_window=7, max_window_layers=1))
    add("qwen2_yarn", "qwen2", dense(rope_parameters=YARN))
    add("qwen3_window", "qwen3", dense(use_sliding_window=True, sliding_window=7, max_window_layers=0))
    add("qwen3_attention_bias", "qwen3", dense(attention_bias=True))
    add("qwen3_moe_bias", "qwen3_moe", dense(num_experts=4, head_dim=8, attention_bias=True, **EXPERTS))
    add("olmo2_bias", "olmo2", dense(attention_bias=True))
    add("gemma2_bias", "gemma2", dense(head_dim=8, attention_bias=True))
    add("granite_multipliers", "granite", dense(embedding_multiplier=6.0, attention_multiplier=0.2, residual_multiplier=0.3,
                                               logits_scaling=4.0))
    add("granite_bias", "granite", dense(attention_bias=True, mlp_bias=True))
    add("olmo2_linear", "olmo2", dense(rope_parameters=LINEAR))
    add("starcoder2_window", "starcoder2", dense(sliding_window=6, use_bias=False))
    add("starcoder2_gelu", "starcoder2", dense(hidden_act="gelu"))
    add("ernie4_5_bias", "ernie4_5", dense(use_bias=True, head_dim=16))
    add("exaone4_windows", "exaone4", dense(num_hidden_layers=4, sliding_window=6, sliding_window_pattern=4))
    everywhere = dict(sliding_window=None, layer_types=["full_attention"] * 2)
    add("exaone4_no_window", "exaone4", dense(**everywhere))
    add("exaone4_llama3", "exaone4", dense(**everywhere, rope_parameters=LLAMA3))

    small = dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.1, bos_token_id=1,
                 eos_token_id=2)
    add("gpt2_tied", "gpt2", small)
    add("gpt2_untied", "gpt2", {**small, "tie_word_embeddings": False, "n_inner": 40})
    add("gpt2_gelu", "gpt2", {**small, "activation_function": "gelu", "layer_norm_epsilon": 1e-3})

    add("phi3_plain", "phi3", dense())
    add("phi3_tied", "phi3", dense(tie_word_embeddings=True, num_key_value_heads=1))
    add("phi3_window", "phi3", dense(sliding_window=7))
    add("phi3_partial", "phi3", dense(rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)))
    add("phi3_long", "phi3", dense(original_max_position_embeddings=16, rope_parameters=long_rope(4)))
    add("phi3_long_short", "phi3", dense(original_max_position_embeddings=32, rope_parameters=long_rope(4, 32)))

    for family in ("gemma", "gemma2", "gemma3_text"):
        window = {} if family == "gemma" else dict(sliding_window=6)
        add(f"{family}_tied", family, dense(head_dim=16, num_hidden_layers=3, **window))
        add(f"{family}_untied", family, dense(head_dim=8, num_key_value_heads=1, tie_word_embeddings=False))
    add("gemma2_caps", "gemma2", dense(head_dim=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
                                       query_pre_attn_scalar=24, sliding_window=6))
    add("gemma2_no_caps", "gemma2", dense(head_dim=8, attn_logit_softcapping=None, final_logit_softcapping=None))
    add("gemma3_scaled", "gemma3_text", dense(
        head_dim=8, num_hidden_layers=6, sliding_window=6, query_pre_attn_scalar=8,
        rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
                             sliding_attention=dict(rope_type="default", rope_theta=10000.0))))

    add("glm4_plain", "glm4", dense(head_dim=8))
    add("glm4_no_bias", "glm4", dense(head_dim=16, attention_bias=False, tie_word_embeddings=True, num_key_value_heads=1))
    glm_moe = dict(head_dim=8, n_shared_experts=1, n_routed_experts=6, num_hidden_layers=3, first_k_dense_replace=1, **EXPERTS)
    add("glm4_moe_plain", "glm4_moe", dense(**glm_moe))
    add("glm4_moe_norms", "glm4_moe", dense(**{**glm_moe, "use_qk_norm": True, "attention_bias": True,
                                               "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1}))

    add("nemotron_plain", "nemotron", dense(head_dim=8))
    add("nemotron_wide", "nemotron", dense(head_dim=16, tie_word_embeddings=True, num_key_value_heads=1))
    add("nemotron_bias", "nemotron", dense(head_dim=8, attention_bias=True, mlp_bias=True))

    add("mixtral_plain", "mixtral", dense(num_local_experts=4))
    add("mixtral_window", "mixtral", dense(num_local_experts=4, num_experts_per_tok=3, sliding_window=7, head_dim=12,
                                           tie_word_embeddings=True))
    add("qwen2_moe_plain", "qwen2_moe", dense(num_experts=4, shared_expert_intermediate_size=32, **EXPERTS))
    add("qwen2_moe_mixed", "qwen2_moe", dense(num_experts=4, shared_expert_intermediate_size=32, norm_topk_prob=True,
                                              num_hidden_layers=3, mlp_only_layers=[1], qkv_bias=False,
                                              tie_word_embeddings=True, **EXPERTS))
    add("qwen2_moe_step", "qwen2_moe", dense(num_experts=4, shared_expert_intermediate_size=32, num_hidden_layers=4,
                                             decoder_sparse_step=2, **EXPERTS))
    add("qwen3_moe_plain", "qwen3_moe", dense(num_experts=4, head_dim=8, **EXPERTS))
    add("qwen3_moe_normed", "qwen3_moe", dense(num_experts=4, head_dim=12, norm_topk_prob=True, num_key_value_heads=1,
                                               rope_parameters=YARN, **EXPERTS))

    for family in ("deepseek_v2", "deepseek_v3"):
        v3 = dict(n_group=2, topk_group=1, n_routed_experts=8) if family == "deepseek_v3" else {}
        add(f"{family}_plain", family, dense(**MLA, **{**v3, "routed_scaling_factor": 1.5}) if not v3 else
            dense(**{**MLA, **v3}))
        add(f"{family}_no_q_lora", family, dense(**{**MLA, **v3, "q_lora_rank": None}))
        for name, rope in MLA_ROPES.items():
            add(f"{family}_{name}", family, dense(**{**MLA, **v3, "rope_parameters": rope}))
    add("deepseek_v2_groups", "deepseek_v2", dense(**{**MLA, "topk_method": "group_limited_greedy", "n_group": 3,
                                                      "topk_group": 2, "num_experts_per_tok": 3}))
    add("deepseek_v3_tied", "deepseek_v3", dense(**{**MLA, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True,
                                                    "first_k_dense_replace": 2, "n_shared_experts": 2}))

    oss = dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=6)
    add("gpt_oss_yarn", "gpt_oss", dense(**oss, rope_parameters={**YARN, "factor": 32.0, "truncate": False}))
    add("gpt_oss_default", "gpt_oss", dense(**oss, rope_parameters=dict(rope_type="default",
                                                                                                 rope_theta=10000.0)))
    mini = dict(num_local_experts=6, num_experts_per_tok=2, head_dim=8)
    add("minimax_m2_plain", "minimax_m2", dense(**mini))
    add("minimax_m2_partial", "minimax_m2", dense(**{**mini, "head_dim": 16}, rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)))

    mamba = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8, head_dim=8, num_heads=8, n_groups=2,
                 chunk_size=8, initializer_range=0.1)
    add("mamba2_plain", "mamba2", mamba)
    add("mamba2_bias", "mamba2", {**mamba, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True})
    add("mamba2_limits", "mamba2", {**mamba, "n_groups": 1, "conv_kernel": 3, "time_step_limit": (0.02, 0.06)})
    falcon = dense(mamba_d_ssm=48, mamba_n_heads=6, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=8)
    add("falcon_h1_plain", "falcon_h1", falcon)
    add("falcon_h1_scaled", "falcon_h1", {**falcon, "embedding_multiplier": 5.5, "lm_head_multiplier": 0.3,
                                          "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.3, "key_multiplier": 0.7,
                                          "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6,
                                          "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 0.9], "mlp_multipliers": [0.9, 0.4]})
    add("falcon_h1_norm", "falcon_h1", {**falcon, "mamba_rms_norm": True, "head_dim": 12, "tie_word_embeddings": True})
    add("falcon_h1_gate_first", "falcon_h1", {**falcon, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
                                              "mamba_conv_bias": False})
    hybrid = {key: value for key, value in dense().items() if key != "num_hidden_layers"}
    hybrid.update(head_dim=12, ssm_state_size=8, mamba_head_dim=8, mamba_num_heads=8, n_groups=2, chunk_size=8)
    add("nemotron_h_plain", "nemotron_h", {**hybrid, "layers_block_type": ["mamba", "mlp", "attention", "mamba"]})
    add("nemotron_h_groups", "nemotron_h", {**hybrid, "n_groups": 4, "conv_kernel": 2,
                                            "layers_block_type": ["attention", "mamba"]})
    add("mamba2_groups", "mamba2", {**mamba, "n_groups": 4, "head_dim": 16, "num_heads": 4, "state_size": 12, "conv_kernel": 2,
                                    "chunk_size": 7})
    add("mamba2_one_head", "mamba2", {**mamba, "n_groups": 1, "head_dim": 32, "num_heads": 1, "expand": 1, "use_bias": True})
    add("falcon_h1_one_kv_head", "falcon_h1", {**falcon, "num_key_value_heads": 1, "head_dim": 16, "mamba_n_groups": 3,
                                               "mamba_d_conv": 2})
    add("falcon_h1_bias", "falcon_h1", {**falcon, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})
    add("falcon_h1_expand", "falcon_h1", {**falcon, "mamba_d_ssm": None, "mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": 16,
                                          "rope_parameters": YARN, "time_step_limit": (0.01, 0.5)})
    add("nemotron_h_bias", "nemotron_h", {**hybrid, "mlp_bias": True, "layers_block_type": ["mlp", "mamba", "attention"]})
    add("nemotron_h_one_kv_head", "nemotron_h", {**hybrid, "num_key_value_heads": 1, "head_dim": 16, "n_groups": 1,
                                                 "mamba_head_dim": 16, "mamba_num_heads": 3, "use_conv_bias": False,
                                                 "time_step_min": 0.01, "hybrid_override_pattern": "M*-M"})
    add("nemotron_h_no_attention", "nemotron_h", {**hybrid, "layers_block_type": ["mamba", "mlp"], "conv_kernel": 3})

    following = dense(head_dim=8, num_experts=4, shared_expert_intermediate_size=32, num_hidden_layers=4, linear_key_head_dim=8,
                      linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4, **EXPERTS)
    add("qwen3_next_plain", "qwen3_next", following)
    add("qwen3_next_tied", "qwen3_next", {**following, "tie_word_embeddings": True, "norm_topk_prob": False,
                                          "linear_num_key_heads": 4, "linear_conv_kernel_dim": 2})
    add("qwen3_next_one_kv_head", "qwen3_next", {**following, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 1,
                                                 "linear_num_value_heads": 3, "linear_key_head_dim": 16, "num_hidden_layers": 2,
                                                 "layer_types": ["full_attention", "linear_attention"]})
    add("qwen3_next_dense_layers", "qwen3_next", {**following, "mlp_only_layers": [0, 3], "rope_parameters": {
        **YARN, "partial_rotary_factor": 0.5}})
    add("qwen3_next_step", "qwen3_next", {**following, "decoder_sparse_step": 2, "linear_key_head_dim": 6,
                                          "linear_value_head_dim": 6})
    add("qwen3_next_linear", "qwen3_next", {**following, "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2})
    add("qwen3_next_attention", "qwen3_next", {**following, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2})

    smol = dense(num_hidden_layers=4)
    add("smollm3_tied", "smollm3", smol)
    add("smollm3_untied", "smollm3", {**smol, "tie_word_embeddings": False, "num_key_value_heads": 1})
    add("smollm3_bias", "smollm3", {**smol, "attention_bias": True, "mlp_bias": True, "no_rope_layer_interval": 2})
    add("smollm3_listed", "smollm3", {**smol, "no_rope_layers": [0, 1, 1, 0], "rope_parameters": YARN})
    add("smollm3_window", "smollm3", {**smol, "use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [1, 0, 1, 0]})
    return result
