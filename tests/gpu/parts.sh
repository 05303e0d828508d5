#!/usr/bin/env bash
# The parts of tests/gpu/run.sh, run from an unpacked bundle. Each part prints a short verdict; the exit code counts failed parts.
set -uo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
OUT="${OUT:-$here/results}"
mkdir -p "$OUT"
rm -f "$OUT/medians.txt" "$OUT/peer.txt" "$OUT/ceiling.txt"
export PATH="$here/bin:$PATH" NCCL_NVLS_ENABLE=0 MB_TEST_DATA="$here/mlm"
libraries="$here/lib"
# The cuDNN and NCCL of a PyTorch installation are often newer than the system's.
for package in cudnn nccl; do
  for folder in /opt/torch/.venv/lib/python3*/site-packages/nvidia/$package/lib; do
    [ -d "$folder" ] && [ -z "${SYSTEM_CUDA:-}" ] && libraries="$folder:$libraries"
  done
done
# Only for our programs: the machine's own must keep their libraries.
run() { LD_LIBRARY_PATH="$libraries" "$@"; }
failed=0
verdict() { # verdict NAME STATUS
  if [ "$2" -eq 0 ]; then echo "PASS $1"; else echo "FAIL $1 (exit $2)"; failed=$((failed + 1)); fi
}

# service [DIR]: a coordinator of the calling shell, once. It listens on its local socket only: two of them may run.
service() {
  [ -n "${MBCTL_SERVER:-}" ] && return
  export MB_STATE_DIR="${1:-$here/state}"
  export MBCTL_SERVER="unix:$MB_STATE_DIR/coordinator.sock"
  mkdir -p "$MB_STATE_DIR"
  LD_LIBRARY_PATH="$libraries" setsid nohup mbcoordinator --state-dir "$MB_STATE_DIR" --listen "$MBCTL_SERVER" --metrics-listen none \
    >"$OUT/coordinator-$(basename "$MB_STATE_DIR").log" 2>&1 </dev/null &
  local coordinator=$!
  for _ in $(seq 100); do
    run mbctl admin info >/dev/null 2>&1 && return
    kill -0 "$coordinator" 2>/dev/null || break
    sleep 0.1
  done
  verdict "the coordinator's start" 1
  tail -n 20 "$OUT/coordinator-$(basename "$MB_STATE_DIR").log"
}

correlation=(model.num_layers=2 model.hidden_size=256 model.num_attention_heads=4 model.ffn_hidden_size=1024
  model.seq_length=512 dataset.seq_length=512 train.train_iters=10 train.global_batch_size=32 train.micro_batch_size=4
  validation.eval_interval=10 validation.eval_iters=2 optimizer.lr=3e-4 optimizer.min_lr=3e-5 rng.seed=1234 logger.log_interval=1)
second=(model.num_layers=4 model.hidden_size=256 model.num_attention_heads=4 model.ffn_hidden_size=1024
  model.seq_length=1024 dataset.seq_length=1024 train.train_iters=10 train.global_batch_size=16 train.micro_batch_size=2
  validation.eval_interval=10 validation.eval_iters=2 logger.log_interval=1)
llama=(model.num_layers=4 model.hidden_size=256 model.num_attention_heads=8 model.num_query_groups=2 model.ffn_hidden_size=704
  model.seq_length=512 model.normalization=RMSNorm model.position_embedding_type=rope model.rotary_base=500000
  model.gated_linear_unit=true model.activation_func=silu model.add_bias_linear=false
  model.share_embeddings_and_output_weights=false tokenizer.vocab_size=2047 train.train_iters=10 train.global_batch_size=16
  train.micro_batch_size=4 validation.eval_interval=10 validation.eval_iters=2 optimizer.lr=3e-4 optimizer.min_lr=3e-5
  rng.seed=1234 logger.log_interval=1)
no_dropout=(model.hidden_dropout=0 model.attention_dropout=0)
experts=(model.num_moe_experts=4 model.moe_router_topk=2 model.moe_aux_loss_coeff=0.01
  model.moe_router_load_balancing_type=aux_loss model.moe_ffn_hidden_size=352)

# compare ORACLE RANKS TOLERANCE GRAD-NORM-TOLERANCE OVERRIDE...: trains through coordinator and agent, then compares every
# iteration.
compare() {
  local oracle="$1" ranks="$2" tolerance="$3" norm_tolerance="$4" status=0
  shift 4
  service
  run mbctl submit --recipe vanilla_gpt_megatron_lm_config --device cuda --ranks "$ranks" --name "$oracle" --wait "$@" \
    >"$OUT/$oracle.log" 2>&1 || status=$?
  if [ "$status" -ne 0 ]; then
    tail -n 8 "$OUT/$oracle.log"
    run mbctl logs "$(run mbctl ps -a -o name --filter "run_name=$oracle" | head -n 1)" 2>&1 | tail -n 12
  else
    run mbctl compare "$(run mbctl ps -a -o name --filter "run_name=$oracle" | head -n 1)" "$here/mlm/${ORACLES:-losses.json}:$oracle" \
      --tolerance "$tolerance" --grad-norm-tolerance "$norm_tolerance" 2>&1 | tee -a "$OUT/$oracle.log" | tail -n 16 || status=$?
    grep -q "^verdict: equal" "$OUT/$oracle.log" || status=1  # "close" is up to twice the bound.
    awk -v name="$oracle" -v bound="${FIRST_ITERATION:-$tolerance}" '$1 == "1" && NF >= 5 { seen = 1; d = $4 < 0 ? -$4 : +$4 }
      END { if (seen && d <= bound) exit 0; print name ": iteration 1 is " d " apart, bound " bound; exit 1 }' "$OUT/$oracle.log" || status=1
  fi
  verdict "parity $oracle" "$status"
}

# The folder of transformers' fixtures. HF_FIXTURES: the archive tests/data/hf_fixtures.tar.xz, or the unpacked folder.
fixtures() {
  if [ -f "${HF_FIXTURES:-}" ] && [ ! -d "$here/hf" ]; then mkdir "$here/hf" && tar -C "$here/hf" -xJf "$HF_FIXTURES"; fi
  if [ -d "${HF_FIXTURES:-}" ]; then echo "$HF_FIXTURES"; else echo "$here/hf"; fi
}

# ran LOG: nothing but skipped tests is no success.
ran() { grep -q "PASSED.* [1-9][0-9]* test" "$1" && ! grep -q "no GPU on this machine" "$1"; }

