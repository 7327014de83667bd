"""Profiles: the models' published sizes, and profiles that users write."""

from __future__ import annotations

import json

import pytest

from gradsum.errors import ConfigError
from gradsum.scheduler.profiles import MODELS, parse, profile


@pytest.mark.parametrize(
    ("name", "parameters", "layers"),
    [("vgg16", 138_357_544, 16), ("resnet50", 25_557_032, 54), ("gpt2", 124_439_808, 51)],
)
def test_the_models_have_their_published_sizes(name: str, parameters: int, layers: int) -> None:
    found = profile(name)
    assert found.nbytes == 4 * parameters
    assert len(found.layers) == layers
    assert found.seconds == pytest.approx(1.0)
    assert sum(layer.backward for layer in found.layers) == pytest.approx(2 / 3)


def test_where_vgg_computes_and_where_it_keeps_its_weights() -> None:
    layers = {layer.name: layer for layer in profile("vgg16").layers}
    assert layers["fc6"].nbytes == 4 * (25088 * 4096 + 4096)
    assert layers["fc6"].forward < 0.01 * layers["conv1_2"].forward * 20
    assert layers["conv1_2"].forward == pytest.approx(224**2 * 9 * 64 * 64 / 15.47e9 / 3, rel=1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_shrunk_and_paced(name: str) -> None:
    whole = profile(name)
    found = whole.shrunk(32_000_000).paced(0.5)
    assert found.nbytes == pytest.approx(32_000_000, rel=1e-4)
    assert found.seconds == pytest.approx(0.5)
    share = whole.layers[3].nbytes / whole.nbytes
    assert found.layers[3].nbytes / found.nbytes == pytest.approx(share, rel=1e-2)


def test_a_profile_of_the_users() -> None:
    rows = [{"name": "a", "tensors": [10, 5], "forward": 1, "backward": 2.5}]
    found = parse(json.dumps(rows), "mine.json")
    assert (found.name, found.nbytes, found.seconds) == ("mine.json", 60, 3.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [("[", "mine is not JSON"), ("{}", "mine is not a list of layers"), ("[]", "not a list"),
     ('[{"name": "a"}]', "mine, layer 0: KeyError"), ("[3]", "layer 0"),
     ('[{"name": "a", "tensors": [-1], "forward": 1, "backward": 1}]', "negative"),
     ('[{"name": "a", "tensors": [1], "forward": 0, "backward": 0}]', "no computation")],
)  # fmt: skip
def test_what_is_no_profile(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text, "mine")


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ConfigError, match="no profile of 'alexnet'"):
        profile("alexnet")
