"""Tasks of lm-evaluation-harness with local data, one for each kind of request."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

WORDS = "the quick brown fox jumps over a lazy dog while many small birds sing in old trees near water".split()
TASKS = {
  "choices": {
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
  },
  "whole": {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
  },
  "last": {
    "output_type": "loglikelihood",
    "doc_to_text": "{{text}}",
    "doc_to_target": " {{last}}",
    "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
  },
  "written": {
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{last}}",
    "generation_kwargs": {"until": ["e"], "max_new_tokens": 12, "num_beams": 1},
    "metric_list": [{"metric": "chrf"}],
  },
}


def write(folder: Path, rows: int = 8) -> Path:
  """Writes the YAMLs of TASKS and their data of `rows` rows; returns the folder of the YAMLs."""
  data = [
    {
      "text": " ".join(WORDS[(i * 5 + j) % len(WORDS)] for j in range(3 + i % 7)),
      "choices": WORDS[i % 9 : i % 9 + 3],
      "label": i % 3,
      "last": WORDS[i],
    }
    for i in range(rows)
  ]
  (folder / "tasks").mkdir(parents=True)
  (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in data))
  for task, fields in TASKS.items():
    files = {"data_files": {"test": str(folder / "rows.jsonl")}}
    content = {"task": task, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"} | fields
    (folder / "tasks" / f"{task}.yaml").write_text(yaml.safe_dump(content))
  return folder / "tasks"
