"""The generated files are current, and what is printed can be read back."""

from __future__ import annotations

import pytest
import yaml

from trainer.config import Config, load
from trainer.config.cli import help_text, print_config
from trainer.config.document import base_yaml, literal, page
from trainer.config.files import repository_root
from trainer.config.keys import all_keys

REMEDY = "run `python -m trainer.config.document` and commit what it writes"
BUDGET = 150


def test_base_yml_is_current():
  assert (repository_root() / "configs/base.yml").read_text() == base_yaml(), REMEDY


def test_the_configuration_page_is_current():
  assert (repository_root() / "docs/configuration.md").read_text() == page(), REMEDY


def test_base_yml_means_the_same_to_a_yaml_library():
  """Equal to the schema also for a reader that does not know the keys' types (numbers are numbers there too)."""
  values = yaml.safe_load(base_yaml())
  assert values.keys() == Config().flat().keys()
  for name, value in Config().flat().items():
    read = values[name]
    assert (float(read) if isinstance(value, float) else read) == value, name


def test_help_has_every_key_with_its_default():
  text = help_text()
  for key in all_keys().values():
    assert f"  {key.name}={literal(key.default)}\n" in text


@pytest.mark.parametrize("keys", [[], ["model_name=llama3.1-8b", "sample_prompt=it's: #1", "learning_rate=1e-07"]])
def test_the_printed_config_reads_back_to_the_same_config(keys, tmp_path):
  config = load(["configs/base.yml", *keys])
  (tmp_path / "printed.yml").write_text(print_config(config))
  assert load([str(tmp_path / "printed.yml")]) == config


def test_every_key_is_described_and_there_are_not_too_many():
  for key in all_keys().values():
    assert len(key.description) > 10, key.name
    assert key.description.isascii(), key.name
  assert len(all_keys()) <= BUDGET
