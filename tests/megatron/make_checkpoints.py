"""Makes small checkpoints with the real megatron-core: its layouts, several parallel sizes.

    python3 make_checkpoints.py OUT [MODEL...]        needs torch (CPU), safetensors and megatron-core

OUT/<model>/<layout> is what Megatron-LM's training would save: torch_dist; torch_dist_apart, with each layer and expert under
its own name (metadata singleton_local_shards); torch. OUT/<model>/whole.safetensors has the whole tensors, which megatron-core
itself put together when it loaded torch_dist into one rank, OUT/<model>/logits.safetensors what it then computes.
tests/data/megatron.tar.xz has such checkpoints of gpt, llama and tied.
"""

import argparse
import contextlib
import os
import shutil
import socket
import sys
import types
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Small functions, for which it would start a compiler.

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file

BASE = dict(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, seq_length=16,
            max_position_embeddings=16, padded_vocab_size=64, normalization="LayerNorm", swiglu=False,
            add_bias_linear=True, add_qkv_bias=False, position_embedding_type="learned_absolute", qk_layernorm=False,
            untie_embeddings_and_output_weights=False, group_query_attention=False, num_query_groups=1, kv_channels=None,
            num_experts=None, moe_layer_freq=1, moe_ffn_hidden_size=None, norm_epsilon=1e-5, bias_gelu_fusion=False,
            bias_swiglu_fusion=False, rotary_percent=1.0, rotary_base=10000, init_method_std=0.02, hidden_dropout=0.0,
            attention_dropout=0.0)
LLAMA = dict(BASE, normalization="RMSNorm", swiglu=True, add_bias_linear=False, position_embedding_type="rope",
             untie_embeddings_and_output_weights=True, group_query_attention=True, num_query_groups=2)
MOE = dict(LLAMA, qk_layernorm=True, kv_channels=16, num_experts=4, moe_ffn_hidden_size=24, moe_router_topk=2,
           moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01, moe_router_score_function="softmax",
           moe_router_pre_softmax=False, moe_router_dtype="fp32")
MLA = dict(MOE, num_layers=3, kv_channels=None, group_query_attention=False, num_query_groups=1, multi_latent_attention=True,
           q_lora_rank=12, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8, rope_type="yarn",
           rotary_scaling_factor=4.0, original_max_position_embeddings=8, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
           mscale_all_dim=0.5, moe_layer_freq=[0, 1, 1], moe_shared_expert_intermediate_size=24,
           moe_router_load_balancing_type="seq_aux_loss", moe_router_score_function="sigmoid", moe_router_num_groups=2,
           moe_router_group_topk=1, moe_router_topk_scaling_factor=2.5, moe_router_enable_expert_bias=True)
MODELS = {
    "gpt": (dict(BASE), dict(tp=1, pp=1, ep=1), torch.float32),
    "llama": (dict(LLAMA, num_layers=4), dict(tp=2, pp=2, ep=1), torch.bfloat16),
    "tied": (dict(BASE, bias_gelu_fusion=True), dict(tp=1, pp=2, ep=1), torch.float32),
    "moe": (dict(MOE), dict(tp=2, pp=1, ep=2), torch.bfloat16),
    "grouped": (dict(MOE, moe_grouped_gemm=True, moe_use_legacy_grouped_gemm=True), dict(tp=1, pp=1, ep=2), torch.float32),
    "mla": (dict(MLA), dict(tp=1, pp=1, ep=2), torch.float32),
}
# Arguments that are fields of TransformerConfig by the same name.
SAME_NAMES = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "normalization", "add_bias_linear",
              "add_qkv_bias", "qk_layernorm", "moe_layer_freq", "moe_router_topk", "moe_router_load_balancing_type",
              "moe_aux_loss_coeff", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_dtype",
              "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor",
              "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size", "moe_grouped_gemm",
              "moe_use_legacy_grouped_gemm", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
              "v_head_dim", "rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast",
              "beta_slow", "mscale", "mscale_all_dim")


