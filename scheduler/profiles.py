"""Profiles of models: which layer needs how many bytes and how much of a step's computation.

Built from the architectures' shapes. Computation is counted in multiplications of the forward pass;
a backward pass costs twice its forward pass. Layers are in forward order; a layer's gradients are
complete when its backward pass ends, all at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from gradsum.errors import ConfigError

BYTES: Final = 4
BACKWARD: Final = 2.0


@dataclass(frozen=True, slots=True)
class Layer:
    """tensors: elements of each parameter; forward, backward: seconds."""

    name: str
    tensors: tuple[int, ...]
    forward: float
    backward: float

    @property
    def nbytes(self) -> int:
        """Of all its float32 parameters."""
        return BYTES * sum(self.tensors)


@dataclass(frozen=True, slots=True)
class Profile:
    """A model's layers in forward order."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def nbytes(self) -> int:
        """Of all parameters."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def seconds(self) -> float:
        """Of one step's computation."""
        return sum(layer.forward + layer.backward for layer in self.layers)

    def paced(self, seconds: float) -> Profile:
        """The same with another computation time of a step."""
        factor = seconds / self.seconds
        return replace(self, layers=tuple(
            replace(each, forward=each.forward * factor, backward=each.backward * factor)
            for each in self.layers
        ))  # fmt: skip

    def shrunk(self, nbytes: int) -> Profile:
        """The same in fewer bytes, each tensor in proportion, for slow links."""
        factor = nbytes / self.nbytes
        return replace(self, layers=tuple(
            replace(each, tensors=tuple(max(1, round(count * factor)) for count in each.tensors))
            for each in self.layers
        ))  # fmt: skip


def _layers(rows: Iterator[tuple[str, tuple[int, ...], float]]) -> tuple[Layer, ...]:
    """From (name, tensors, multiplications)."""
    every = list(rows)
    total = sum(work for _, _, work in every) * (1 + BACKWARD)
    return tuple(
        Layer(name, tensors, work / total, BACKWARD * work / total)
        for name, tensors, work in every
    )


def _vgg16() -> Iterator[tuple[str, tuple[int, ...], float]]:
    side, depth = 224, 3
    blocks = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
    for block, (convolutions, width) in enumerate(blocks):
        for number in range(convolutions):
            weights = 9 * depth * width
            yield f"conv{block + 1}_{number + 1}", (weights, width), float(weights * side * side)
            depth = width
        side //= 2
    full = (("fc6", 512 * 49, 4096), ("fc7", 4096, 4096), ("fc8", 4096, 1000))
    for name, inputs, outputs in full:
        yield name, (inputs * outputs, outputs), float(inputs * outputs)


def _resnet50() -> Iterator[tuple[str, tuple[int, ...], float]]:
    def convolution(
        name: str, size: int, inputs: int, outputs: int, side: int
    ) -> tuple[str, tuple[int, ...], float]:
        weights = size * size * inputs * outputs
        return name, (weights, outputs, outputs), float(weights * side * side)  # and a batch norm

    yield convolution("conv1", 7, 3, 64, 112)
    depth = 64
    for stage, (blocks, width, side) in enumerate(
        ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))
    ):
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            yield convolution(f"{name}.conv1", 1, depth, width, side)
            yield convolution(f"{name}.conv2", 3, width, width, side)
            yield convolution(f"{name}.conv3", 1, width, 4 * width, side)
            if not block:
                yield convolution(f"{name}.downsample", 1, depth, 4 * width, side)
            depth = 4 * width
    yield "fc", (depth * 1000, 1000), float(depth * 1000)


def _gpt2() -> Iterator[tuple[str, tuple[int, ...], float]]:
    width, tokens, letters = 768, 1024, 50257
    yield "embedding", (letters * width, tokens * width), float(tokens * width)
    for number in range(12):
        attention = tokens * tokens * width * 2
        for name, inputs, outputs, more in (
            ("attention", width, 3 * width, attention), ("projection", width, width, 0),
            ("expansion", width, 4 * width, 0), ("contraction", 4 * width, width, 0),
        ):  # fmt: skip
            norm = (width, width) if name in ("attention", "expansion") else ()
            work = float(inputs * outputs * tokens + more)
            yield f"block{number}.{name}", (*norm, inputs * outputs, outputs), work
    yield "norm", (width, width), float(tokens * width)
    yield "head", (), float(letters * width * tokens)  # tied to the embedding


_SOURCES: Final[Mapping[str, Callable[[], Iterator[tuple[str, tuple[int, ...], float]]]]] = (
    MappingProxyType({"vgg16": _vgg16, "resnet50": _resnet50, "gpt2": _gpt2})
)
MODELS: Final = tuple(_SOURCES)


def profile(name: str) -> Profile:
    """A model's profile, with one second of computation. ConfigError for an unknown name."""
    source = _SOURCES.get(name)
    if source is None:
        raise ConfigError(f"no profile of {name!r}", hint=f"there are {', '.join(MODELS)}")
    return Profile(name, _layers(source()))


def parse(text: str, origin: str) -> Profile:
    """A profile from JSON: a list of {"name", "tensors": [elements], "forward": s, "backward": s}.

    Raises ConfigError that names ``origin`` and the layer.
    """
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{origin} is not JSON: {error}", hint=_FORM) from None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{origin} is not a list of layers", hint=_FORM)
    layers = tuple(_layer(row, f"{origin}, layer {i}") for i, row in enumerate(rows))
    found = Profile(origin, layers)
    if not found.nbytes or found.seconds <= 0:
        raise ConfigError(f"{origin} has no bytes or no computation", hint=_FORM)
    return found


def _layer(row: Any, where: str) -> Layer:
    try:
        tensors: Sequence[Any] = row["tensors"]
        layer = Layer(
            str(row["name"]), tuple(map(int, tensors)), float(row["forward"]),
            float(row["backward"]),
        )  # fmt: skip
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"{where}: {error!r}", hint=_FORM) from None
    if min((layer.forward, layer.backward, *layer.tensors)) < 0:
        raise ConfigError(f"{where}: a negative number", hint=_FORM)
    return layer


_FORM: Final = (
    'such as [{"name": "fc", "tensors": [1000, 10], "forward": 0.001, "backward": 0.002}]'
)
