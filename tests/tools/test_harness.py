"""evaluate --tasks gives the numbers of lm-evaluation-harness's own backend for transformers on our export."""

from __future__ import annotations

import json

import pytest
import yaml
from tests.support import hf_folders

from trainer.config.schema import Config
from trainer.data.tokenizer import train_bpe
from trainer.tools import evaluate, export_hf

lm_eval = pytest.importorskip("lm_eval", reason="--tasks needs lm_eval")
pytest.importorskip("torch", reason="the oracle needs torch (CPU)")
pytestmark = pytest.mark.oldest

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
}


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-moe"])
def test_scores_are_those_of_the_harness_on_our_export(tmp_path, name, capsys, monkeypatch):
  monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
  monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
  rows = [
    {
      "text": " ".join(WORDS[(i * 5 + j) % len(WORDS)] for j in range(3 + i % 7)),
      "choices": WORDS[i % 9 : i % 9 + 3],
      "label": i % 3,
      "last": WORDS[i],
    }
    for i in range(18)
  ]
  (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  (tmp_path / "tasks").mkdir()
  for task, fields in TASKS.items():
    files = {"data_files": {"test": str(tmp_path / "rows.jsonl")}}
    content = {"task": task, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"} | fields
    (tmp_path / "tasks" / f"{task}.yaml").write_text(yaml.safe_dump(content))
  cfg = hf_folders.model(name, vocab_size=300)
  (tmp_path / "tokenizer.json").write_text(train_bpe([" ".join(WORDS)] * 9, 300))
  data = {"tokenizer_type": "bpe", "tokenizer_path": str(tmp_path / "tokenizer.json")}
  hf_folders.write_run(tmp_path / "run", Config(model=cfg, data=data), hf_folders.random_params(cfg))
  assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
  capsys.readouterr()
  tasks = ["--tasks", ",".join(TASKS), "--include_path", str(tmp_path / "tasks")]
  assert evaluate.main([str(tmp_path / "run"), *tasks]) == 0
  printed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if line.split(":")[0] in TASKS)
  manager = lm_eval.tasks.TaskManager(include_path=str(tmp_path / "tasks"))
  arguments = {"pretrained": str(tmp_path / "hf"), "dtype": "float32"}
  theirs = lm_eval.simple_evaluate("hf", arguments, list(TASKS), device="cpu", batch_size=4, task_manager=manager)
  for task, values in theirs["results"].items():
    found = dict(pair.rsplit(" ", 1) for pair in printed[task].split(", "))
    for metric, value in values.items():
      if isinstance(value, float) and "stderr" not in metric:
        assert float(found[metric.removesuffix(",none")]) == pytest.approx(value, rel=1e-4), (task, metric)
  assert evaluate.main([str(tmp_path / "run"), "--tasks", "nothing"]) == 2