def layouts(name):
    """Legacy files of grouped experts are not read."""
    return ("torch_dist", "torch_dist_apart") if name == "grouped" else ("torch_dist", "torch_dist_apart", "torch")


def one_by_one(model):
    """The same model without grouped experts; its tensors have the same names and shapes on disk."""
    return dict(model, moe_grouped_gemm=False, moe_use_legacy_grouped_gemm=False)


def build(model, dtype):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core import parallel_state
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    latent, experts = model.get("multi_latent_attention", False), model["num_experts"]
    fields = {name: model[name] for name in SAME_NAMES if model.get(name) is not None}
    if experts:
        fields.update(num_moe_experts=experts, moe_ffn_hidden_size=model["moe_ffn_hidden_size"])
    if latent:
        fields.update(rotary_base=model["rotary_base"], rotary_percent=model["rotary_percent"])
    else:
        fields.update(kv_channels=model["kv_channels"],
                      num_query_groups=model["num_query_groups"] if model["group_query_attention"] else None)
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **fields, layernorm_epsilon=model["norm_epsilon"], gated_linear_unit=model["swiglu"],
        activation_func=torch.nn.functional.silu if model["swiglu"] else torch.nn.functional.gelu,
        bias_activation_fusion=model["bias_swiglu_fusion" if model["swiglu"] else "bias_gelu_fusion"],
        use_cpu_initialization=True, params_dtype=dtype, bf16=dtype == torch.bfloat16, pipeline_dtype=dtype,
        hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size())
    if experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=model["normalization"])
        for layer in spec.layer_specs if latent else ():
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
    else:
        spec = get_gpt_layer_local_spec(normalization=model["normalization"], qk_layernorm=model["qk_layernorm"])
    return GPTModel(config=config, transformer_layer_spec=spec, vocab_size=model["padded_vocab_size"],
                    max_sequence_length=model["max_position_embeddings"], parallel_output=False,
                    pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
                    share_embeddings_and_output_weights=not model["untie_embeddings_and_output_weights"],
                    position_embedding_type=model["position_embedding_type"], rotary_percent=model["rotary_percent"],
                    rotary_base=model["rotary_base"])


class CausalAttention(torch.nn.Module):
    """Latent attention's scores and sums, which has no weights: megatron-core leaves them to Transformer Engine."""

    def __init__(self, softmax_scale, **_):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_, **__):
        heads_first = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, scale=self.scale)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def multiply_groups(rows, weights, counts, trans_b=False):
    """What the kernels of the package grouped_gemm compute, which need a GPU."""
    parts = torch.split(rows, counts.tolist())
    return torch.cat([part @ (weight.t() if trans_b else weight) for part, weight in zip(parts, weights)])


def start(rank, world, port, sizes):
    """One rank; megatron-core calls CUDA here and there whether there is a GPU or not."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(sizes["tp"], sizes["pp"], expert_model_parallel_size=sizes["ep"],
                                             expert_tensor_parallel_size=sizes["tp"])
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()  # There is no dropout.
    multi_latent_attention.HAVE_TE = False  # It takes its own wrappers for Transformer Engine.
    moe_utils.te_general_gemm = None
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
    grouped_gemm_util.ops = types.SimpleNamespace(gmm=multiply_groups)
    torch.manual_seed(1)


def run_ranks(function, world, *arguments):
    """function(rank, world, port, *arguments) in processes that have everything imported already."""
    mp.start_processes(function, (world, free_port(), *arguments), nprocs=world, start_method="fork")


def common_state(model, sizes):
    names = dict(model, tensor_model_parallel_size=sizes["tp"], pipeline_model_parallel_size=sizes["pp"],
                 expert_model_parallel_size=sizes["ep"], expert_tensor_parallel_size=sizes["tp"], iteration=0,
                 params_dtype=torch.bfloat16, bf16=True, consumed_train_samples=80, vocab_size=60)
    return {"args": argparse.Namespace(**names), "checkpoint_version": 3.0, "iteration": 10}


def weights_of(gpt):
    """Parameters and the buffers that are saved, by name."""
    return {key: value for key, value in gpt.state_dict().items() if isinstance(value, torch.Tensor)}


def draw_weights(gpt, sizes, seed):
    """Replicas are alike, as in training: what has no axis over ranks, and what only expert-parallel ranks have parts of."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in weights_of(gpt).items():
            near = 1.0 if "norm" in key and key.endswith("weight") else 0.0
            value.copy_((near + torch.randn(value.shape, generator=generator) * (0.1 if near else 0.3)).to(value.dtype))
    split = {key for key, value in gpt.named_parameters() if getattr(value, "tensor_model_parallel", False)}
    for key, value in weights_of(gpt).items():
        of_expert = ".experts." in key
        if key not in split and not of_expert:
            dist.broadcast(value.data, parallel_state.get_tensor_model_parallel_src_rank(),
                           group=parallel_state.get_tensor_model_parallel_group())
        if sizes["ep"] > 1 and not of_expert:
            dist.broadcast(value.data, parallel_state.get_data_parallel_src_rank(), group=parallel_state.get_data_parallel_group())


