#!/usr/bin/env bash
# One command from a fresh Debian 12 machine to a trained model: installs packages, builds, starts the service on this
# machine, trains a small GPT with Megatron-LM's own settings and compares the losses with Megatron-LM's. Safe to repeat.
#
#   bash deploy/quickstart.sh [--no-packages]
#   MB_STATE_DIR=DIR   where the service keeps jobs and checkpoints
#                      (default: /var/lib/mbridge for root, else ~/.local/state/mbridge)
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

case "${1:-}" in
  -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  '' | --no-packages) ;;
  *) fail "unknown option $1; --help lists them" ;;
esac

say "1/4 packages and build"
if [ "${1:-}" != --no-packages ]; then
  install_packages "$MB_ROOT/deploy/packages.txt" "$MB_ROOT/deploy/packages-test.txt"
fi
drop_sudo "$MB_ROOT/deploy/quickstart.sh" --no-packages
build programs
export PATH="$MB_BUILD/bin:$PATH"

if [ -z "${MB_STATE_DIR:-}" ]; then
  if [ "$(id -u)" -eq 0 ]; then
    MB_STATE_DIR=/var/lib/mbridge
  else
    MB_STATE_DIR="${XDG_STATE_HOME:-$HOME/.local/state}/mbridge"
  fi
fi
export MB_STATE_DIR
export MBCTL_SERVER="${MBCTL_SERVER:-unix:$MB_STATE_DIR/coordinator.sock}"

say "2/4 service in $MB_STATE_DIR"
if mbctl admin info >/dev/null 2>&1; then
  say "a coordinator is running already"
else
  mkdir -p "$MB_STATE_DIR"
  log="$MB_STATE_DIR/coordinator.log"
  setsid nohup mbcoordinator --state-dir "$MB_STATE_DIR" >>"$log" 2>&1 </dev/null &
  coordinator=$!
  for _ in $(seq 150); do
    mbctl admin info >/dev/null 2>&1 && break
    kill -0 "$coordinator" 2>/dev/null || { tail -n 20 "$log" >&2; fail "the coordinator did not start; its log is $log"; }
    sleep 0.2
  done
  mbctl admin info >/dev/null || { tail -n 20 "$log" >&2; fail "the coordinator does not answer; its log is $log"; }
  say "mbcoordinator runs (process $coordinator, log $log)"
fi

say "3/4 training: 2 layers, hidden size 256, 10 iterations, as in Megatron-LM's correlation run (a few minutes on 2 cores)"
run="quickstart-$(date +%Y%m%d-%H%M%S)"
mbctl submit --recipe vanilla_gpt_megatron_lm_config --name "$run" --follow \
  model.num_layers=2 model.hidden_size=256 model.num_attention_heads=4 model.ffn_hidden_size=1024 \
  model.seq_length=512 dataset.seq_length=512 \
  train.train_iters=10 train.global_batch_size=32 train.micro_batch_size=4 \
  validation.eval_interval=10 validation.eval_iters=2 \
  optimizer.lr=3e-4 optimizer.min_lr=3e-5 rng.seed=1234 logger.log_interval=1 ||
  fail "the job did not succeed (exit code $?); mbctl ps -a and mbctl describe JOB say more"
job="$(mbctl ps -a -o name --filter "run_name=$run" | head -n 1)"

say "4/4 our losses beside Megatron-LM's (one H200, PyTorch; tests/data/mlm)"
verdict=0
mbctl compare "$job" "$MB_ROOT/tests/data/mlm/losses.json:seed1_default_dropout" || verdict=$?

cat <<TEXT

Try next (the service keeps running; \`mbctl admin shutdown\` ends it):

  export PATH=$MB_BUILD/bin:\$PATH MB_STATE_DIR=$MB_STATE_DIR

  mbctl submit --recipe vanilla_gpt_pretrain_config --follow \\
    model.num_layers=2 model.hidden_size=256 model.num_attention_heads=4 model.ffn_hidden_size=1024 \\
    model.seq_length=512 dataset.seq_length=512 \\
    train.train_iters=10 train.global_batch_size=32 train.micro_batch_size=4 \\
    validation.eval_interval=10 validation.eval_iters=2 \\
    optimizer.lr=3e-4 optimizer.min_lr=3e-5 scheduler.lr_warmup_iters=1 scheduler.lr_decay_iters=10 \\
    rng.seed=1234 logger.log_interval=1

  mbctl metrics $job          # the loss as a table; --plot draws it

  mbctl translate --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 512 \\
    --max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 32 --lr 3e-4 --train-iters 10 --bf16 \\
    --tokenizer-type NullTokenizer --vocab-size 32000
TEXT
exit "$verdict"
