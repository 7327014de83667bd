"""A small character transformer that learns to write Python from Python's own standard library.

    gradsum launch --standalone --nproc-per-node 2 -- python examples/char_transformer.py --steps 60

The text is on every machine that can run this script. Every rank reads windows at offsets of its
own. Beside the averaged gradients this shows what real training loops do: a learning rate schedule
with warm-up, and clipping by the norm of the averaged gradients, which needs `synchronize()` before
the clipping and `skip_synchronize()` around the step.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsum

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
TEXT_BYTES = 1_500_000


def read_text() -> Tensor:
    """Modules of the standard library in alphabetical order, as numbers of the alphabet."""
    codes = torch.full((256,), -1, dtype=torch.int64)
    for number, letter in enumerate(ALPHABET):
        codes[ord(letter)] = number
    source = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source += path.read_bytes()
        if len(source) >= TEXT_BYTES:
            break
    text = codes[torch.frombuffer(source, dtype=torch.uint8).long()]
    return text[text >= 0]


class Block(nn.Module):
    """Causal self-attention, then a two-layer network; both add to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class CharTransformer(nn.Module):
    """int64 [batch, length] -> the scores of the next character, float32 [batch, length, 96]."""

    def __init__(self, context: int, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.context = context
        self.letters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        self.apply(self._start_small)
        self.head.weight = self.letters.weight  # tied: one gradient, pushed once

    @staticmethod
    def _start_small(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        scores: Tensor = self.head(self.norm(self.blocks(self.letters(x) + places)))
        return scores

    @torch.no_grad()
    def write(self, prompt: str, letters: int, temperature: float = 0.8) -> str:
        text = torch.tensor([[ALPHABET.index(letter) for letter in prompt]])
        dice = torch.Generator().manual_seed(0)
        for _ in range(letters):
            scores = self(text[:, -self.context :])[0, -1] / temperature
            drawn = torch.multinomial(scores.softmax(dim=0), 1, generator=dice)
            text = torch.cat([text, drawn[None]], dim=1)
        return "".join(ALPHABET[number] for number in text[0].tolist())


def draw_batch(text: Tensor, batch: int, context: int, random: torch.Generator) -> Tensor:
    """int64 [batch, context + 1]: windows at random offsets; the last column is only a target."""
    first = torch.randint(len(text) - context, (batch, 1), generator=random)
    return text[first + torch.arange(context + 1)]


def train(args: argparse.Namespace, model: CharTransformer, text: Tensor) -> list[float]:
    """Returns the loss of every step, averaged over the ranks."""
    gradsum.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = gradsum.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01),
        named_parameters=model.named_parameters(),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / args.warmup)
    )
    random = torch.Generator().manual_seed(1000 + gradsum.rank())  # other windows on every rank
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        window = draw_batch(text, args.batch, args.context, random)
        scores = model(window[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.synchronize()  # .grad now holds the averages, the same on every rank ...
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        with optimizer.skip_synchronize():  # ... and the step must not wait for them again
            optimizer.step()
        schedule.step()
        losses.append(gradsum.push_pull(loss.detach(), average=True, name="loss").item())
        if gradsum.rank() == 0 and not args.json and (step % 10 == 0 or step == 1):
            tokens = step * args.batch * args.context * gradsum.size()
            speed = tokens / (time.perf_counter() - start)
            print(f"step {step:4d}  loss {losses[-1]:.3f}  {speed:,.0f} tokens/s", flush=True)
    gradsum.assert_in_sync(model)
    return losses


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small transformer on Python sources.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters in a window")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps until the full rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    return parser.parse_args()


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    gradsum.init()
    rank, size = gradsum.rank(), gradsum.size()
    torch.manual_seed(args.seed + rank)
    text = read_text()
    model = CharTransformer(args.context)
    start = time.perf_counter()
    losses = train(args, model, text)
    seconds = time.perf_counter() - start
    gradsum.shutdown()
    if rank != 0:
        return 0

    tokens = args.steps * args.batch * args.context * size
    sample = model.write("def ", letters=200)
    if args.json:
        result = {"workers": size, "tokens": tokens, "seconds": seconds, "losses": losses}
        print(json.dumps(result | {"sample": sample}), flush=True)
    else:
        print(f"{tokens:,} characters read by {size} workers in {seconds:.1f} s", flush=True)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; a sample:\n{sample}", flush=True)
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
