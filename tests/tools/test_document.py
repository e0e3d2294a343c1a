"""The generated files are current, and a printed configuration can be loaded again."""

from __future__ import annotations

import pytest
import yaml

from trainer.config import Config, load
from trainer.config.cli import help_text, literal, print_config
from trainer.config.config_files import package_root, read_yaml
from trainer.config.keys import all_keys
from trainer.tools.document import base_yaml, page

REMEDY = "run `python -m trainer.tools.document` and commit the files that it writes"
BUDGET = 125  # local steps have three, which nothing else says: how many, and the two numbers of the outer step


def test_base_yml_is_current():
  assert (package_root() / "configs/base.yml").read_text() == base_yaml(), REMEDY


def test_the_configuration_page_is_current():
  assert (package_root().parents[1] / "docs/configuration.md").read_text() == page(), REMEDY


def test_base_yml_means_the_same_to_a_yaml_library():
  """A reader that does not know the types of the keys reads the same values."""
  values = yaml.safe_load(base_yaml())
  assert values.keys() == all_keys().keys()
  for name, value in Config().flat().items():
    read = values.get(name, value)
    assert (float(read) if isinstance(value, float) else read) == value, name


def test_help_has_every_key_with_its_default():
  text = help_text()
  for key in all_keys().values():
    assert f"  {key.name}={literal(key.default)}\n" in text


MODELS = sorted(path.stem for path in (package_root() / "configs/models").glob("*.yml"))
PRINTED = [
  [],
  ["model_name=llama3.1-8b", "sample_prompt=it's: #1", "learning_rate=1e-07"],
  # The model's own values, and defaults that replaced values of the model.
  ["model_name=qwen3-0.6b", "override_model_config=true", "head_dim=64", "vocab_size=1000"],
  *([f"model_name={name}"] for name in MODELS),
]


@pytest.mark.parametrize("keys", PRINTED, ids=" ".join)
def test_the_printed_config_reads_back_to_the_same_config(keys, tmp_path):
  config = load(["configs/base.yml", *keys])
  (tmp_path / "printed.yml").write_text(print_config(config))
  assert load([str(tmp_path / "printed.yml")]) == config


WORDS = ["", "-", "- x", "---", "...", "a: b", "a #b", "#", "~", "~/x", "null", "Null", "true", "No", "007", "1e3"]
WORDS += ["2026-01-01", "1_000", "0x1f", "?", "? x", "!tag", "%YAML", "@", "`", "|", ">", "&a", "*a", "["]
WORDS += ["{}", "<<", ".5", "gs://a/b#c", "x" * 3000, "a,b", "=", "a=b", "0:30", "a:", ":a", "- - -", "a  b", "  "]
WORDS += ["'", '"', "''", "it's", '"a"', "\\", "\\n", "a\nb", "\n", "a\r\nb", "\r", "\t", "a\tb", " a", "a "]
WORDS += ["\x00", "\x1b[0m", "\x7f", "\x85", "a\x85b", "\xa0", "\u2028", "\ufeff", "\ufffe", "\u00e9"]
WORDS += ["\U0001f600", "\udcff"]


@pytest.mark.parametrize("word", WORDS, ids=ascii)
def test_any_text_is_written_so_that_it_reads_back(word, tmp_path):
  path = tmp_path / "x.yml"
  path.write_text(f"sample_prompt: {literal(word)}\nsteps: 1\n", encoding="utf-8")
  assert read_yaml(path)["sample_prompt"][0] == word
  assert yaml.safe_load(path.read_text(encoding="utf-8")) == {"sample_prompt": word, "steps": 1}


def test_every_key_has_a_description_and_the_number_of_keys_is_limited():
  for key in all_keys().values():
    assert len(key.description) > 10, key.name
    assert key.description.isascii(), key.name
  assert len(all_keys()) <= BUDGET