ops() {
  for test in "$here"/tests/*_cuda_test; do
    local name status=0
    name="$(basename "$test")"
    [ -z "${GTEST_FILTER:-}" ] || echo "only GTEST_FILTER=$GTEST_FILTER"
    MB_HF_FIXTURES="$(fixtures)" MB_FAMILY_RESULTS="$OUT/families.tsv" run "$test" >"$OUT/$name.log" 2>&1 || status=$?
    grep -E "Failure|expected|is .*, expected|FAILED|PASSED|SKIPPED|error|terminate" "$OUT/$name.log" | head -n "${LINES_OF_FAILURE:-60}"
    ran "$OUT/$name.log" || status=1
    verdict "$name" "$status"
  done
}

# MEMCHECK: the test programs; all of them by default. SANITIZER: memcheck, or racecheck, synccheck, initcheck.
memcheck() {
  local sanitizer checked=0
  sanitizer="$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -n 1)"
  [ -n "$sanitizer" ] || { echo "no compute-sanitizer on this machine"; verdict memcheck 127; return; }
  for test in "$here"/tests/${MEMCHECK:-*_cuda_test}; do
    local status=0 name tests
    name="$(basename "$test")"
    tests="$(run "$test" --gtest_filter='*Small*' --gtest_list_tests 2>/dev/null | grep -c '^  ')"
    [ "$tests" -gt 0 ] || { echo "$name has no test for '*Small*'"; continue; }
    run timeout 150 "$sanitizer" --tool "${SANITIZER:-memcheck}" --error-exitcode 9 "$test" --gtest_filter='*Small*' >"$OUT/memcheck-$name.log" 2>&1 ||
      status=$?
    grep -E "(ERROR|RACECHECK) SUMMARY|Invalid|Failure|FAILED|PASSED" "$OUT/memcheck-$name.log" | head -n 12
    ran "$OUT/memcheck-$name.log" || status=1
    verdict "memcheck $name ($tests tests)" "$status"
    checked=$((checked + tests))
  done
  [ "$checked" -gt 0 ] || verdict "memcheck found tests" 1
}

parity() {
  compare seed1 1 1e-4 2e-3 "${correlation[@]}" "${no_dropout[@]}"
  compare seed1_default_dropout 1 1e-4 2e-3 "${correlation[@]}"
  FIRST_ITERATION=1e-4 compare llama_tiny 1 6e-4 1e-2 "${llama[@]}" "${no_dropout[@]}"
  # Its runs scatter with a standard deviation of 6e-4 (moe_scatter): this shows gross faults, moe_scatter compares the mean of eight.
  compare moe_tiny 1 2e-3 1.5e-2 "${llama[@]}" "${no_dropout[@]}" "${experts[@]}"
}

# scatter NAME OVERRIDE...: moe_tiny's model eight times. The standard deviation of the initial weights differs by up to 4e-6 of
# itself, which turns the rounding of up to 6e-4 of them and by itself moves no loss by 1e-5: the rest is what becomes of roundings.
# Prints mean and standard deviation of the runs' losses against Megatron-LM's.
scatter() {
  local name="$1" i NO_SAVE=yes runs=()
  shift
  for i in 0 1 2 3 4 5 6 7; do
    rm -f "$OUT/$name-$i.points"
    alone "$name-$i" vanilla_gpt_megatron_lm_config "${llama[@]}" "${no_dropout[@]}" "${experts[@]}" validation.eval_iters=0 "$@" \
      "model.init_method_std=0.0200000$i" >"$OUT/$name.out" || { cat "$OUT/$name.out"; return 1; }
    runs+=("$OUT/$name-$i.points")
  done
  { sed -n '/"moe_tiny": {/,/"grad_norm"/p' "$here/mlm/losses.json" | sed -n '/"lm_loss"/,/\]/p' | grep -oE '[0-9]+\.[0-9]+'
    for i in "${runs[@]}"; do echo run; grep -oE '"lmLoss":[0-9.e+-]+' "$i" | cut -d: -f2; done
  } | awk -v name="$name" '
    $1 == "run" { runs++; i = 0; next }
    runs == 0 { oracle[++n] = $1; next }
    { i++; d = $1 - oracle[i]; sum[i] += d; squares[i] += d * d; if (d < 0) d = -d; if (d > most[i]) most[i] = d }
    END {
      for (i = 1; i <= n; i++) {
        mean = sum[i] / runs; deviation = sqrt((squares[i] - runs * mean * mean) / (runs - 1)) + 1e-9
        away = mean < 0 ? -mean : mean
        if (away > 4 * deviation && away > 1e-4) bad++
        if (name != "all-experts" && deviation > 1.5e-3) bad++  # 6e-4 to 7e-4 were seen: more noise would hide a fault.
        printf "%s %2d: mean of %d runs minus Megatron-LM %+.1e, standard deviation %.1e, largest difference %.1e\n", name, i, runs,
          mean, deviation, most[i] }
      exit bad > 0 }'
}

# Whether moe_tiny's distance from Megatron-LM is the scatter of the run itself, of which its part of `parity` is one draw
# (docs/parity.md). Then without flash attention, and with all four experts for each token, where nothing is chosen.
moe_scatter() {
  local status=0
  scatter chosen || status=1
  scatter unfused model.attention_softmax_in_fp32=true || status=1
  scatter all-experts model.moe_router_topk=4 || true  # Another model: only its deviations say something.
  verdict moe_scatter "$status"
}

parity2() {
  service
  local status=0
  run mbctl submit --recipe vanilla_gpt_pretrain_config --device cuda --name second-example --wait \
    model.tensor_model_parallel_size=2 model.sequence_parallel=true "${second[@]}" scheduler.lr_warmup_iters=2 \
    scheduler.lr_decay_iters=10 >"$OUT/second.log" 2>&1 || status=$?
  tail -n 2 "$OUT/second.log"
  verdict "the documentation's second example on two GPUs" "$status"
  compare seed1_dp2 2 1e-4 2e-3 "${correlation[@]}" "${no_dropout[@]}"
  local b=("${second[@]}" tokenizer.vocab_size=1024 optimizer.lr=1e-4 optimizer.min_lr=0 "${no_dropout[@]}")
  compare seed2_dp2_distopt 2 1e-4 2e-3 "${b[@]}" ddp.use_distributed_optimizer=true
  compare seed2_tp2 2 2e-4 2e-3 "${b[@]}" model.tensor_model_parallel_size=2
  compare seed2_tp2_sp 2 2e-4 2e-3 "${b[@]}" model.tensor_model_parallel_size=2 model.sequence_parallel=true
  # Beside predictions: no real run is known, and no verdict hangs on them.
  local split=(model.tensor_model_parallel_size=2 model.sequence_parallel=true) before="$failed" ORACLES=predictions.json
  compare seed2_tp2_sp_default_dropout 2 2e-4 2e-3 "${second[@]}" tokenizer.vocab_size=1024 optimizer.lr=1e-4 optimizer.min_lr=0 "${split[@]}"
  compare seed1_tp2_sp_default_dropout 2 2e-4 2e-3 "${correlation[@]}" "${split[@]}"
  failed="$before"
}

# near BOUND NAME NAME: the losses of both runs' points.
near() {
  paste <(grep -oE '"lmLoss":[0-9.e+-]+' "$OUT/$2.points" | cut -d: -f2) <(grep -oE '"lmLoss":[0-9.e+-]+' "$OUT/$3.points" | cut -d: -f2) |
    awk -v bound="$1" -v names="$2 and $3" '{ d = $1 - $2; if (d < 0) d = -d; if (d > most) most = d; if (NF != 2) bad = 1 }
      END { printf "%s: %d losses, at most %.1e apart, bound %s\n", names, NR, most, bound; exit !(NR >= 6 && most <= bound && !bad) }'
}

# From one rank's checkpoint, two tensor-parallel ranks give the losses of the single rank.
resume2() {
  local status=0 kind precision bound checkpoint
  local shape=("${second[@]}" tokenizer.vocab_size=1024 optimizer.lr=1e-4 optimizer.min_lr=0 "${no_dropout[@]}" validation.eval_iters=0)
  for kind in bf16_mixed:1e-3 null:1e-5; do
    precision="${kind%:*}" bound="${kind#*:}"
    local all
    mapfile -t all < <(last "${shape[@]}" mixed_precision="$precision")
    alone "resume-$precision" vanilla_gpt_megatron_lm_config "${all[@]}" train.exit_interval=4 || status=1
    checkpoint="$(ls -d "$here/saved-resume-$precision"/step_*)"
    rm -f "$OUT/resume-$precision-"*.points
    bench "resume-$precision-one" vanilla_gpt_megatron_lm_config 1 --load "$checkpoint" --metrics "$OUT/resume-$precision-one.points" "${all[@]}"
    bench "resume-$precision-tp2" vanilla_gpt_megatron_lm_config 2 --load "$checkpoint" --metrics "$OUT/resume-$precision-tp2.points" \
      "${all[@]}" model.tensor_model_parallel_size=2 model.sequence_parallel=true
    near "$bound" "resume-$precision-one" "resume-$precision-tp2" || status=1
  done
  verdict "two ranks go on from one rank's checkpoint" "$status"
}

# Every family against transformers on the GPU.
families() {
  local status=0
  # The table of docs/models.md is not here: what a test sees goes into a file instead of being compared with it.
  MB_HF_FIXTURES="$(fixtures)" MB_FAMILY_RESULTS="$OUT/families.tsv" run "$here/tests/mb_engine_bridge_cuda_test" --gtest_filter='*LogitsLossAndGradients*' \
    >"$OUT/families.log" 2>&1 || status=$?
  grep -E ": loss |Failure|expected|FAILED|PASSED|SKIPPED" "$OUT/families.log" | head -n "${LINES_OF_FAILURE:-90}"
  grep -q ": loss " "$OUT/families.log" || status=1  # Nothing but skipped tests is no success.
  verdict families "$status"
}

# KERNELS: names of the benchmarks; all of them by default.
kernels() {
  local bench
  for bench in "$here"/tests/${KERNELS:-cuda_*_bench}; do
    local status=0
    run "$bench" 2>&1 | tee "$OUT/$(basename "$bench").log" || status=$?
    awk '/^(rms_norm|residual|layer_norm|swiglu|cross entropy|adam)/ { if ($(NF - 1) + 0 < 80) { print "below 80 % of the copy: " $0; low = 1 } }
      /^attention hq64/ { match($0, /forward +[0-9.]+/); f = substr($0, RSTART + 7) + 0; match($0, /backward +[0-9.]+/); b = substr($0, RSTART + 8) + 0
        if (f == 0 || f > 1.05 * 1.708 || b > 1.05 * 5.083) { print "more than 1.05 of the published attention: " $0; low = 1 } }
      END { exit low }' "$OUT/$(basename "$bench").log" || status=1
    verdict "$(basename "$bench")" "$status"
  done
  ceiling
}

# The rate of a long product on this card now, against which `median` puts the rates of a step.
product_ceiling() { run "$here/tests/cuda_gemm_bench" ceiling | tee "$OUT/ceiling.txt"; }

# median NAME LOG: of the iterations from the fourth on.
median() {
  local ceiling
  ceiling="$(sed -nE 's/^ceiling: ([0-9]+) .*/\1/p' "$OUT/ceiling.txt" 2>/dev/null)"
  grep -oE "iteration +[0-9]+/.*tokens/s: [0-9.]+" "$2" | awk -v name="$1" -v ceiling="${ceiling:-0}" '
    { match($0, /iteration \(ms\): [0-9.]+/); ms = substr($0, RSTART + 16, RLENGTH - 16)
      match($0, /GPU\): [0-9.]+/); tf = RSTART ? substr($0, RSTART + 6, RLENGTH - 6) : "-"
      match($0, /tokens\/s: [0-9.]+/); tok = substr($0, RSTART + 10, RLENGTH - 10)
      if (NR > 3) { n++; m[n] = ms + 0; t[n] = tok + 0; f[n] = tf } }
    END { if (!n) exit
      for (i = 1; i <= n; i++) for (j = i + 1; j <= n; j++) if (m[j] < m[i]) {
        x = m[i]; m[i] = m[j]; m[j] = x; x = t[i]; t[i] = t[j]; t[j] = x; x = f[i]; f[i] = f[j]; f[j] = x }
      k = int((n + 1) / 2)
      printf "OURS %s: median of %d iterations %.1f ms, %.0f tokens/s, %s TFLOP/s/GPU (%.0f %% of 989%s)\n", name, n, m[k], t[k], f[k],
        f[k] / 9.89, (ceiling > 0 ? sprintf(", %.0f %% of %d", 100 * f[k] / ceiling, ceiling) : "") }' | tee -a "$OUT/medians.txt"
}

