"""max_bad_records: bad records are skipped, counted and named, and all others stay."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.data_files import ARROW, TEXTS, TOKENS, everything, load, write_jsonl, write_records

from input_pipeline import loader as loader_lib
from input_pipeline.batch import DataError
from input_pipeline.loader import make_loader
from input_pipeline.options import DataOptions
from trainer.config import mixture_files
from trainer.config.errors import ConfigError
from trainer.config.schema import DataSection

BAD = 17  # the number of the bad record
REST = {kind: [*values[:BAD], *values[BAD + 1 :]] for kind, values in (("text", TEXTS), ("tokens", TOKENS))}


def jsonl(folder: Path) -> dict[str, str]:
  path = Path(write_jsonl(folder / "data", "body", TEXTS))
  lines = path.read_bytes().splitlines(keepends=True)
  lines[BAD] = b'{"body": 7}\n'
  path.write_bytes(b"".join(lines))
  return {"grain_train_files": str(path), "grain_file_type": "jsonl"}


def compressed(folder: Path) -> dict[str, str]:
  path = Path(jsonl(folder)["grain_train_files"])
  (folder / "data.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
  return {"grain_train_files": f"{folder}/data.jsonl.gz", "grain_file_type": "jsonl"}


def parquet(folder: Path) -> dict[str, str]:
  """The tokens in row groups of 7, with a null in a list."""
  arrow = pytest.importorskip("pyarrow", reason=ARROW)
  writer = pytest.importorskip("pyarrow.parquet", reason=ARROW)
  values = [ids.tolist() for ids in TOKENS]
  values[BAD] = [1, None, 3]
  writer.write_table(arrow.table({"body": arrow.array(values)}), folder / "data.parquet", row_group_size=7)
  return {"grain_train_files": f"{folder}/data.parquet", "grain_file_type": "parquet"}


def not_utf8(folder: Path) -> dict[str, str]:
  records = [text.encode() for text in TEXTS]
  records[BAD] = b"\xff\xfe"
  path = write_records(folder / "data", records)
  return {"grain_train_files": path, "grain_file_type": "arrayrecord_text"}


def damaged(folder: Path) -> dict[str, str]:
  """A file in which one byte has changed."""
  marked = np.frombuffer(b"\x07\x01" * 40, "<i4")
  values = [*TOKENS[:BAD], marked, *TOKENS[BAD + 1 :]]
  path = Path(
    write_records(folder / "data", [ids.astype("<i4").tobytes() for ids in values], "group_size:1,uncompressed")
  )
  content = bytearray(path.read_bytes())
  content[content.index(b"\x07\x01" * 40) + 40] ^= 1
  path.write_bytes(content)
  return {"grain_train_files": str(path), "grain_file_type": "arrayrecord_int32"}


def large_token(folder: Path) -> dict[str, str]:
  values = [*TOKENS[:BAD], np.array([5, 300]), *TOKENS[BAD + 1 :]]
  path = write_records(folder / "data", [ids.astype("<u2").tobytes() for ids in values])
  return {"grain_train_files": path, "grain_file_type": "arrayrecord_uint16"}


WRITERS = [
  (jsonl, "text", rf"data.jsonl:{BAD + 1}: its body is a int"),
  (compressed, "text", rf"data.jsonl.gz:{BAD + 1}: its body is a int"),
  (parquet, "tokens", r"row group 2 of .*data.parquet: a list of column body contains a null"),
  (not_utf8, "text", rf"record {BAD} of .*data.array_record: 'utf-8' codec"),
  (damaged, "tokens", rf"record {BAD} of .*data.array_record cannot be read"),
  (large_token, "tokens", r"data.array_record: it has the token 300"),
]


@pytest.mark.parametrize("packing", ["split", "none"])
@pytest.mark.parametrize(("write", "kind", "message"), WRITERS, ids=[write.__name__ for write, _, _ in WRITERS])
def test_a_bad_record_is_skipped_and_all_others_stay(tmp_path, capsys, write: Callable, kind, message, packing):
  keys = {"train_data_columns": "body", "packing": packing} | write(tmp_path)
  with pytest.raises((ConfigError, DataError), match=message):
    everything(load(tmp_path, **keys))
  (tmp_path / "rest").mkdir()
  rest = {"grain_train_files": write_jsonl(tmp_path / "rest" / "data", "body", REST[kind]), "grain_file_type": "jsonl"}
  want = load(tmp_path, train_data_columns="body", packing=packing, **rest)
  loader = load(tmp_path, max_bad_records=1, **keys)
  found = everything(loader)
  assert found == everything(want)
  assert loader.cursor(2)["bad_records"] == 1 and want.cursor(2)["bad_records"] == 0
  assert re.search(rf"Bad record 1 of at most 1 is skipped: .*{message}", capsys.readouterr().out)
  again = load(tmp_path, max_bad_records=3, **keys)
  assert again.fingerprint() == loader.fingerprint() and everything(again) == found
  with pytest.raises((ConfigError, DataError), match=f"1 bad records, and max_bad_records=0|{message}"):
    everything(load(tmp_path, **keys))


def test_more_bad_records_than_allowed_are_an_error(tmp_path):
  lines = [json.dumps({"text": text}) for text in TEXTS]
  for number in (3, 9, 20):
    lines[number] = "{"
  (tmp_path / "data.jsonl").write_text("\n".join(lines))
  keys = {"grain_train_files": f"{tmp_path}/data.jsonl", "grain_file_type": "jsonl"}
  with pytest.raises(ConfigError, match=r"data.jsonl:21: .*These are 3 bad records, and max_bad_records=2"):
    load(tmp_path, max_bad_records=2, **keys)
  cfg = DataOptions(
    dataset_type="grain", max_target_length=24, dataset_cache_directory=f"{tmp_path}/cache", max_bad_records=3, **keys
  )
  lines = []
  make_loader(cfg, vocab_size=300, global_batch_size=2, split="train", log=lines.append)
  assert [bool(re.search(r"data.jsonl:(4|10|21): ", line)) for line in lines][-3:] == [True] * 3
  assert any("3 bad records are skipped" in line for line in lines)


def test_a_mixture_counts_the_bad_records_of_all_sources(tmp_path):
  (tmp_path / "one").mkdir()
  (tmp_path / "two").mkdir()
  sources = {"one": jsonl(tmp_path / "one"), "two": not_utf8(tmp_path / "two")}
  (tmp_path / "mixture.yml").write_text(
    json.dumps({name: keys | {"weight": 1, "train_data_columns": "body"} for name, keys in sources.items()})
  )
  cfg = DataSection(
    dataset_type="grain", grain_train_mixture_config_path=f"{tmp_path}/mixture.yml", max_target_length=24,
    dataset_cache_directory=f"{tmp_path}/cache", max_bad_records=1,
  )  # fmt: skip
  entries = mixture_files.read(cfg)
  loader_lib.check([entry.options for entry in entries], 300)
  loader = make_loader(cfg, vocab_size=300, global_batch_size=2, split="train", mixture=entries)
  assert loader.cursor(0)["bad_records"] == 2
