"""How far FP8 falls behind BF16 in another implementation: what part `fp8` trains, in PyTorch: shape, samples in their order, learning
rate, Adam, decay, scaled rotary positions. The initial weights have the same distribution but are its own.

python3 fp8_in_torch.py bf16 whole edges two [--iters 200] [--rate 5e-6 5e-7] [--tiny]

bf16: every product in BF16. whole: the products of all layers on E4M3 operands (E5M2 gradients) with one scale a tensor, taken from
its present largest magnitude. edges, two: the same but for the first and last layer, the first and last two. Head, norms, attention:
BF16; masters, gradients and moments: FP32. Prints a loss a step and, from the second run on, the gap of the last 50 steps to the
first run's.
"""
import argparse
import math
import time

import numpy as np
import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("runs", nargs="+", choices=["bf16", "whole", "edges", "two"])
parser.add_argument("--iters", type=int, default=200)
parser.add_argument("--rate", type=float, nargs="+", default=[5e-6])
parser.add_argument("--tiny", action="store_true", help="a model for a CPU, to see that the script runs")
args = parser.parse_args()
device = "cpu" if args.tiny else "cuda"
layers, hidden, heads, groups, ffn, vocabulary, sequence, batch, micro = (
    (3, 64, 4, 2, 128, 4200, 64, 4, 2) if args.tiny else (16, 2048, 32, 8, 8192, 128256, 2048, 8, 4))
size = hidden // heads
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def mock_samples():
    """The first samples of Megatron-LM's mock corpus, as its GPTDataset orders them: [steps * batch, sequence + 1] token ids."""
    lengths = np.random.default_rng(0).integers(1, 4096, size=100000, dtype=np.int32)
    order, last = np.random.RandomState(1234), min(vocabulary, 32000) - 1
    documents = np.arange(33333, dtype=np.int32)
    order.shuffle(documents)
    stream = np.concatenate([np.append(np.arange(1, lengths[d]) % (last + 1), last) for d in documents])
    samples = np.arange((len(stream) - 1) // sequence, dtype=np.uint32)
    order.shuffle(samples)
    begin = samples[:args.iters * batch].astype(np.int64) * sequence
    return torch.from_numpy(stream[begin[:, None] + np.arange(sequence + 1)])


def narrow(x, dtype):
    """x as FP8 and what it has to be multiplied with; the scale maps the largest magnitude to the largest value."""
    scale = torch.finfo(dtype).max / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).to(dtype), 1.0 / scale


if not args.tiny:
    narrow = torch.compile(narrow, dynamic=True)


def product(a, a_scale, b, b_scale):
    """a [m, k] times b [n, k] transposed, FP8 in, BF16 out."""
    if device == "cpu":
        return ((a.float() @ b.float().t()) * (a_scale * b_scale)).bfloat16()
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)


class Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x8, x_scale = narrow(x, E4M3)
        w8, w_scale = narrow(weight, E4M3)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        return product(x8, x_scale, w8, w_scale)

    @staticmethod
    def backward(ctx, dy):
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        d8, d_scale = narrow(dy.contiguous(), E5M2)
        dx = product(d8, d_scale, w8.t().contiguous(), w_scale)
        dw = product(d8.t().contiguous(), d_scale, x8.t().contiguous(), x_scale)
        return dx, dw


def linear(x, weight, fp8):
    return Fp8Linear.apply(x, weight) if fp8 else x @ weight.t()


def make_weights():
    generator = torch.Generator(device=device).manual_seed(1234)

    def normal(rows, columns, deviation):  # Masters start on BF16 values, as Megatron-LM's do.
        return (torch.randn(rows, columns, generator=generator, device=device) * deviation).bfloat16().float()

    small, weights = 0.02 / math.sqrt(2 * layers), {"words": normal(vocabulary, hidden, 0.02), "norm": torch.ones(hidden, device=device)}
    for i in range(layers):
        weights[f"{i}.norm1"] = torch.ones(hidden, device=device)
        weights[f"{i}.norm2"] = torch.ones(hidden, device=device)
        weights[f"{i}.qkv"] = normal((heads + 2 * groups) * size, hidden, 0.02)
        weights[f"{i}.out"] = normal(hidden, heads * size, small)
        weights[f"{i}.up"] = normal(2 * ffn, hidden, 0.02)
        weights[f"{i}.down"] = normal(hidden, ffn, small)
    return weights


