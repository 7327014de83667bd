"""The digits of digits.py under Hugging Face accelerate: one line, after `prepare`.

    gradsum launch --standalone --nproc-per-node 2 -- python examples/accelerate_digits.py
    GRADSUM_COORDINATOR=10.0.0.1:7700 torchrun --nproc-per-node 2 examples/accelerate_digits.py
"""

from __future__ import annotations

import json

import torch
from accelerate import Accelerator
from digits import Data, accuracy_of, build_model, build_optimizer
from torch.utils.data import DataLoader, TensorDataset

import gradsum.torch

EPOCHS = 4


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data, plain = Data(), build_model(seed=1)
    loader = DataLoader(TensorDataset(data.images, data.labels), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(plain, build_optimizer(plain), loader)
    gradsum.torch.attach(model)  # gradsum
    for _ in range(EPOCHS):
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    gradsum.assert_in_sync(plain)
    if accelerator.is_main_process:
        print(json.dumps({"accuracy": accuracy_of(plain, data)}), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