def save_rank(rank, world, port, out, name):
    from megatron.core import dist_checkpointing, parallel_state

    model, sizes, dtype = MODELS[name]
    start(rank, world, port, sizes)
    gpt = build(model, dtype)
    draw_weights(gpt, sizes, 100 + rank)
    for layout in layouts(name):
        folder = f"{out}/{name}/{layout}/iter_0000010"
        if rank == 0:
            os.makedirs(folder)
        dist.barrier()
        if layout == "torch":
            tp, pp, ep = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank(),
                          parallel_state.get_expert_model_parallel_rank())
            ranks = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if sizes["pp"] > 1 else "") + (f"_{ep:03d}" if sizes["ep"] > 1 else "")
            os.makedirs(f"{folder}/{ranks}")
            torch.save(dict(common_state(model, sizes), model=gpt.state_dict_for_save_checkpoint()),
                       f"{folder}/{ranks}/model_optim_rng.pt")
        else:
            content = dict(singleton_local_shards=layout == "torch_dist_apart")
            state = dict(common_state(model, sizes), **gpt.sharded_state_dict(metadata=dict(content)))
            dist_checkpointing.save(state, folder, content_metadata=content)
        if rank == 0:
            with open(f"{out}/{name}/{layout}/latest_checkpointed_iteration.txt", "w") as file:
                file.write("10")
    dist.barrier()
    dist.destroy_process_group()


def logits_of(gpt, model):
    """Token ids and their logits [b, s, padded vocabulary] in fp32, as `mbrank convert verify --logits` takes them."""
    wide = build(model, torch.float32).eval()
    wide.load_state_dict(gpt.state_dict())
    length = model["seq_length"]
    ids = torch.randint(60, (2, length), generator=torch.Generator().manual_seed(7))
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    with torch.no_grad():
        logits = wide(ids, torch.arange(length).expand(2, -1), mask)
    return {"input_ids": ids, "logits": logits.contiguous()}


def load_whole(rank, world, port, out, name):
    from megatron.core import dist_checkpointing

    model, dtype = one_by_one(MODELS[name][0]), MODELS[name][2]
    start(rank, world, port, dict(tp=1, pp=1, ep=1))
    gpt = build(model, dtype)
    gpt.load_state_dict(dist_checkpointing.load(gpt.sharded_state_dict(), f"{out}/{name}/torch_dist/iter_0000010"), strict=False)
    save_file({key: value.clone().contiguous() for key, value in weights_of(gpt).items()}, f"{out}/{name}/whole.safetensors")
    save_file(logits_of(gpt, model), f"{out}/{name}/logits.safetensors")
    dist.destroy_process_group()


def make(out, name):
    sizes = MODELS[name][1]
    shutil.rmtree(f"{out}/{name}", ignore_errors=True)
    run_ranks(save_rank, sizes["tp"] * sizes["pp"] * sizes["ep"], out, name)
    run_ranks(load_whole, 1, out, name)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main():
    out = sys.argv[1]
    import megatron.core.models.gpt  # So that it is imported once.
    for name in sys.argv[2:] or MODELS:
        make(out, name)
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
