"""Checks against the real libraries: checkpoints of megatron-core in, checkpoints of ours out.

    python3 check_checkpoints.py --build BUILD_DIR [MODEL...]        needs torch (CPU), safetensors and megatron-core

For each model of make_checkpoints.py, which megatron-core saves in several layouts: mbrank imports each layout, with the same
bits, and computes megatron-core's logits to 1e-5 of the largest. What mbrank exports again, torch reads by itself, and
megatron-core loads it strictly into models of several parallel sizes: the same bits as from its own checkpoint, and the same
logits to the last bit. Closes with 'N passed, N failed'.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

import make_checkpoints as make

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

# Parallel sizes of the models that load an export.
LOADING = (dict(tp=1, pp=1, ep=1), dict(tp=2, pp=1, ep=1), dict(tp=1, pp=2, ep=1))
LOADING_EXPERTS = dict(tp=1, pp=1, ep=2)
MOST_APART = 1e-5  # Logits in FP32, which are summed up in another order.


def mbrank(build, *arguments):
    done = subprocess.run([os.path.join(build, "bin", "mbrank"), "convert", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"mbrank convert {' '.join(arguments)}: {done.stdout[-500:]}{done.stderr[-1500:]}"
    return done.stdout


def logits_apart(build, ours, theirs, logits):
    """Largest difference of the logits as a share of the largest, after the weights were found to be the same."""
    told = mbrank(build, "verify", "--from", ours, "--megatron", theirs, "--logits", logits)
    apart = float(re.search(r"logits differ by (\S+) of the largest: equal bit for bit", told).group(1))
    assert apart < MOST_APART, told
    return apart


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


def load(model, dtype, folder):
    """megatron-core's model with the weights of the folder, and the keys of the folder that it did not ask for."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    gpt = make.build(model, dtype)
    with torch.no_grad():
        for value in make.weights_of(gpt).values():
            value.fill_(float("nan"))
    # Returned apart: keys of the files that the model lacks, and keys of the model that the files lack.
    loaded, left, lacking = dist_checkpointing.load(gpt.sharded_state_dict(), folder, strict=StrictHandling.RETURN_ALL)
    assert not lacking, f"megatron-core asks for {sorted(lacking)[:5]}"
    assert loaded["args"].num_layers == model["num_layers"] and loaded["checkpoint_version"] == 3.0
    gpt.load_state_dict({key: value for key, value in loaded.items() if key in gpt.state_dict()}, strict=True)
    return gpt, left


def compare_rank(rank, world, port, sizes, name, theirs, ours, logits):
    model, _, dtype = make.MODELS[name]
    make.start(rank, world, port, sizes)
    expected, usual = load(model, dtype, theirs)
    gpt, left = load(model, dtype, ours)
    # Written for other readers: Transformer Engine's empty states and names of norms, the run's state where later versions look.
    others = ("_extra_state", "layernorm.", "layer_norm_", "common_state")
    unknown = [key for key in set(left) - set(usual) if not any(part in key for part in others)]
    assert not unknown, f"megatron-core does not know {sorted(unknown)[:5]}"
    weights = make.weights_of(gpt)
    for key, value in make.weights_of(expected).items():
        assert torch.equal(weights[key], value), f"{key} differs"
    if world == 1:
        # Grouped experts compute in BF16 only, the same weights one by one in FP32 too.
        gpt, _ = load(make.one_by_one(model), dtype, ours)
        assert torch.equal(make.logits_of(gpt, make.one_by_one(model))["logits"], load_file(logits)["logits"]), "other logits"
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def check(build, work, name):
    folder = os.path.join(work, name)
    make.make(work, name)
    whole, logits = os.path.join(folder, "whole.safetensors"), os.path.join(folder, "logits.safetensors")
    apart = []
    for layout in make.layouts(name):
        ours = os.path.join(folder, f"{layout}-imported")
        mbrank(build, "import", "--megatron", os.path.join(folder, layout), "--to", ours)
        for other in (layout, "torch_dist"):
            apart.append(logits_apart(build, ours, os.path.join(folder, other), logits))
    out = os.path.join(folder, "exported")
    mbrank(build, "export", "--from", ours, "--megatron", out)
    apart.append(logits_apart(build, ours, out, logits))
    check_torch(os.path.join(out, "release"), load_file(whole))
    loading = LOADING + ((LOADING_EXPERTS,) if make.MODELS[name][0]["num_experts"] else ())
    loading = [sizes for sizes in loading if make.MODELS[name][0]["num_layers"] % sizes["pp"] == 0]
    for sizes in loading:
        make.run_ranks(compare_rank, sizes["tp"] * sizes["pp"] * sizes["ep"], sizes, name,
                       os.path.join(folder, "torch_dist", "iter_0000010"), os.path.join(out, "release"), logits)
    shown = ", ".join("x".join(str(sizes[axis]) for axis in ("tp", "pp", "ep")) for sizes in (make.MODELS[name][1], *loading))
    return f"layouts {', '.join(make.layouts(name))}; TPxPPxEP {shown}: equal bit for bit; logits within {max(apart):.1e}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", required=True, help="build folder with bin/mbrank")
    parser.add_argument("models", nargs="*", default=list(make.MODELS), help="of make_checkpoints.py; default: all")
    options = parser.parse_args()
    import megatron.core.models.gpt  # So that it is imported once, not by each rank.
    print(f"torch {torch.__version__}, megatron-core {megatron.core.__version__}, Python {sys.version.split()[0]}", flush=True)
    begin = time.monotonic()
    work = tempfile.mkdtemp(prefix="mb_megatron_")
    passed = failed = 0
    try:
        for name in options.models or make.MODELS:
            try:
                told = check(os.path.abspath(options.build), work, name)
                passed += 1
                print(f"{name}: {told}", flush=True)
            except Exception:  # Whatever is wrong with one model: the others are checked all the same.
                failed += 1
                print(f"FAILED {name}:\n{traceback.format_exc()[-3000:]}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"{passed} passed, {failed} failed in {time.monotonic() - begin:.0f} s")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
