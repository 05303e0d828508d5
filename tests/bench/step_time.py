"""Time of a whole training step, ours against PyTorch, same model, same CPU, alternating in the same run.

  python3 tests/bench/step_time.py [--build build] [--rounds 3] [--iters 4] [--threads N] [--python /usr/bin/python3]
                                   [--min-speedup X] [--json FILE]

Model: 2 layers, hidden 256, 4 heads, sequence 512, vocabulary 32000, micro batch 4, global batch 32, dropout 0.1 (the
correlation run). The figure of a side is the median over all measured steps of all rounds. Ends with 1 where ours is
slower than --min-speedup times the peer.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date

LAYERS, HIDDEN, HEADS, FFN, SEQ, VOCAB, MBS, GBS = 2, 256, 4, 1024, 512, 32000, 4, 32
# Megatron's formula, docs/benchmarks.md: forward and backward, causal attention, multiply and add counted apart.
FLOPS_PER_TOKEN = 6 * LAYERS * (4 * HIDDEN * HIDDEN + HIDDEN * SEQ) + 6 * HIDDEN * 2 * FFN * LAYERS + 6 * HIDDEN * VOCAB
FLOPS_PER_STEP = FLOPS_PER_TOKEN * SEQ * GBS


def ours(arguments, precision, directory):
    """Milliseconds of each step after the first."""
    metrics = os.path.join(directory, "metrics.jsonl")
    if os.path.exists(metrics):
        os.remove(metrics)
    iterations = arguments.iters + 1
    command = [os.path.join(arguments.build, "bin", "mbrank"), "train", "--recipe", "vanilla_gpt_megatron_lm_config",
               "--metrics", metrics, "--threads", str(arguments.threads),
               f"model.num_layers={LAYERS}", f"model.hidden_size={HIDDEN}", f"model.num_attention_heads={HEADS}",
               f"model.ffn_hidden_size={FFN}", f"model.seq_length={SEQ}", f"dataset.seq_length={SEQ}",
               f"train.train_iters={iterations}", f"train.global_batch_size={GBS}", f"train.micro_batch_size={MBS}",
               "validation.eval_iters=0", "optimizer.lr=3e-4", "optimizer.min_lr=3e-5", "rng.seed=1234",
               "logger.log_interval=1", f"mixed_precision={precision}"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{run.stdout}{run.stderr}exit code {run.returncode}")
    points = [json.loads(line) for line in open(metrics)]
    return [p["elapsedMsPerIteration"] / 1e3 for p in points if p.get("kind", "METRIC_KIND_TRAIN") == "METRIC_KIND_TRAIN"][1:]


def peer(arguments):
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    environment["OMP_WAIT_POLICY"] = "passive"  # As mbrank: a spinning barrier stalls for minutes where another process runs.
    command = [arguments.python, os.path.join(os.path.dirname(__file__), "peer_torch.py"), "--threads", str(arguments.threads),
               "--iters", str(arguments.iters)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{run.stdout}{run.stderr}(Debian: apt-get install python3-torch)")
    result = json.loads(run.stdout.splitlines()[-1])
    return result["seconds"], result["torch"]


def cpu_name():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build", default=os.path.join(os.path.dirname(__file__), "..", "..", "build"))
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--iters", type=int, default=4)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--python", default="/usr/bin/python3", help="an interpreter with torch")
    p.add_argument("--min-speedup", type=float, default=0.0)
    p.add_argument("--json", help="write the result to this file too")
    a = p.parse_args()

    matmul = json.loads(subprocess.run([os.path.join(a.build, "tests", "matmul_rate"), str(MBS * SEQ), str(HIDDEN), str(FFN), str(VOCAB)],
                                       capture_output=True, text=True, check=True,
                                       env={**os.environ, "OMP_NUM_THREADS": str(a.threads)}).stdout)
    seconds = {"ours, bf16_mixed": [], "ours, fp32": [], "PyTorch, fp32": []}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(a.rounds):
            seconds["ours, bf16_mixed"] += ours(a, "bf16_mixed", directory)
            times, version = peer(a)
            seconds["PyTorch, fp32"] += times
            seconds["ours, fp32"] += ours(a, "fp32", directory)

    median = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{date.today()}  {cpu_name()}, {a.threads} threads, PyTorch {version}; {FLOPS_PER_STEP / 1e9:.0f} GFLOP a step; "
          f"oneDNN f32 matrix products {matmul['mean']:.0f} GFLOP/s")
    print(f"{'':18} {'s/step':>8} {'min':>8} {'max':>8} {'GFLOP/s':>8} {'of oneDNN':>9} {'speed-up':>8}")
    for name, time in median.items():
        rate = FLOPS_PER_STEP / time / 1e9
        print(f"{name:18} {time:8.3f} {min(seconds[name]):8.3f} {max(seconds[name]):8.3f} {rate:8.1f} {rate / matmul['mean']:9.0%} "
              f"{median['PyTorch, fp32'] / time:8.2f}")
    if a.json:
        with open(a.json, "w") as file:
            json.dump({"cpu": cpu_name(), "threads": a.threads, "torch": version, "flops": FLOPS_PER_STEP, "matmul": matmul, "seconds": seconds},
                      file, indent=1)
    speedup = median["PyTorch, fp32"] / median["ours, bf16_mixed"]  # The run of the documentation.
    sys.exit(0 if speedup >= a.min_speedup else 1)


main()