# Of the rate at which the products and the attention of a 1B step alone would go, one after the other: where `kernels` and `train`
# are parts of one call, after the later one.
ceiling() {
  if [ ! -f "$OUT/cuda_gemm_bench.log" ] || ! grep -q "^OURS 1b-micro-1-" "$OUT/medians.txt" 2>/dev/null; then
    echo "SKIPPED 1b's share of its ceiling: wants the parts kernels and train in one call"
    return
  fi
  awk '/^1B: one after the other, first suggestions/ { match($0, /ms, [0-9.]+K/); limit += 1000 * (substr($0, RSTART + 4) + 0); limits++ }
    /^OURS 1b-micro-1-/ { match($0, /[0-9]+ tokens/); ours += substr($0, RSTART) + 0; turns++ }
    END { share = 100 * (ours / turns) / (limit / limits); printf "1b: %.1f %% of the ceiling of this call\n", share; exit !(share >= 92) }' \
    "$OUT/cuda_gemm_bench.log" "$OUT/medians.txt"
  verdict "1b has 92 % of its ceiling" $?
}

# planned LOG: the memory in use at the end is within 10 % of the plan.
planned() {
  grep "in use at the end" "$1" | awk '{ print; match($0, /\([-+0-9.]+ %\)/); off = substr($0, RSTART + 1) + 0; seen = 1
    if (off > 10 || off < -10) bad = 1 } END { if (!seen) print "no line about memory"; exit bad || !seen }'
}

