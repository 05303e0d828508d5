"""Adds the models of FIXTURES to a folder of unpacked fixtures: tests/data/hf_fixtures.tar.xz is packed from it.

    mkdir fixtures && tar xJf tests/data/hf_fixtures.tar.xz -C fixtures
    python3 tests/hf/make_fixtures.py fixtures
    tar -C fixtures --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -c . | xz -9e > tests/data/hf_fixtures.tar.xz

Fixtures that are there already stay as they are.
"""

import json
import os
import sys

import torch
import transformers

import cases
import fresh_models

# What save_pretrained writes, by its name in cases.py; the rest are the forms of fresh_models.py.
PLAIN = ["llama_linear", "llama_dynamic", "llama_yarn", "llama_attention_bias", "phi3_long", "phi3_partial", "gemma3_scaled",
         "deepseek_v2_yarn_mscale", "deepseek_v3_yarn_mscale"]


def main(folder):
    transformers.utils.logging.disable_progress_bar()
    numbered = {name: (100 + i, model_type, arguments) for i, (name, model_type, arguments) in enumerate(cases.cases())}
    makers = {name: lambda name=name: fresh_models.make(folder, name, *numbered[name][1:], numbered[name][0]) for name in PLAIN}
    makers.update({form.name: lambda form=form: form.make(folder) for form in fresh_models.FORMS})
    for name, make in makers.items():
        directory = os.path.join(folder, name)
        if os.path.isdir(directory):
            continue
        make()
        facts = {"transformers": transformers.__version__, "torch": torch.__version__}
        with open(os.path.join(directory, "meta.json"), "w") as file:
            json.dump(facts, file, indent=1)
        print(name)


if __name__ == "__main__":
    main(sys.argv[1])
