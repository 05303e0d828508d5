"""Checks against the real libraries: checkpoints that mbrank writes load in torch and in megatron-core.

    python3 check_checkpoints.py --build BUILD_DIR        needs torch (CPU), safetensors and megatron-core

For each model of make_checkpoints.py: a checkpoint that megatron-core writes is imported and exported again by mbrank; every
tensor of the export is read with torch.distributed.checkpoint, and megatron-core loads it (all keys must be there) into models of
one rank and of two tensor-parallel ranks: the same weights to the last bit. Closes with 'N passed, N failed'.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import traceback

import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file

import make_checkpoints as make


def mbrank(build, *arguments):
    done = subprocess.run([os.path.join(build, "bin", "mbrank"), "convert", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"mbrank convert {' '.join(arguments)}: {done.stderr[-1500:]}"


def check_torch(folder, whole):
    """Every tensor through torch alone: stacked layers are those of `whole`."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state = {key: torch.empty(value.size, dtype=value.properties.dtype) for key, value in metadata.state_dict_metadata.items()
             if hasattr(value, "properties")}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for key in ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight"):
        assert torch.equal(state[key], whole[key]), key
    proj = "self_attention.linear_proj.weight"
    layers = [value for key, value in whole.items() if key.endswith(proj)]
    stacked = state.get(f"decoder.layers.{proj}")
    for i, layer in enumerate(layers):
        assert torch.equal(stacked[i] if stacked is not None else state[f"decoder.layers.{i}.{proj}"], layer), f"{proj} {i}"


def load_rank(rank, world, port, folder, name, whole_path, result):
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling

    model, _, dtype = make.MODELS[name]
    make.start(rank, world, port, dict(tp=world, pp=1, ep=1))
    gpt = make.build(model, dtype)
    sharded = gpt.sharded_state_dict()
    # Returned apart: keys of the files that the model lacks, and keys of the model that the files lack.
    loaded, left, lacking = dist_checkpointing.load(sharded, folder, strict=StrictHandling.RETURN_ALL)
    assert not lacking, f"megatron-core asks for {sorted(lacking)[:5]}"
    tensors = [key for key in left if "_extra_state" not in key and "layernorm" not in key and "layer_norm" not in key and key != "common_state"]
    assert not tensors, f"megatron-core does not know {sorted(tensors)[:5]}"
    assert loaded["args"].num_layers == model["num_layers"] and loaded["checkpoint_version"] == 3.0
    gpt.load_state_dict({key: value for key, value in loaded.items() if key in gpt.state_dict()}, strict=False)
    whole = load_file(whole_path)
    for key, value in gpt.named_parameters():
        expected = whole[key]
        axis = getattr(value, "partition_dim", -1) if getattr(value, "tensor_model_parallel", False) else -1
        if world > 1 and axis >= 0 and expected.shape != value.shape:
            halves = expected.chunk(2) if "linear_fc1" in key and model["swiglu"] else [expected]
            expected = torch.cat([half.chunk(world, dim=axis)[rank] for half in halves])
        assert torch.equal(value, expected), f"{key} differs"
    if rank == 0:
        with open(result, "w") as file:
            file.write("same")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def check(build, work, name):
    make_in = os.path.join(work, "theirs")
    _, sizes, _ = make.MODELS[name]
    world = sizes["tp"] * sizes["pp"] * sizes["ep"]
    mp.spawn(make.save_rank, (world, make.free_port(), make_in, name), nprocs=world)
    mp.spawn(make.load_whole, (1, make.free_port(), make_in, name), nprocs=1)
    whole = os.path.join(make_in, name, "whole.safetensors")
    for layout in ("torch_dist", "torch"):
        ours, out = os.path.join(work, f"{name}-{layout}"), os.path.join(work, f"{name}-{layout}-out")
        mbrank(build, "import", "--megatron", os.path.join(make_in, name, layout), "--to", ours)
        mbrank(build, "export", "--from", ours, "--megatron", out)
    folder = os.path.join(out, "release")
    check_torch(folder, load_file(whole))
    for ranks in (1, 2):
        result = os.path.join(work, f"{name}-{ranks}")
        mp.spawn(load_rank, (ranks, make.free_port(), folder, name, whole, result), nprocs=ranks)
        assert os.path.exists(result)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", required=True, help="build folder with bin/mbrank")
    parser.add_argument("models", nargs="*", default=list(make.MODELS), help="of make_checkpoints.py; default: all")
    options = parser.parse_args()
    work = tempfile.mkdtemp(prefix="mb_megatron_")
    passed = failed = 0
    try:
        for name in options.models or make.MODELS:
            try:
                check(os.path.abspath(options.build), work, name)
                passed += 1
                print(f"{name}: same weights in torch and megatron-core", flush=True)
            except Exception:  # Whatever is wrong with one model: the others are checked all the same.
                failed += 1
                print(f"FAILED {name}:\n{traceback.format_exc()[-3000:]}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
