"""Conversions against the real libraries: fresh random models of `transformers` in, models of ours out.

    python3 real_libraries.py --build BUILD_DIR [--only REGEX] [--keep DIR]

For each configuration of cases.py: transformers saves a random model; the fixture tests read it and compare logits, loss and
every gradient with those of transformers; `mbrank` imports and exports it; transformers loads the export without a word that it
would not say about the source, and computes the same logits to the last bit. Then models are trained here for some steps,
exported, and computed by both. Closes with 'N passed, N failed'.
"""

import argparse
import contextlib
import filecmp
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file, save_file

import cases as tables
import fresh_models as fresh

TRAINED = ["llama_llama3", "gpt2_tied", "qwen3_moe_normed", "deepseek_v2_yarn_mscale", "gemma2_caps", "mamba2_limits",
           "falcon_h1_scaled", "nemotron_h_plain", "qwen3_next_plain", "smollm3_bias"]
TRAINING_STEPS = 4


class Checks:
    """Results by name of the model."""

    def __init__(self):
        self.passed, self.failed = 0, 0

    def run(self, name, step):
        try:
            step()
        except Exception as error:  # Whatever is wrong with one model: the others are checked all the same.
            self.failed += 1
            text = str(error).strip() if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            print(f"FAILED {name}: {text}", flush=True)
            return
        self.passed += 1


def mbrank(build, *arguments):
    program = os.path.join(build, "bin", "mbrank")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"mbrank {' '.join(arguments)}: exit code {done.returncode}: {done.stderr[-1500:]}"
    return done.stdout


def load_with_remarks(directory, **options):
    """The model, and what transformers says while it loads it."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            model, info = fresh.load(directory, output_loading_info=True, **options)
    finally:
        logger.removeHandler(handler)
    wrong = {key: sorted(value) for key, value in info.items() if value and key.endswith("_keys")}
    assert not wrong, f"{directory}: {wrong}"
    remarks = {line.replace(directory, "DIRECTORY") for line in text.getvalue().splitlines()}
    return model.eval(), remarks


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.contiguous()


def check_round_trip(build, work, source):
    name = os.path.basename(source)
    checkpoint, exported = os.path.join(work, "checkpoints", name), os.path.join(work, "exported", name)
    mbrank(build, "convert", "import", "--hf", source, "--to", checkpoint)
    mbrank(build, "convert", "verify", "--from", checkpoint, "--hf", source)
    mbrank(build, "convert", "export", "--from", checkpoint, "--hf", exported)
    with open(os.path.join(source, "config.json")) as file:
        quantised = "quantization_config" in json.load(file)
    for file in sorted(os.listdir(source)):
        if file == "reference.safetensors" or file.endswith(".safetensors") or (file == "config.json" and quantised):
            continue
        same = filecmp.cmp(os.path.join(source, file), os.path.join(exported, file), shallow=False)
        assert same, f"{file} of the export is another"
    before, remarks = load_with_remarks(source)
    after, later_remarks = load_with_remarks(exported)
    if not quantised:
        assert later_remarks <= remarks, f"transformers says: {later_remarks - remarks}"
    ids = fresh.tokens(before.config, 11)
    before_logits, after_logits = logits_of(before, ids), logits_of(after, ids)
    if quantised:  # Exported as BF16, to which the products of values and scales were rounded.
        difference = (before_logits - after_logits).abs().max() / before_logits.abs().max()
        assert difference < 2e-2, f"logits differ by {difference:.1e}"
    else:
        assert torch.equal(before_logits, after_logits), "other logits after import and export"
        old, new = load_file(f"{source}/model.safetensors"), load_file(f"{exported}/model.safetensors")
        skipped = set(old) - set(new)
        assert all(key.endswith(".attn.bias") for key in skipped) and set(new) <= set(old), f"tensors differ: {skipped}"
        for key, value in new.items():
            assert value.dtype == old[key].dtype and torch.equal(value, old[key]), f"{key} is another"


def check_trained(build, work, source):
    """Trained here from an imported model; transformers computes the export as the engine computes the checkpoint."""
    name = os.path.basename(source)
    folder = os.path.join(work, "trained", name)
    os.makedirs(folder)
    imported = os.path.join(folder, "imported")
    mbrank(build, "convert", "import", "--hf", source, "--to", imported)
    recipe = mbrank(build, "convert", "recipe", "--hf", source)
    config = os.path.join(folder, "config.yaml")
    with open(config, "w") as file:
        file.write(recipe)
    steps = str(TRAINING_STEPS)
    base = re.search(r"^base: (\S+)$", recipe, re.MULTILINE).group(1)
    mbrank(build, "train", "--recipe", base, "--config", config, "--load", imported, "--weights-only", "--save",
           os.path.join(folder, "run"), "--device", "cpu", "--threads", "1", f"train.train_iters={steps}",
           "train.global_batch_size=2", "train.micro_batch_size=2", "optimizer.lr=1e-2", "optimizer.min_lr=1e-3",
           "scheduler.lr_warmup_iters=0", f"checkpoint.save_interval={steps}", "mixed_precision=fp32",
           "validation.eval_iters=0", "logger.log_interval=1")
    trained = os.path.join(folder, "run", f"step_{TRAINING_STEPS:08d}")
    exported = os.path.join(folder, "exported")
    mbrank(build, "convert", "export", "--from", trained, "--hf", exported, "--like", imported)
    model, _ = load_with_remarks(exported)
    original, _ = load_with_remarks(source)
    ids = fresh.tokens(model.config, 12)
    logits = logits_of(model, ids)
    moved = (logits - logits_of(original, ids)).abs().max()
    assert moved > 1e-2, f"training changed the logits by {moved:.1e} only"
    reference = os.path.join(folder, "logits.safetensors")
    save_file({"input_ids": ids, "logits": logits}, reference)
    mbrank(build, "convert", "verify", "--from", trained, "--hf", exported, "--logits", reference)


def check_tokenizer(build, work, source):
    """A tokenizer travels with the model and works as before."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["to be or not to be", "that is the question"], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
                                                chat_template="{{ messages[0]['content'] }}")
    copy = os.path.join(work, "with_tokenizer")
    shutil.copytree(source, copy)
    fast.save_pretrained(copy)
    exported = os.path.join(work, "with_tokenizer_exported")
    mbrank(build, "convert", "import", "--hf", copy, "--to", os.path.join(work, "with_tokenizer_checkpoint"))
    mbrank(build, "convert", "export", "--from", os.path.join(work, "with_tokenizer_checkpoint"), "--hf", exported)
    again = transformers.AutoTokenizer.from_pretrained(exported)
    text = "not to question that"
    assert again(text)["input_ids"] == fast(text)["input_ids"], "other tokens"
    assert again.chat_template == fast.chat_template, "other chat template"
    assert set(os.listdir(exported)) == set(os.listdir(copy)) - {"reference.safetensors"}, "other files"