# at_least NAME TOKENS: the median that `bench NAME` printed.
at_least() {
  local reached
  reached="$(grep -oE "^OURS $1: .* [0-9]+ tokens/s" "$OUT/medians.txt" | tail -n 1 | grep -oE "[0-9]+ tokens" | cut -d' ' -f1)"
  [ "${reached:-0}" -ge "$2" ]
  verdict "$1 reaches $2 tokens/s" $?
}

# bench NAME RECIPE RANKS OVERRIDE...: tokens/s of a recipe, median of its iterations.
bench() {
  local name="$1" recipe="$2" ranks="$3" status=0
  shift 3
  local processes=() rank
  mkdir -p "$here/meet-$name"
  for rank in $(seq 0 $((ranks - 1))); do
    CUDA_VISIBLE_DEVICES="$rank" LD_LIBRARY_PATH="$libraries" mbrank-cuda train --recipe "$recipe" --rank "$rank" --ranks "$ranks" \
      --rendezvous "$here/meet-$name" logger.log_interval=1 logger.log_throughput=true "$@" >"$OUT/bench-$name.$rank.log" 2>&1 &
    processes+=($!)
  done
  for rank in "${processes[@]}"; do wait "$rank" || status=$?; done
  median "$name" "$OUT/bench-$name.0.log"
  planned "$OUT/bench-$name.0.log" || status=1
  [ "$status" -eq 0 ] || tail -n 6 "$OUT/bench-$name.0.log"
  verdict "bench $name" "$status"
}

# last KEY=VALUE...: of the values of a key only the last, a line each.
last() {
  local -A value=()
  local keys=() word
  for word in "$@"; do
    [[ -v value[${word%%=*}] ]] || keys+=("${word%%=*}")
    value[${word%%=*}]="$word"
  done
  for word in "${keys[@]}"; do printf '%s\n' "${value[$word]}"; done
}

# alone NAME RECIPE OVERRIDE...: one rank by itself; log, points and checkpoints under $OUT/NAME.*
alone() {
  local name="$1" recipe="$2"
  shift 2
  local overrides save=(--save "$here/saved-$name")
  [ -z "${NO_SAVE:-}" ] || save=()
  mapfile -t overrides < <(last logger.log_throughput=true "$@" logger.log_interval=1)
  rm -rf "$here/saved-$name"
  run mbrank-cuda train --recipe "$recipe" --metrics "$OUT/$name.points" "${save[@]}" "${overrides[@]}" \
    >"$OUT/$name.log" 2>&1 || { echo "$name failed"; tail -n 5 "$OUT/$name.log"; return 1; }
  planned "$OUT/$name.log" || return 1
  median "$name" "$OUT/$name.log"
}
# Iteration, loss, gradient norm and loss scale of each point.
numbers() {
  grep -oE '"(step|lmLoss|gradNorm|lossScale|skippedIterations)":"?[^,"}]*' "$OUT/$1.points" | tr -d '"' |
    awk -F: '{ if ($1 == "step" && line) { print line; line = "" } line = line " " $1 "=" $2 } END { print line }'
}
# Digests of all that a run's checkpoints hold beside their manifests, which name the run.
digests() { [ ! -d "$here/saved-$1" ] || (cd "$here/saved-$1" && find . -type f ! -name '*.json' -exec sha256sum {} + | sort -k 2); }
# same NAME NAME: both runs' numbers and checkpoints are equal to the bit.
same() {
  cmp <(numbers "$1") <(numbers "$2") && cmp <(digests "$1") <(digests "$2") &&
    echo "$1 and $2: $(numbers "$1" | wc -l) points and $(digests "$1" | wc -l) files are equal to the bit; last$(numbers "$1" | tail -n 1)"
}

twenty=("${correlation[@]}" train.train_iters=20 validation.eval_iters=0)

# Two runs with model.deterministic_mode; beside them two without, which may differ.
determinism() {
  local status=0 shape=("${gpt2[@]}" "${no_dropout[@]}" train.global_batch_size=128 train.train_iters=8
    scheduler.lr_decay_iters=8)
  alone fixed-a vanilla_gpt_pretrain_config "${shape[@]}" model.deterministic_mode=true &&
    alone fixed-b vanilla_gpt_pretrain_config "${shape[@]}" model.deterministic_mode=true && same fixed-a fixed-b || status=1
  alone fixed-c vanilla_gpt_megatron_lm_config "${twenty[@]}" model.deterministic_mode=true &&
    alone fixed-d vanilla_gpt_megatron_lm_config "${twenty[@]}" model.deterministic_mode=true && same fixed-c fixed-d || status=1
  alone free-a vanilla_gpt_pretrain_config "${shape[@]}" && alone free-b vanilla_gpt_pretrain_config "${shape[@]}" &&
    { same free-a free-b || echo "without model.deterministic_mode two runs differ"; }
  verdict determinism "$status"
}

