"""PyTorch's own tests of torch.distributed, run on gloo and on gradsum."""