def check_published(name, model):
    """The parameters that transformers makes of a published config.json; real_models_test.cc has the same counts."""
    with tempfile.TemporaryDirectory() as folder:
        ours = {"auto_map", "quantization_config"}  # Code and forms of weights, which are not there.
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump({key: value for key, value in model["config"].items() if key not in ours}, file)
        config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    skeleton.tie_weights()
    count = sum(value.numel() for value in skeleton.parameters())
    assert count == model["parameters"], f"{name} has {count} parameters in transformers, {model['parameters']} in our table"


def run_fixture_tests(build, models):
    """One line a test of the models: name -> passed."""
    program = os.path.join(build, "tests", "mb_engine_bridge_test")
    environment = {**os.environ, "MB_HF_MODELS": models}
    done = subprocess.run([program, "--gtest_filter=Fresh/*", "--gtest_color=no"], capture_output=True, text=True,
                          env=environment, timeout=1200)
    verdicts = re.findall(r"^\[ +(OK|FAILED) +\] Fresh/(\S+?),? (?:\(|where)", done.stdout, re.MULTILINE)
    results = {name: verdict == "OK" for verdict, name in verdicts}
    if done.returncode != 0:
        print(done.stdout[-20000:])
        assert done.returncode == 1, f"{program} ended with {done.returncode}: {done.stderr[-2000:]}"
    for line in re.findall(r"^\w+: loss .*worst gradient.*$", done.stdout, re.MULTILINE):
        print("  " + line)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", required=True, help="build folder with bin/mbrank and tests/mb_engine_bridge_test")
    parser.add_argument("--only", default="", help="models whose name this regular expression finds")
    parser.add_argument("--keep", help="work in this new directory and keep it")
    options = parser.parse_args()
    build = os.path.abspath(options.build)
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_warning()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    work = os.path.abspath(options.keep) if options.keep else tempfile.mkdtemp(prefix="mb_hf_")
    models = os.path.join(work, "models")
    os.makedirs(models)
    checks = Checks()
    begin = time.monotonic()

    def told(what):
        print(f"{what}: {time.monotonic() - begin:.0f} s", flush=True)

    try:
        wanted = re.compile(options.only)
        makers = [(name, lambda d, a=a, t=t, i=i, n=name: fresh.make(d, n, t, a, 100 + i))
                  for i, (name, t, a) in enumerate(tables.cases())]
        makers += [(form.name, form.make) for form in fresh.FORMS]
        for name, make in makers:
            if wanted.search(name):
                checks.run(f"{name} (made by transformers)", lambda make=make: make(models))
        told(f"{len(os.listdir(models))} models made")
        for name, passed in run_fixture_tests(build, models).items():
            checks.run(name, lambda passed=passed: fresh.expect(passed, "see above"))
        told("logits, losses and gradients compared")
        for name in sorted(os.listdir(models)):
            checks.run(f"{name} (there and back)", lambda n=name: check_round_trip(build, work, os.path.join(models, n)))
        told("imported, exported and loaded")
        for name in TRAINED:
            if os.path.isdir(os.path.join(models, name)):
                checks.run(f"{name} (trained)", lambda n=name: check_trained(build, work, os.path.join(models, n)))
        first = sorted(os.listdir(models))[0]
        checks.run("tokenizer", lambda: check_tokenizer(build, work, os.path.join(models, first)))
        told("trained and loaded")
        with open(os.path.join(os.path.dirname(__file__), "..", "data", "hub_configs.json")) as file:
            published = json.load(file)
        for name, model in published.items():
            if wanted.search(name):
                checks.run(f"{name} (published)", lambda name=name, model=model: check_published(name, model))
        told("published models counted")
    finally:
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)
    print(f"{checks.passed} passed, {checks.failed} failed")
    return 1 if checks.failed or not checks.passed else 0


if __name__ == "__main__":
    sys.exit(main())