# FP16 with dynamic loss scaling beside BF16, from a scale that fits and from one that overflows at first.
fp16() {
  local status=0 shape=("${twenty[@]}" "${no_dropout[@]}")
  alone half vanilla_gpt_megatron_lm_config "${shape[@]}" mixed_precision=fp16_mixed optimizer.initial_loss_scale=1048576 &&
    alone half-high vanilla_gpt_megatron_lm_config "${shape[@]}" mixed_precision=fp16_mixed optimizer.initial_loss_scale=67108864 &&
    alone bfloat vanilla_gpt_megatron_lm_config "${shape[@]}" mixed_precision=bf16_mixed || status=1
  if [ "$status" -eq 0 ]; then
    paste -d ' ' <(numbers half | tail -n 1 | grep -oE 'lmLoss=[0-9.e+-]+' | cut -d= -f2) \
      <(numbers bfloat | tail -n 1 | grep -oE 'lmLoss=[0-9.e+-]+' | cut -d= -f2) |
      awk '{ d = $1 / $2 - 1; print "last loss, FP16 against BF16: " $1, $2, d; exit !(NF == 2 && d < 0.002 && d > -0.002) }' || status=1
    grep -oE '"(lossScale|skippedIterations)":"?[0-9.e+]+' "$OUT/half-high.points" | tr -d '"' |
      awk -F: '$1 == "skippedIterations" { skipped += $2 } $1 == "lossScale" { scale = $2 }
        END { print "from a scale of 67108864: " skipped + 0 " of 20 steps skipped, scale at the end " scale
          exit !(skipped >= 1 && skipped < 15 && scale > 0 && scale < 67108864) }' || status=1
  fi
  verdict fp16 "$status"
}

# recorded NAME: whether the run says that it has recorded a graph.
recorded() { grep -qE "^CUDA graph of .*forward and backward: [1-9][0-9]* nodes$" "$OUT/$1.log"; }

# CUDA graphs change times and no bit, with and without dropout.
graphs() {
  local status=0 kind
  for kind in none local full_iteration; do
    alone "drop-$kind" vanilla_gpt_megatron_lm_config "${twenty[@]}" model.cuda_graph_impl="$kind" || status=1
    alone "graph-$kind" vanilla_gpt_megatron_lm_config "${twenty[@]}" "${no_dropout[@]}" model.cuda_graph_impl="$kind" || status=1
  done
  for kind in local full_iteration; do
    same "drop-none" "drop-$kind" || status=1
    same "graph-none" "graph-$kind" || status=1
    recorded "drop-$kind" && recorded "graph-$kind" && ! recorded graph-none || { echo "$kind: no graph was recorded, or one too many"; status=1; }
  done
  # Rows of 2048 go through other kernels than those of 256.
  local wide=("${long[@]}" model.num_layers=2 train.train_iters=8 scheduler.lr_decay_iters=8 train.global_batch_size=2
    model.seq_length=2048 dataset.seq_length=2048 model.deterministic_mode=true) NO_SAVE=yes
  alone wide-none llama32_1b_pretrain_config "${wide[@]}" &&
    alone wide-local llama32_1b_pretrain_config "${wide[@]}" model.cuda_graph_impl=local && same wide-none wide-local && recorded wide-local || status=1
  verdict graphs "$status"
}

# Recomputation changes memory and times and no bit; the plan stays within 10 % of what the GPU uses.
recompute() {
  local NO_SAVE=yes  # 17 GB each.
  local status=0 shape=("${long[@]}" train.train_iters=5 scheduler.lr_decay_iters=5 train.global_batch_size=2
    model.deterministic_mode=true)
  alone keep llama32_1b_pretrain_config "${shape[@]}" || status=1
  alone again llama32_1b_pretrain_config "${shape[@]}" model.recompute_granularity=full model.recompute_method=uniform \
    model.recompute_num_layers=1 || status=1
  alone parts llama32_1b_pretrain_config "${shape[@]}" model.recompute_granularity=selective \
    "model.recompute_modules=[core_attn,mlp,layernorm]" || status=1
  alone pairs llama32_1b_pretrain_config "${shape[@]}" model.recompute_granularity=full model.recompute_method=uniform \
    model.recompute_num_layers=2 || status=1
  alone some llama32_1b_pretrain_config "${shape[@]}" model.recompute_granularity=full model.recompute_method=block \
    model.recompute_num_layers=10 || status=1
  same keep again && same keep parts && same keep pairs && same keep some || status=1
  verdict recompute "$status"
}

# ends_full NAME TEXT...: a 1B job on a GPU with 8 GiB free must fail with OUT_OF_MEMORY and these words.
ends_full() {
  local name="$1" status=0 begin=$SECONDS text
  shift
  run mbctl submit --recipe llama32_1b_pretrain_config --device cuda --name "$name" --max-restarts -1 --wait "${long[@]}" "${ten[@]}" \
    train.global_batch_size=8 >"$OUT/$name.log" 2>&1 && { echo "$name did not fail"; status=1; }
  run mbctl describe "$(run mbctl ps -a -o name --filter "run_name=$name" | head -n 1)" >"$OUT/$name.show" 2>&1
  echo "$name: ended after $((SECONDS - begin)) s"
  grep -iE "state|reason|detail" "$OUT/$name.show" | head -n 6 | cut -c1-700
  for text in FAILED OUT_OF_MEMORY "$@"; do
    grep -qF "$text" "$OUT/$name.show" || { echo "$name: no '$text' in its description"; status=1; }
  done
  return "$status"
}

# A job that is too large is refused with what would fit; a rank that finds the GPU full ends with that, one that meets the end of
# the memory in the middle with sizes and next step.
memory() {
  service
  local status=0 ballast
  run mbctl submit --recipe llama3_8b_pretrain_config --device cuda --name too-large "${long[@]}" train.global_batch_size=16 \
    train.train_iters=6 scheduler.lr_decay_iters=6 model.context_parallel_size=1 >"$OUT/too-large.log" 2>&1 && status=1
  tail -n 12 "$OUT/too-large.log"
  grep -q "What fits" "$OUT/too-large.log" || status=1
  run mbctl submit --recipe llama32_1b_pretrain_config --device cuda --dry-run "${long[@]}" "${ten[@]}" \
    train.global_batch_size=8 2>&1 | grep -A 9 "memory per rank" || status=1
  verdict "memory: too large" "$status"

  # The neighbour lives until its standard input, a pipe of this shell, is closed.
  status=0
  mkfifo "$here/ballast.in"
  LD_LIBRARY_PATH="$libraries" "$here/tests/cuda_ballast" 8192 <"$here/ballast.in" >"$OUT/ballast.log" 2>&1 &
  ballast=$!
  exec 9>"$here/ballast.in"
  for _ in $(seq 300); do grep -q "are free" "$OUT/ballast.log" && break; sleep 0.1; done
  cat "$OUT/ballast.log"
  grep -q "are free" "$OUT/ballast.log" || status=1
  ends_full full-at-the-start "a rank needs about" "MiB are there" "What fits" || status=1
  (
    exec 9>&-  # Or the coordinator would keep the pipe open.
    unset MBCTL_SERVER
    export MB_FAILPOINTS="memory.check=error:12"  # The rank does not look before it allocates.
    service "$here/state-full"
    code=0
    ends_full full-in-the-middle "cannot allocate" "MiB are free" "planned for this rank" "take a layout that needs less" || code=1
    run mbctl admin shutdown --yes >/dev/null 2>&1
    exit "$code"
  ) || status=1
  exec 9>&-
  wait "$ballast"
  rm -f "$here/ballast.in"
  verdict "memory: full" "$status"
}

