"""The digits of digits.py under Lightning: the backend is the only line that is gradsum's.

    gradsum launch --standalone --nproc-per-node 2 -- python examples/lightning_digits.py
    GRADSUM_COORDINATOR=10.0.0.1:7700 torchrun --nproc-per-node 2 examples/lightning_digits.py

Importing gradsum.torch makes the backend known to torch; `process_group_backend` asks for it.
"""

from __future__ import annotations

import json
import os

import lightning.pytorch as pl
import torch
from digits import Data, accuracy_of, build_model, build_optimizer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import gradsum.torch

EPOCHS = 4


class Digits(pl.LightningModule):
    """A small CNN; Lightning's sampler gives every worker its own part of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model(seed=1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self)


def main() -> None:
    torch.set_num_threads(1)
    data = Data()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gradsum"),
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Digits()
    loader = DataLoader(TensorDataset(data.images, data.labels), batch_size=16, shuffle=True)
    trainer.fit(module, loader)
    gradsum.assert_in_sync(module)
    if trainer.is_global_zero:
        print(json.dumps({"accuracy": accuracy_of(module.model, data)}), flush=True)


if __name__ == "__main__":
    main()
