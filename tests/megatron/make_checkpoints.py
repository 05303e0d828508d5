"""Makes small checkpoints with the real megatron-core: both layouts, several parallel sizes.

    python3 make_checkpoints.py OUT        needs torch (CPU) and megatron-core

OUT/<model>/torch_dist and OUT/<model>/torch are what Megatron-LM's training would save; OUT/<model>/whole.safetensors has the
whole tensors, which megatron-core itself put together when it loaded torch_dist into one rank. tests/data/megatron.tar.xz is
one result (xz of a tar of OUT).
"""

import argparse
import os
import shutil
import socket
import sys
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file

BASE = dict(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, seq_length=16,
            max_position_embeddings=16, padded_vocab_size=64, normalization="LayerNorm", swiglu=False,
            add_bias_linear=True, add_qkv_bias=False, position_embedding_type="learned_absolute", qk_layernorm=False,
            untie_embeddings_and_output_weights=False, group_query_attention=False, num_query_groups=1, kv_channels=None,
            num_experts=None, moe_layer_freq=1, moe_ffn_hidden_size=None, norm_epsilon=1e-5,
            rotary_percent=1.0, rotary_base=10000, init_method_std=0.02, hidden_dropout=0.0, attention_dropout=0.0)
LLAMA = dict(BASE, normalization="RMSNorm", swiglu=True, add_bias_linear=False, position_embedding_type="rope",
             untie_embeddings_and_output_weights=True, group_query_attention=True, num_query_groups=2)
MODELS = {
    "gpt": (dict(BASE), dict(tp=1, pp=1, ep=1), torch.float32),
    "llama": (dict(LLAMA, num_layers=4), dict(tp=2, pp=2, ep=1), torch.bfloat16),
    "tied": (dict(BASE, num_layers=2), dict(tp=1, pp=2, ep=1), torch.float32),
}


def build(model, dtype):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=model["num_layers"], hidden_size=model["hidden_size"], num_attention_heads=model["num_attention_heads"],
        num_query_groups=model["num_query_groups"] if model["group_query_attention"] else None,
        ffn_hidden_size=model["ffn_hidden_size"], normalization=model["normalization"],
        gated_linear_unit=model["swiglu"], activation_func=torch.nn.functional.silu if model["swiglu"] else torch.nn.functional.gelu,
        add_bias_linear=model["add_bias_linear"], use_cpu_initialization=True, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype, hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False, persist_layer_norm=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size())
    spec = get_gpt_layer_local_spec(normalization=model["normalization"])
    return GPTModel(config=config, transformer_layer_spec=spec, vocab_size=model["padded_vocab_size"],
                    max_sequence_length=model["max_position_embeddings"],
                    pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
                    share_embeddings_and_output_weights=not model["untie_embeddings_and_output_weights"],
                    position_embedding_type=model["position_embedding_type"])


def start(rank, world, port, sizes):
    from megatron.core import parallel_state
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(sizes["tp"], sizes["pp"], expert_model_parallel_size=sizes["ep"],
                                             expert_tensor_parallel_size=sizes["tp"])
    torch.cuda.synchronize = lambda *_: None  # megatron-core calls these whether there is a GPU or not.
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.manual_seed(1)


def common_state(model, sizes):
    names = dict(model, tensor_model_parallel_size=sizes["tp"], pipeline_model_parallel_size=sizes["pp"],
                 expert_model_parallel_size=sizes["ep"], expert_tensor_parallel_size=sizes["tp"], iteration=0,
                 params_dtype=torch.bfloat16, bf16=True, consumed_train_samples=80, vocab_size=60)
    return {"args": argparse.Namespace(**names), "checkpoint_version": 3.0, "iteration": 10}


def save_rank(rank, world, port, out, name):
    from megatron.core import dist_checkpointing, parallel_state

    model, sizes, dtype = MODELS[name]
    start(rank, world, port, sizes)
    gpt = build(model, dtype)
    generator = torch.Generator().manual_seed(100 + rank)
    with torch.no_grad():
        for key, value in gpt.named_parameters():
            value.copy_(torch.randn(value.shape, generator=generator).to(value.dtype))
    # Replicas are alike, as in training: what has no axis over tensor-parallel or expert-parallel ranks.
    for key, value in gpt.named_parameters():
        if not getattr(value, "tensor_model_parallel", False):
            dist.broadcast(value.data, parallel_state.get_tensor_model_parallel_src_rank(),
                           group=parallel_state.get_tensor_model_parallel_group())
        if "experts.local" not in key and sizes["ep"] > 1:
            dist.broadcast(value.data, 0)
    folder = f"{out}/{name}/torch_dist/iter_0000010"
    if rank == 0:
        os.makedirs(folder)
    dist.barrier()
    state = dict(common_state(model, sizes), model=gpt.sharded_state_dict())
    state.update(state.pop("model"))
    dist_checkpointing.save(state, folder)
    tp, pp, ep = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank(),
                  parallel_state.get_expert_model_parallel_rank())
    ranks = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if sizes["pp"] > 1 else "") + (f"_{ep:03d}" if sizes["ep"] > 1 else "")
    legacy = f"{out}/{name}/torch/iter_0000010/{ranks}"
    os.makedirs(legacy, exist_ok=True)
    torch.save(dict(common_state(model, sizes), model=gpt.state_dict_for_save_checkpoint()), f"{legacy}/model_optim_rng.pt")
    if rank == 0:
        for layout in ("torch_dist", "torch"):
            with open(f"{out}/{name}/{layout}/latest_checkpointed_iteration.txt", "w") as file:
                file.write("10")
    dist.barrier()
    dist.destroy_process_group()


def load_whole(rank, world, port, out, name):
    from megatron.core import dist_checkpointing

    model, _, dtype = MODELS[name]
    start(rank, world, port, dict(tp=1, pp=1, ep=1))
    gpt = build(model, dtype)
    loaded = dist_checkpointing.load(gpt.sharded_state_dict(), f"{out}/{name}/torch_dist/iter_0000010")
    gpt.load_state_dict({key: value for key, value in loaded.items() if key in gpt.state_dict()}, strict=False)
    save_file({key: value.clone().contiguous() for key, value in gpt.named_parameters()}, f"{out}/{name}/whole.safetensors")
    dist.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main():
    out = sys.argv[1]
    for name in sys.argv[2:] or MODELS:
        sizes = MODELS[name][1]
        world = sizes["tp"] * sizes["pp"] * sizes["ep"]
        shutil.rmtree(f"{out}/{name}", ignore_errors=True)
        mp.spawn(save_rank, (world, free_port(), out, name), nprocs=world)
        mp.spawn(load_whole, (1, free_port(), out, name), nprocs=1)
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