# A rank of two is killed, then one is stopped: all ranks end within the watchdog time and the reason names the rank.
watchdog() {
  service
  local signal status=0 job victim begin overrides
  mapfile -t overrides < <(last "${correlation[@]}" train.train_iters=100000 validation.eval_iters=0 logger.log_interval=100 \
    dist.distributed_timeout_minutes=1)
  for signal in KILL STOP; do
    run mbctl submit --recipe vanilla_gpt_megatron_lm_config --device cuda --ranks 2 --name "watchdog-$signal" --max-restarts -1 \
      "${overrides[@]}" >"$OUT/watchdog-$signal.log" 2>&1 || { tail -n 5 "$OUT/watchdog-$signal.log"; status=1; }
    job="$(run mbctl ps -a -o name --filter "run_name=watchdog-$signal" | head -n 1)"
    for _ in $(seq 300); do run mbctl logs "$job" 2>/dev/null | grep -q "iteration  *100/\|iteration *100/" && break; sleep 0.2; done
    victim=""
    for process in /proc/[0-9]*; do
      tr '\0' ' ' <"$process/cmdline" 2>/dev/null | grep -q "^[^ ]*mbrank-cuda .*$job.*rank-1.spec" && victim="${process#/proc/}"
    done
    [ -n "$victim" ] || { echo "rank 1 of $job was not found"; status=1; continue; }
    begin=$SECONDS
    kill "-$signal" "$victim"
    for _ in $(seq 100); do run mbctl ps -a --filter "run_name=watchdog-$signal" 2>/dev/null | grep -qE "FAILED|CANCELLED|SUCCEEDED" && break; sleep 1; done
    run mbctl describe "$job" >"$OUT/watchdog-$signal.show" 2>&1
    echo "SIG$signal to rank 1: the job ended after $((SECONDS - begin)) s"
    grep -iE "state|reason|detail|rank 1" "$OUT/watchdog-$signal.show" | head -n 8
    grep -qE "^ *detail +rank 1: " "$OUT/watchdog-$signal.show" && [ $((SECONDS - begin)) -le 90 ] || status=1
    for process in /proc/[0-9]*; do
      tr '\0' ' ' <"$process/cmdline" 2>/dev/null | grep -q "^[^ ]*mbrank-cuda .*$job" && { echo "left over: $process"; status=1; }
    done
  done
  verdict watchdog "$status"
}

long=(model.seq_length=8192 dataset.seq_length=8192 train.micro_batch_size=1 validation.eval_iters=0
  scheduler.lr_warmup_iters=1 model.vocab_size=128256)
ten=(train.train_iters=10 scheduler.lr_decay_iters=10)
gpt2=(model.num_layers=12 model.hidden_size=768 model.num_attention_heads=12 model.ffn_hidden_size=3072 model.seq_length=1024
  dataset.seq_length=1024 train.micro_batch_size=64 train.global_batch_size=512 model.vocab_size=50304 train.train_iters=10
  validation.eval_iters=0 scheduler.lr_warmup_iters=1 scheduler.lr_decay_iters=10)

# Qwen2.5-0.5B from scratch, 524,288 tokens a step.
qwen_half=(model.num_layers=24 model.hidden_size=896 model.num_attention_heads=14 model.num_query_groups=2 model.kv_channels=64
  model.ffn_hidden_size=4864 model.vocab_size=151936 model.rotary_base=1000000 model.rope_scaling=false model.add_qkv_bias=true
  model.seq_length=1024 dataset.seq_length=1024 train.micro_batch_size=32 train.global_batch_size=512 validation.eval_iters=0
  scheduler.lr_warmup_iters=1 optimizer.use_precision_aware_optimizer=true optimizer.exp_avg_dtype=bf16
  optimizer.exp_avg_sq_dtype=bf16)

# In turn with PyTorch (torch_peer.py), each side with several micro-batches: the better mean of its turns counts.
train1b() {
  local turn micro shape peer=yes
  product_ceiling
  python3 -c 'import torch' 2>/dev/null || { peer=no; echo "SKIPPED 1b beside PyTorch: python3 here has no torch"; }
  for turn in $(seq "${TURNS:-2}"); do
    for micro in ${MICRO_BATCHES:-1 2 4}; do
      [ "$turn" -eq 1 ] || [ "$micro" -ne 4 ] || continue  # One turn shows whether it matters.
      mapfile -t shape < <(last "${long[@]}" "${ten[@]}" train.global_batch_size=8 train.micro_batch_size="$micro")
      bench "1b-micro-$micro-turn-$turn" llama32_1b_pretrain_config 1 "${shape[@]}"
      [ "$peer" = no ] || python3 "$here/torch_peer.py" --micro-batch "$micro" --micro-batches $((8 / micro)) 2>&1 | tail -n 1 | tee -a "$OUT/peer.txt"
    done
  done
  ceiling
  [ "$peer" = yes ] || return
  awk '/^OURS 1b-micro/ { match($0, /micro-[0-9]/); m = "OURS" substr($0, RSTART + 6, 1); match($0, /[0-9]+ tokens/); sum[m] += substr($0, RSTART) + 0; n[m]++ }
    /^PEER/ { match($0, /of [0-9]:/); m = "PEER" substr($0, RSTART + 3, 1); match($0, /[0-9]+ tokens/); sum[m] += substr($0, RSTART) + 0; n[m]++ }
    END {
      for (m in n) { side = substr(m, 1, 4); rate = sum[m] / n[m]; if (rate > best[side]) { best[side] = rate; micro[side] = substr(m, 5) } }
      for (m in n) if (m ~ /^OURS/ && n["PEER" substr(m, 5)] != n[m]) { print "PyTorch did not end in micro-batches of " substr(m, 5); exit 1 }
      printf "1b: %.0f tokens/s (micro-batch %s), PyTorch %.0f (%s), ratio %.3f\n", best["OURS"], micro["OURS"], best["PEER"], micro["PEER"],
        best["OURS"] / best["PEER"]
      exit !(best["OURS"] >= best["PEER"]) }' "$OUT/medians.txt" "$OUT/peer.txt"
  verdict "1b is as fast as PyTorch" $?
}