def frequencies():
    """Llama 3.1's scaling by 32 of waves longer than its first context of 8192, with a ramp between 1 and 4 turns in it."""
    plain = 500000.0 ** (-torch.arange(0, size, 2, device=device).float() / size)
    ramp = ((8192 * plain / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
    return plain / 32 * (1 - ramp) + plain * ramp


angles = torch.outer(torch.arange(sequence, device=device).float(), frequencies())
cosine, sine = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))


def rotate(x):  # [batch, heads, sequence, size]
    first, second = x.chunk(2, -1)
    return (x * cosine + torch.cat((-second, first), -1) * sine).bfloat16()


def loss_of(w, tokens, fp8_layer):
    x = F.embedding(tokens[:, :-1], w["words"])
    rows = x.shape[0] * x.shape[1]

    def norm(x, name):
        return F.rms_norm(x, (hidden,), w[name], 1e-5)

    for i in range(layers):
        fp8 = fp8_layer(i)
        mixed = linear(norm(x, f"{i}.norm1").view(rows, hidden), w[f"{i}.qkv"], fp8).view(*x.shape[:2], -1, size).transpose(1, 2)
        q, k, v = mixed.split([heads, groups, groups], 1)
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (rotate(k), v))
        attention = F.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
        x = x + linear(attention.transpose(1, 2).reshape(rows, -1), w[f"{i}.out"], fp8).view_as(x)
        gate, up = linear(norm(x, f"{i}.norm2").view(rows, hidden), w[f"{i}.up"], fp8).chunk(2, -1)
        x = x + linear(F.silu(gate) * up, w[f"{i}.down"], fp8).view_as(x)
    logits = norm(x, "norm").view(rows, hidden) @ w["words"].t()
    return F.cross_entropy(logits.float(), tokens[:, 1:].reshape(-1))


def train(name, rate, samples):
    ends = {"bf16": layers, "whole": 0, "edges": 1, "two": 2}[name]

    def fp8_layer(i):
        return ends <= i < layers - ends

    masters = make_weights()
    narrow_weights = {k: v.bfloat16().requires_grad_() for k, v in masters.items()}
    matrices = [v for v in masters.values() if v.dim() > 1]
    vectors = [v for v in masters.values() if v.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.033}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=device == "cuda")
    losses, start = [], time.time()
    for step in range(args.iters):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10)
        for v in masters.values():
            v.grad = torch.zeros_like(v) if v.grad is None else v.grad.zero_()
        total = 0.0
        for part in range(batch // micro):
            begin = step * batch + part * micro
            loss = loss_of(narrow_weights, samples[begin:begin + micro].to(device), fp8_layer)
            (loss * (micro / batch)).backward()
            for k, v in narrow_weights.items():  # Fp32 sums, as Megatron-LM keeps them.
                masters[k].grad += v.grad
                v.grad = None
            total = total + loss.detach() * (micro / batch)
        torch.nn.utils.clip_grad_norm_(list(masters.values()), 1.0)
        optimizer.step()
        with torch.no_grad():
            for k, v in narrow_weights.items():
                v.copy_(masters[k])
        losses.append(total)
    losses = [float(loss) for loss in losses]
    for step in range(9, args.iters, 10):
        print(f"{name} at {rate:.1e} step {step + 1} loss {losses[step]:.5f}")
    print(f"{name}: {(time.time() - start) / args.iters * 1e3:.0f} ms a step, fell {losses[0] - losses[-1]:.3f} nats to {losses[-1]:.4f}",
          flush=True)
    return losses


samples = mock_samples()
for rate in args.rate:
    base = None
    for run in args.runs:
        losses = train(run, rate, samples)
        if base is None:
            base = losses
            continue
        gaps = [abs(a / b - 1) for a, b in zip(losses[-50:], base[-50:])]
        print(f"PyTorch FP8 {run} at {rate:.1e} beside {args.runs[0]}: gap of the last {len(gaps)}: mean "
              f"{100 * sum(gaps) / len(gaps):.3f} %, largest {100 * max(gaps):.3f} %", flush=True)
