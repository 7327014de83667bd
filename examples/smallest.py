"""The smallest distributed training script: a plain torch loop and five changed lines.

python examples/smallest.py                                               # one process
gradsum launch --standalone --nproc-per-node 2 -- python examples/smallest.py           # two
"""

import torch

import gradsum  # 1: import it

gradsum.init()  # 2: join the job (a plain `python smallest.py` is a job of one)

truth = torch.tensor([[2.0], [-3.0], [0.5]])
random = torch.Generator().manual_seed(gradsum.rank())  # 3: other data on every rank
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gradsum.broadcast_parameters(model.state_dict(), root_rank=0)  # 4: the same start everywhere
optimizer = gradsum.DistributedOptimizer(  # 5: average the gradients of all ranks
    optimizer, named_parameters=model.named_parameters()
)

for step in range(100):
    inputs = torch.randn(32, 3, generator=random)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs @ truth + 1.0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.6f}")

print(
    "weights", [round(w, 3) for w in model.weight[0].tolist()], "bias", round(model.bias.item(), 3)
)
