"""Logits equal those of transformers for models of any config, also of one that leaves settings to their defaults."""

from __future__ import annotations

import json

import numpy as np
import pytest
import runners
from hypothesis import given, settings
from random_configs import OF_FAMILY, configs
from runner_driver import RunnerDriver, relative_error
from tiny_models import initialised, reference_logits
from transformers import AutoConfig

from tercet.srt.model_files.families import FAMILIES
from tercet.srt.model_files.load_config import load_model_config

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@settings(max_examples=20, deadline=None)
@given(config=configs())
def test_logits_equal_transformers(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    model = initialised(AutoConfig.from_pretrained(folder), seed=0)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))  # transformers has written the defaults, too
    runner = runners.make_runner(
        load_model_config(folder), dtype="float32", max_total_tokens=400, max_running_requests=2
    )
    ids = np.random.default_rng(1).integers(0, 67, NUM_TOKENS)
    expected = reference_logits(model, ids.tolist())
    for position, logits in RunnerDriver(runner).logits_along(1, ids, [NUM_TOKENS - 3]).items():
        assert relative_error(logits, expected[position]) < 1e-4, position


def test_every_family_is_drawn():
    drawn = {family.model_type for family in FAMILIES.values() if not family.has_text_config}
    assert drawn == set(OF_FAMILY)
