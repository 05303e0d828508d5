"""The benchmark's peer: the same GPT training step in PyTorch on the CPU, in fp32.

Learned positions, LayerNorm, GELU (tanh), biases, tied output layer, dropout, gradient accumulation, clipping, AdamW: the math
of `vanilla_gpt_megatron_lm_config`. Prints one JSON object: seconds of each measured step, loss of each step.
"""
import argparse
import json
import math
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, hidden, heads, ffn, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x, mask):
        batch, seq, hidden = x.shape
        shape = (batch, seq, self.heads, hidden // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = torch.matmul(q, k.transpose(-1, -2)) * (1 / math.sqrt(shape[-1])) + mask
        scores = F.dropout(scores.softmax(-1), self.dropout, self.training)
        out = torch.matmul(scores, v).transpose(1, 2).reshape(batch, seq, hidden)
        x = x + F.dropout(self.proj(out), self.dropout, self.training)
        out = self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(out, self.dropout, self.training)


class Gpt(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.words, self.positions = nn.Embedding(a.vocab, a.hidden), nn.Embedding(a.seq, a.hidden)
        self.blocks = nn.ModuleList(Block(a.hidden, a.heads, a.ffn, a.dropout) for _ in range(a.layers))
        self.norm, self.dropout = nn.LayerNorm(a.hidden), a.dropout
        self.register_buffer("mask", torch.full((a.seq, a.seq), float("-inf")).triu(1))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, labels):
        x = self.words(tokens) + self.positions.weight
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x, self.mask)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main():
    p = argparse.ArgumentParser()
    for name, value in dict(layers=2, hidden=256, heads=4, ffn=1024, seq=512, vocab=32000, mbs=4, gbs=32, iters=5, warmup=1).items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--threads", type=int, required=True)
    p.add_argument("--dropout", type=float, default=0.1)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(1234)
    model = Gpt(a)
    decay = [q for q in model.parameters() if q.dim() > 1]
    rest = [q for q in model.parameters() if q.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=3e-4)
    seconds, losses = [], []
    for iteration in range(a.warmup + a.iters):
        batches = [torch.randint(a.vocab, (a.mbs, a.seq + 1)) for _ in range(a.gbs // a.mbs)]
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for batch in batches:
            loss = model(batch[:, :-1], batch[:, 1:]) / len(batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if iteration >= a.warmup:
            seconds.append(time.perf_counter() - begin)
            losses.append(total)
    print(json.dumps({"torch": torch.__version__, "seconds": seconds, "losses": losses}))


main()
