"""Random models of `transformers`, saved as it saves them, with the logits, loss and gradients that it computes in fp32."""

import dataclasses
import json
import os
import typing
import warnings

import torch
import transformers
from safetensors.torch import load_file, save_file

import cases as tables

torch.set_num_threads(1)
warnings.filterwarnings("ignore")


def random_model(model_type, arguments, seed):
    """A model in fp32 whose every parameter and router bias is random: initial biases of 0 and norms of 1 would hide faults.

    The values have the precision of BF16, which halves the size of packed fixtures.
    """
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * (0.1 if value.dim() == 1 else 0.02))
            value.copy_(value.bfloat16().float())
        for name, value in model.named_parameters():
            if name.endswith("linear_attn.A_log"):
                # Decays up to e^-16 a token, as they are drawn at first, leave states without a past, whose gradients are mostly
                # fp32's noise (transformers' own are then up to 3 % off from those in fp64).
                value.copy_(torch.empty_like(value).uniform_(0.05, 1.0).log().bfloat16().float())
        for name, value in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.randn_like(value) * 0.1)
    return model


def expect(condition, message):
    assert condition, message


def load(directory, **options):
    """The model of a directory in fp32, where its weights are of another type too."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32,
                                                               **options)
    model, info = loaded if isinstance(loaded, tuple) else (loaded, None)
    torch.nn.Module.float(model)  # Experts of MXFP4 come as BF16 whatever one asks for.
    return (model, info) if info is not None else model


def tokens(config, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, config.vocab_size, (2, tables.SEQUENCE), generator=generator)


def write_reference(model, directory, seed):
    ids = tokens(model.config, seed)
    model.zero_grad()
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    tensors = {"input_ids": ids, "logits": output.logits.detach().contiguous(), "loss": output.loss.detach().reshape(1)}
    for name, value in model.named_parameters():
        if value.grad is not None:
            tensors["grad." + name] = value.grad.contiguous()
    save_file(tensors, os.path.join(directory, "reference.safetensors"))


def edit_json(path, change):
    with open(path) as file:
        content = json.load(file)
    change(content)
    with open(path, "w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def make(parent, name, model_type, arguments, seed):
    directory = os.path.join(parent, name)
    model = random_model(model_type, arguments, seed)
    model.save_pretrained(directory)
    write_reference(model, directory, seed + 1)
    return directory


def make_bf16(parent, name, model_type, arguments, seed):
    """Weights in BF16; computed in fp32 from them."""
    directory = os.path.join(parent, name)
    random_model(model_type, arguments, seed).to(torch.bfloat16).save_pretrained(directory)
    write_reference(load(directory), directory, seed + 1)
    return directory


def make_block_fp8(parent, name, model_type, arguments, seed, block=16):
    """DeepSeek's form: matrices of linear layers in FP8 with one scale a block."""
    directory = os.path.join(parent, name)
    random_model(model_type, arguments, seed).to(torch.bfloat16).save_pretrained(directory)
    path = os.path.join(directory, "model.safetensors")
    stored = {}
    for key, value in load_file(path).items():
        linear = key.endswith("_proj.weight") or key.endswith("_a_proj_with_mqa.weight")
        if not linear or value.dim() != 2 or value.shape[0] % block or value.shape[1] % block:
            stored[key] = value
            continue
        rows, columns = value.shape[0] // block, value.shape[1] // block
        blocks = value.float().reshape(rows, block, columns, block)
        scale = blocks.abs().amax(dim=(1, 3)) / 448.0
        quantised = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[key] = quantised.reshape(value.shape).contiguous()
        stored[key + "_scale_inv"] = scale.contiguous()
    save_file(stored, path, metadata={"format": "pt"})
    quantised = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[block, block])
    edit_json(os.path.join(directory, "config.json"), lambda config: config.update(quantization_config=quantised))
    write_reference(load(directory), directory, seed + 1)
    return directory


def make_mxfp4(parent, name, model_type, arguments, seed):
    """GPT-OSS's form: matrices of experts as 4-bit values, two a byte, with a power of two for every 32."""
    directory = os.path.join(parent, name)
    random_model(model_type, arguments, seed).to(torch.bfloat16).save_pretrained(directory)
    path = os.path.join(directory, "model.safetensors")
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    stored = {}
    for key, value in load_file(path).items():
        if not key.endswith("experts.gate_up_proj") and not key.endswith("experts.down_proj"):
            stored[key] = value
            continue
        groups = value.float().transpose(1, 2).reshape(value.shape[0], value.shape[2], -1, 32)
        exponent = torch.floor(torch.log2(groups.abs().amax(dim=-1).clamp_min(1e-20))) - 2
        scaled = groups / torch.exp2(exponent)[..., None]
        codes = (scaled[..., None] - levels).abs().argmin(dim=-1).to(torch.uint8)
        stored[key + "_blocks"] = (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()
        stored[key + "_scales"] = (exponent + 127).to(torch.uint8).contiguous()
    save_file(stored, path, metadata={"format": "pt"})
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantised = dict(modules_to_not_convert=skipped, quant_method="mxfp4")
    edit_json(os.path.join(directory, "config.json"), lambda config: config.update(quantization_config=quantised))
    write_reference(load(directory), directory, seed + 1)
    return directory


def make_old_gpt2(parent, name, arguments, seed):
    """The files of the first GPT-2: no prefix, causal masks among the tensors, keys that nobody reads any more."""
    directory = make(parent, name, "gpt2", arguments, seed)
    path = os.path.join(directory, "model.safetensors")
    stored = {key.removeprefix("transformer."): value for key, value in load_file(path).items()}
    length = arguments["n_positions"]
    for layer in range(arguments["n_layer"]):
        stored[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(length, length)).reshape(1, 1, length, length)
    save_file(stored, path, metadata={"format": "pt"})

    def old_keys(config):
        config.pop("dtype", None)
        config.pop("tie_word_embeddings", None)
        config.update(n_ctx=length, task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}})

    edit_json(os.path.join(directory, "config.json"), old_keys)
    return directory


@dataclasses.dataclass
class Form:
    """A model in a form that save_pretrained does not write."""

    name: str
    write: typing.Callable
    arguments: tuple
    seed: int

    def make(self, parent):
        return self.write(parent, self.name, *self.arguments, self.seed)


V3 = tables.dense(**{**tables.MLA, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
                     "v_head_dim": 8, "qk_nope_head_dim": 8, "num_hidden_layers": 2, "q_lora_rank": 32})
OSS = tables.dense(num_local_experts=3, num_experts_per_tok=2, head_dim=8, sliding_window=6, intermediate_size=32,
                   rope_parameters={**tables.YARN, "factor": 4.0, "truncate": False})
OLD_GPT2 = dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.1, bos_token_id=1,
                eos_token_id=2)
FORMS = [
    Form("llama_bf16", make_bf16, ("llama", tables.dense(rope_parameters=tables.LLAMA3)), 301),
    Form("deepseek_v3_fp8", make_block_fp8, ("deepseek_v3", V3), 302),
    Form("gpt_oss_mxfp4", make_mxfp4, ("gpt_oss", OSS), 303),
    Form("gpt2_old_files", make_old_gpt2, (OLD_GPT2,), 304),
]