train() {
  train1b
  bench gpt2-124m vanilla_gpt_pretrain_config 1 "${gpt2[@]}" "${no_dropout[@]}"
  bench correlation vanilla_gpt_megatron_lm_config 1 "${correlation[@]}" "${no_dropout[@]}"
  bench qwen25-0.5b llama32_1b_pretrain_config 1 "${qwen_half[@]}" "${ten[@]}"
  at_least gpt2-124m 492000      # llm.c on such a card.
  at_least correlation 1366000   # 12 ms an iteration: a tenth of Megatron-LM's.
}

# bench8b NAME OVERRIDE...: the 8B model on one GPU.
bench8b() {
  local name="$1"
  shift
  bench "$name" llama3_8b_pretrain_config 1 "${long[@]}" train.global_batch_size=16 train.train_iters=6 scheduler.lr_decay_iters=6 \
    model.context_parallel_size=1 optimizer.use_precision_aware_optimizer=true optimizer.exp_avg_dtype=bf16 \
    optimizer.exp_avg_sq_dtype=bf16 "$@"
}

train8b() {
  product_ceiling
  bench8b 8b
  at_least 8b 11000
  train8b_fp8
  at_least 8b-fp8 14500
}

# With the preset's first and last layer in BF16, and with all layers in FP8.
train8b_fp8() {
  bench8b 8b-fp8 mixed_precision=bf16_with_fp8_current_scaling_mixed
  bench8b 8b-fp8-all-layers mixed_precision=bf16_with_fp8_current_scaling_mixed mixed_precision.first_last_layers_bf16=false
}

# losses LOG: iteration and loss of each line.
losses() {
  grep -oE "iteration +[0-9]+/.*lm loss: [-+.0-9eE]+" "$1" | sed -E 's#iteration +([0-9]+)/.*lm loss: ([-+.0-9eE]+)#\1 \2#' | sort -n
}

# gap NAME: of the losses in fp8-NAME.log to those in fp8-bf16.log, over the last 50 of the iterations.
gap() {
  join <(losses "$OUT/fp8-bf16.log" | sort -k 1b,1) <(losses "$OUT/fp8-$1.log" | sort -k 1b,1) | sort -n | awk -v name="$1" '
    { n++; wide[n] = $2; narrow[n] = $3 }
    END {
      if (n < 60) { printf "FP8 %s: only %d iterations in common\n", name, n; exit 1 }
      for (i = n - 49; i <= n; i++) { d = narrow[i] / wide[i] - 1; d = d < 0 ? -d : d; sum += d; if (d > most) most = d }
      printf "FP8 %s: BF16 fell %.3f nats to %.4f, FP8 ends at %.4f; gap of the last 50: mean %.3f %%, largest %.3f %%\n", name,
        wide[1] - wide[n], wide[n], narrow[n], 2 * sum, 100 * most
      exit !(wide[1] - wide[n] >= 2 && 2 * sum <= 1 && 100 * most <= 2) }'
}

# The 1B shape in BF16 and in FP8 on the same data. FP8_RECIPES: scalings; `-edges`, `-two`: that many first and last layers in BF16,
# `-whole`: none. FP8_LR: the learning rate; docs/benchmarks.md says which recipes keep the bound at which. Reports without a verdict
# on their gap: `-whole`, the emulated ones, and `bf16-again`, which starts from weights that differ by 1e-6 of themselves and shows
# what becomes of roundings in BF16 alone. FP8_BASE: empty where $OUT/fp8-bf16.log is there already.
fp8() {
  local rate="${FP8_LR:-5e-6}"
  local shape=(model.seq_length=2048 dataset.seq_length=2048 train.micro_batch_size=4 train.global_batch_size=8
    model.vocab_size=128256 train.train_iters=200 validation.eval_iters=0 scheduler.lr_warmup_iters=10 scheduler.lr_decay_iters=200
    optimizer.lr="$rate" optimizer.min_lr="$rate" logger.log_interval=1 logger.log_throughput=true)
  local name status layers
  for name in ${FP8_BASE-bf16} ${FP8_RECIPES:-current delayed-edges subchannel-edges}; do
    status=0 layers=()
    case "$name" in
      bf16) layers=(mixed_precision=bf16_mixed) ;;
      bf16-again) layers=(mixed_precision=bf16_mixed model.init_method_std=0.02000002) ;;
      mxfp8* | nvfp4*) layers=(mixed_precision="bf16_with_${name%%-*}_mixed") ;;
      *) layers=(mixed_precision="bf16_with_fp8_${name%%-*}_scaling_mixed") ;;
    esac
    case "$name" in
      *-edges) layers+=(mixed_precision.first_last_layers_bf16=true mixed_precision.num_layers_at_start_in_bf16=1
        mixed_precision.num_layers_at_end_in_bf16=1) ;;
      *-two) layers+=(mixed_precision.first_last_layers_bf16=true mixed_precision.num_layers_at_start_in_bf16=2
        mixed_precision.num_layers_at_end_in_bf16=2) ;;
      *-whole) layers+=(mixed_precision.first_last_layers_bf16=false) ;;
    esac
    run mbrank-cuda train --recipe llama32_1b_pretrain_config "${shape[@]}" "${layers[@]}" >"$OUT/fp8-$name.log" 2>&1 || status=$?
    median "1b-2048-$name" "$OUT/fp8-$name.log"
    [ "$status" -eq 0 ] || tail -n 6 "$OUT/fp8-$name.log"
    case "$name" in
      bf16) ;;
      *-whole | mxfp8* | nvfp4* | bf16-again) gap "$name" || true ;;
      *) [ "$status" -ne 0 ] || gap "$name" || status=$? ;;
    esac
    verdict "fp8 $name" "$status"
  done
}

narrow_optimizer=(optimizer.use_precision_aware_optimizer=true optimizer.exp_avg_dtype=bf16 optimizer.exp_avg_sq_dtype=bf16)
six=(train.train_iters=6 scheduler.lr_decay_iters=6 scheduler.lr_warmup_iters=1 validation.eval_iters=0)

# Query-key norms at full size.
qwen8b() {
  bench qwen3-8b qwen3_8b_pretrain_config 1 "${six[@]}" train.global_batch_size=8 "${narrow_optimizer[@]}" \
    tokenizer.tokenizer_type=NullTokenizer tokenizer.tokenizer_model=null tokenizer.vocab_size=151936
}

