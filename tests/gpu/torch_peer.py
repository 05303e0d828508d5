"""The 1B row as a PyTorch user would train it: compiled, cuDNN attention, fused AdamW, fp32 masters and fp32 gradient sums.

python3 torch_peer.py [--micro-batch 1] [--micro-batches 8] [--attention cudnn|flash] [--iters 10]

Prints a line an iteration and, last, the median tokens/s and TFLOP/s (Megatron-LM's formula, causal attention).
"""
import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch", type=int, default=1)
parser.add_argument("--micro-batches", type=int, default=8)
parser.add_argument("--sequence", type=int, default=8192)
parser.add_argument("--attention", choices=["cudnn", "flash"], default="cudnn")
parser.add_argument("--iters", type=int, default=10)
args = parser.parse_args()

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCABULARY = 16, 2048, 32, 8, 8192, 128256
SIZE = HIDDEN // HEADS
torch.backends.cuda.matmul.allow_tf32 = True


def rotate(x, cosine, sine):
    first, second = x.chunk(2, -1)
    return (x * cosine + torch.cat((-second, first), -1) * sine).to(x.dtype)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.norm2 = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * GROUPS) * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x, cosine, sine):
        batch, sequence, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).split([HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE], -1)
        q = rotate(q.view(batch, sequence, HEADS, SIZE).transpose(1, 2), cosine, sine)
        k = rotate(k.view(batch, sequence, GROUPS, SIZE).transpose(1, 2), cosine, sine)
        v = v.view(batch, sequence, GROUPS, SIZE).transpose(1, 2)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, sequence, -1))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        frequencies = 500000.0 ** (-torch.arange(0, SIZE, 2).float() / SIZE)
        angles = torch.outer(torch.arange(args.sequence).float(), frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos().bfloat16())
        self.register_buffer("sine", angles.sin().bfloat16())

    def forward(self, tokens, labels):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        logits = self.head(self.norm(x).flatten(0, 1))
        return F.cross_entropy(logits.float(), labels.flatten())


def gradient_sums(parameters, masters):
    """Adds each gradient to its fp32 sum as soon as it is there, as Megatron-LM does."""
    sums = [torch.zeros_like(master) for master in masters]
    for parameter, total in zip(parameters, sums):
        def add(of, total=total):
            total.add_(of.grad)
            of.grad = None
        parameter.register_post_accumulate_grad_hook(add)
    return sums


torch.manual_seed(0)
with torch.device("cuda"):
    model = Model()
for parameter in model.parameters():
    if parameter.dim() > 1:
        nn.init.normal_(parameter, std=0.02)
model = model.bfloat16()
parameters = list(model.parameters())
masters = [parameter.detach().float().clone() for parameter in parameters]
sums = gradient_sums(parameters, masters)
optimizer = torch.optim.AdamW(masters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
compiled = torch.compile(model)
backend = SDPBackend.CUDNN_ATTENTION if args.attention == "cudnn" else SDPBackend.FLASH_ATTENTION


def step():
    total = 0.0
    for _ in range(args.micro_batches):
        ids = torch.randint(0, VOCABULARY, (args.micro_batch, args.sequence + 1), device="cuda")
        with sdpa_kernel(backend):
            loss = compiled(ids[:, :-1], ids[:, 1:])
        (loss / args.micro_batches).backward()
        total = total + loss.detach()
    norm = torch.nn.utils.get_total_norm(sums)
    torch._foreach_mul_(sums, torch.clamp(1.0 / (norm + 1e-6), max=1.0))
    for master, gradient in zip(masters, sums):
        master.grad = gradient
    optimizer.step()
    with torch.no_grad():
        torch._foreach_copy_(parameters, masters)
        torch._foreach_zero_(sums)
    return total / args.micro_batches


tokens = args.micro_batch * args.sequence * args.micro_batches
products = LAYERS * (HIDDEN * (HEADS + 2 * GROUPS) * SIZE + HEADS * SIZE * HIDDEN + 3 * HIDDEN * FFN) + HIDDEN * VOCABULARY
flops = 6 * tokens * (products + LAYERS * HEADS * SIZE * args.sequence)
times = []
for iteration in range(args.iters):
    torch.cuda.synchronize()
    start = time.time()
    loss = step()
    torch.cuda.synchronize()
    times.append(time.time() - start)
    print(f"iteration {iteration + 1}: loss {float(loss):.4f}, {times[-1] * 1e3:.1f} ms", flush=True)
median = statistics.median(times[3:])
print(f"PEER PyTorch {torch.__version__}, {args.micro_batches} micro-batches of {args.micro_batch}: median {median * 1e3:.1f} ms, "
      f"{tokens / median:.0f} tokens/s, {flops / median / 1e12:.1f} TFLOP/s, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