# Experts and latent attention: DeepSeek-V2-Lite's shape, of twelve layers on one GPU, then whole on two.
deepseek=(model.expert_model_parallel_size=1 train.micro_batch_size=1 model.vocab_size=102400)
moe() {
  bench moe deepseek_v2_lite_pretrain_config 1 "${six[@]}" "${deepseek[@]}" "${narrow_optimizer[@]}" model.num_layers=12 \
    'model.moe_layer_freq=[0,1,1,1,1,1,1,1,1,1,1,1]' train.global_batch_size=8 \
    model.recompute_granularity=null model.recompute_method=null model.recompute_num_layers=null
}
moe2() {
  bench moe-tp2 deepseek_v2_lite_pretrain_config 2 "${six[@]}" "${deepseek[@]}" "${narrow_optimizer[@]}" \
    train.global_batch_size=8 model.tensor_model_parallel_size=2 model.sequence_parallel=true \
    model.recompute_granularity=null model.recompute_method=null model.recompute_num_layers=null
  bench moe-dp2 deepseek_v2_lite_pretrain_config 2 "${six[@]}" "${deepseek[@]}" "${narrow_optimizer[@]}" \
    train.global_batch_size=16 ddp.use_distributed_optimizer=true
}

# profiled NAME RECIPE OVERRIDE...: where the time of an iteration goes, by operator.
profiled() {
  local name="$1" recipe="$2" status=0
  shift 2
  run mbrank-cuda train --profile-operators --recipe "$recipe" logger.log_interval=1 logger.log_throughput=true "$@" \
    train.train_iters=6 scheduler.lr_decay_iters=6 >"$OUT/profile-$name.log" 2>&1 || status=$?
  sed -n '/^operator profile/,$p' "$OUT/profile-$name.log" | cut -c1-150
  [ "$status" -eq 0 ] || tail -n 6 "$OUT/profile-$name.log"
  verdict "profile $name" "$status"
}

profile() {
  profiled 1b llama32_1b_pretrain_config "${long[@]}" train.global_batch_size=8
  profiled 8b llama3_8b_pretrain_config "${long[@]}" train.global_batch_size=4 model.context_parallel_size=1 \
    optimizer.use_precision_aware_optimizer=true optimizer.exp_avg_dtype=bf16 optimizer.exp_avg_sq_dtype=bf16
}

profile_moe() {
  profiled moe deepseek_v2_lite_pretrain_config "${deepseek[@]}" "${narrow_optimizer[@]}" model.num_layers=12 validation.eval_iters=0 \
    scheduler.lr_warmup_iters=1 'model.moe_layer_freq=[0,1,1,1,1,1,1,1,1,1,1,1]' train.global_batch_size=4 \
    model.recompute_granularity=null model.recompute_method=null model.recompute_num_layers=null
}

# The same rows with cuBLASLt's first suggestions and with timed choices, in turn.
tuning() {
  local choices="$OUT/gemm-choices.txt" turn
  for turn in 1 2; do
    bench "1b-first-$turn" llama32_1b_pretrain_config 1 "${long[@]}" "${ten[@]}" train.global_batch_size=8
    MB_TIME_GEMMS="$choices" bench "1b-timed-$turn" llama32_1b_pretrain_config 1 "${long[@]}" "${ten[@]}" train.global_batch_size=8
  done
}

# share NAME BASE LEAST: of twice the tokens/s of BASE.
share() {
  awk -v name="$1" -v base="$2" -v least="$3" '$2 == name ":" { match($0, /[0-9]+ tokens/); two = substr($0, RSTART) + 0 }
    $2 == base ":" { match($0, /[0-9]+ tokens/); one = substr($0, RSTART) + 0 }
    END { if (!one) exit 1; printf "%s: %.3f of twice %s\n", name, two / one / 2, base; exit !(two / one / 2 >= least) }' "$OUT/medians.txt"
  verdict "$1 reaches $3 of twice one GPU" $?
}

train2() {
  product_ceiling
  bench 1b-one llama32_1b_pretrain_config 1 "${long[@]}" "${ten[@]}" train.global_batch_size=8
  bench 1b-dp2 llama32_1b_pretrain_config 2 "${long[@]}" "${ten[@]}" train.global_batch_size=16
  share 1b-dp2 1b-one 0.95
  local shape=("${long[@]}" train.global_batch_size=8 train.train_iters=6 scheduler.lr_decay_iters=6 model.context_parallel_size=1
    "${narrow_optimizer[@]}")
  bench 8b-one llama3_8b_pretrain_config 1 "${shape[@]}"
  bench 8b-tp2 llama3_8b_pretrain_config 2 "${shape[@]}" model.tensor_model_parallel_size=2 model.sequence_parallel=true
  share 8b-tp2 8b-one 0.80
}

# A report without a bound: how far FP8 is from BF16 in PyTorch, with the same shape, data and rates.
fp8_torch() {
  local status=0
  python3 "$here/fp8_in_torch.py" ${FP8_RUNS:-bf16 whole edges} --rate ${FP8_LR:-5e-6} >"$OUT/fp8_in_torch.log" 2>&1 || status=$?
  grep -E "nats|gap|Error" "$OUT/fp8_in_torch.log"
  verdict fp8_torch "$status"
}

# The 1B model on two GPUs with one microbatch an iteration, where the traffic between them weighs most: with and without overlap,
# each with the replicated and the sharded optimizer. Times change and no bit does.
overlap() {
  local status=0 sharded on name
  for sharded in false true; do
    for on in false true; do
      name="overlap-sharded-$sharded-on-$on"
      bench "$name" llama32_1b_pretrain_config 2 --metrics "$OUT/$name.points" "${long[@]}" "${ten[@]}" train.global_batch_size=2 \
        model.deterministic_mode=true ddp.use_distributed_optimizer="$sharded" optimizer.use_distributed_optimizer="$sharded" \
        ddp.overlap_grad_reduce="$on" ddp.overlap_param_gather="$on"
      grep "data parallelism" "$OUT/bench-$name.0.log"
    done
    same "overlap-sharded-$sharded-on-false" "overlap-sharded-$sharded-on-true" || status=1
  done
  same overlap-sharded-false-on-false overlap-sharded-true-on-false || status=1
  verdict overlap "$status"
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader
for part in "$@"; do
  begin=$SECONDS
  "$part"
  echo "== $part: $((SECONDS - begin)) s"
  [ $((SECONDS - begin)) -le 480 ] || verdict "$part within 8 minutes" 1
done
[ -z "${MBCTL_SERVER:-}" ] || run mbctl admin shutdown --yes >/dev/null 2>&1
# Machines that return few files: one archive in place of the logs.
if [ -n "${MB_PACK_LOGS:-}" ]; then
  tar -C "$OUT" -czf "$here/logs.tar.gz" . && rm -rf "${OUT:?}"/* && mv "$here/logs.tar.gz" "$OUT/"
fi
echo "failed parts: $failed"
exit "$failed"
