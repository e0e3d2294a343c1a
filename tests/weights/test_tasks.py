"""Scores of tasks: those of lm-evaluation-harness's own models on our export, and the same in a run (eval_tasks)."""

from __future__ import annotations

import functools
import json
import time
import types

import jax
import numpy as np
import pytest
from tests.support import hf_folders, lm_tasks
from tests.support.command import Run, differences
from tests.support.command_runs import KEYS, write_text
from tests.support.process_runs import ProcessRun

from input_pipeline import tokenizer as tokenizers
from input_pipeline.tokenizer import train_bpe
from trainer.config import paths
from trainer.config.errors import ConfigError
from trainer.config.load import load
from trainer.config.schema import Config
from trainer.process.signals import StopRequested
from trainer.run import driver
from trainer.tools import evaluate, export_hf
from trainer.weights import scores
from trainer.weights.scores import Scorer
from trainer.world import SINGLE_WORLD

pytestmark = [pytest.mark.oldest, pytest.mark.timeout(600)]
TASKS = ",".join(lm_tasks.TASKS)


def in_folder(folder):
  """The key with the tasks of a folder."""
  return "eval_tasks=" + ",".join(f"{folder}/{task}" for task in lm_tasks.TASKS)


@pytest.fixture
def lm_eval(tmp_path, monkeypatch):
  monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
  monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
  return pytest.importorskip("lm_eval", reason="the tasks need lm_eval: bash setup.sh --lm_eval")


def scores_of_the_tool(capsys, place, folder):
  """{task: {metric: value}} that trainer.tools.evaluate prints."""
  capsys.readouterr()
  assert evaluate.main([place, "--tasks", TASKS, "--include_path", str(folder)]) == 0
  lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if ": " in line)
  pairs = {task: (pair.rsplit(" ", 1) for pair in lines[task].split(", ")) for task in lm_tasks.TASKS}
  return {task: {metric: float(value) for metric, value in values} for task, values in pairs.items()}


@pytest.mark.parametrize("name", ["llama3.1"])
def test_scores_are_those_of_transformers_on_our_export(tmp_path, name, capsys, lm_eval):
  pytest.importorskip("accelerate", reason="the oracle needs torch (CPU) and accelerate")
  folder = lm_tasks.write(tmp_path)
  cfg = hf_folders.model(name, vocab_size=300, max_position_embeddings=20)  # some contexts are cut
  (tmp_path / "tokenizer.json").write_text(train_bpe([" ".join(lm_tasks.WORDS)] * 9, 300))
  data = {"tokenizer_type": "bpe", "tokenizer_path": str(tmp_path / "tokenizer.json")}
  hf_folders.write_run(tmp_path / "run", Config(model=cfg, data=data), hf_folders.random_params(cfg))
  assert export_hf.main([str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
  found = scores_of_the_tool(capsys, str(tmp_path / "run"), folder)
  manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
  arguments = {"pretrained": str(tmp_path / "hf"), "dtype": "float32"}
  theirs = lm_eval.simple_evaluate(
    "hf", arguments, list(lm_tasks.TASKS), device="cpu", batch_size=4, task_manager=manager, bootstrap_iters=0
  )
  compared = 0
  for task, values in theirs["results"].items():
    for metric, value in values.items():
      if isinstance(value, float) and "stderr" not in metric:
        assert found[task][metric.removesuffix(",none")] == pytest.approx(value, rel=1e-4, abs=1e-6), (task, metric)
        compared += 1
  assert compared == 7 and found["written"]["chrf"] > 0


@pytest.mark.soak
def test_a_run_scores_its_evaluations_once_and_trains_as_without(server, compiled, tmp_path, capsys, lm_eval):
  folder = lm_tasks.write(tmp_path)
  keys = [*KEYS, *write_text(tmp_path), compiled, "steps=4", "checkpoint_period=2", "eval_interval=2", "eval_steps=1"]
  tasks = [in_folder(folder)]
  run, plain = Run(tmp_path / "a", [*keys, *tasks], server.start), Run(tmp_path / "b", keys, server.start)
  assert run.finish() == 0 and plain.finish() == 0, run.printed + plain.printed
  assert run.losses() == plain.losses() and len(run.losses()) == 4
  np.testing.assert_equal(run.arrays(4), plain.arrays(4))
  records = [record for record in run.records("metrics") if "eval_loss" in record]
  assert [record["step"] for record in records] == [2, 4]
  assert [event["scores"] for event in run.events("eval")] == [record["scores"] for record in records]
  expected = scores_of_the_tool(capsys, f"{run.directory}@2", folder)
  assert records[0]["scores"] == {task: pytest.approx(values, rel=1e-5, abs=1e-6) for task, values in expected.items()}
  assert "scores of choices at step 4: acc " in run.printed

  metrics = run.directory / "metrics.jsonl"  # as if the evaluation had been without tasks
  lines = [json.loads(line) for line in metrics.read_text().splitlines()]
  assert lines[-1].pop("scores")
  metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
  assert run.finish("enable_report=true") == 0, run.printed
  made_up = run.records("metrics")[len(lines) :]
  assert [record["scores"] for record in made_up] == [records[1]["scores"]]
  assert "<h2>Tasks</h2>" in (run.directory / "report.html").read_text()


@pytest.mark.soak
def test_slices_of_two_processes_score_and_a_killed_primary_costs_no_score(server, compiled, tmp_path, capsys, lm_eval):
  """The primary is killed while all processes score: the next one records the evaluation with its own scores."""
  folder = lm_tasks.write(tmp_path, rows=16)
  keys = [*write_text(tmp_path), compiled, "vocab_size=258", "steps=4", "checkpoint_period=2", "devices_per_slice=2"]
  tasks = ["eval_interval=2", "eval_steps=1", in_folder(folder)]
  start = lambda name, keys: ProcessRun(
    tmp_path / name, keys, slices=2, options=["--processes-per-slice", "2"], server=server
  )
  run, plain = start("a", [*keys, *tasks]), start("b", keys)
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= 2, supervisor, 240)
    time.sleep(0.5)
    assert run.kill(run.first_primary)
    assert not run.evaluations()
    assert run.wait(supervisor, 400) == 0, run.tail()
  with plain.launched() as supervisor:
    assert plain.wait(supervisor) == 0, plain.tail()
  assert differences(run, plain, 4) == [] and run.count("slice_down") == 1
  records = {record["step"]: record for record in run.records("metrics") if "eval_loss" in record}
  assert list(records) == [2, 4] and all(len(losses) == 1 for losses in run.evaluations().values())
  for step, record in records.items():
    expected = scores_of_the_tool(capsys, f"{plain.directory}@{step}", folder)
    assert record["scores"] == {task: pytest.approx(values, rel=1e-5, abs=1e-6) for task, values in expected.items()}


def test_what_cannot_be_scored_is_refused(tmp_path, monkeypatch):
  config = lambda *keys: load(["configs/quickstart.yml", f"base_output_directory={tmp_path}", *keys])
  monkeypatch.setattr(paths, "is_installed", lambda package: package != "lm_eval")
  with pytest.raises(ConfigError, match=r"eval_tasks=a: needs the package lm_eval[\s\S]*setup.sh --lm_eval"):
    config("eval_tasks=a")
  monkeypatch.undo()
  wanted = config().model_copy(update={"observe": config().observe.model_copy(update={"eval_tasks": "nothing"})})
  data = types.SimpleNamespace(evaluations={}, train=types.SimpleNamespace(tokenizer=object()))
  with pytest.raises(ConfigError, match="has no evaluation data"):
    Scorer(wanted, data)


@pytest.mark.parametrize(
  "options, said",
  [
    ({"num_beams": 4, "top_p": 0.9}, "num_beams=4, which"),
    ({"repetition_penalty": 1.2}, "repetition_penalty=1.2, which"),
    ({}, "256 new tokens .* max_position_embeddings=20"),
  ],
)
def test_a_text_with_options_that_would_have_no_effect_is_refused(lm_eval, options, said):
  from trainer.weights.harness import Harness

  cfg = hf_folders.model("llama3.1", max_position_embeddings=20)
  model = types.SimpleNamespace(functions=types.SimpleNamespace(cfg=cfg))
  with pytest.raises(ConfigError, match=said):
    Harness(model).generate_until([types.SimpleNamespace(args=("a", options))])


def test_a_continuation_without_a_score_is_refused_by_task_and_document(lm_eval, tmp_path, monkeypatch):
  """A continuation that is all in the last token of its context would have the best possible score, 0."""
  from trainer.weights.harness import Harness

  cfg = hf_folders.model("llama3.1", max_position_embeddings=4096)
  tokenizer = tokenizers.BpeTokenizer(train_bpe(["the fox"] * 9, 300))
  model = types.SimpleNamespace(functions=types.SimpleNamespace(cfg=cfg), tokenizer=tokenizer)
  harness = Harness(model, longest=5)
  monkeypatch.setattr(harness, "_loglikelihood_tokens", lambda rows: [(before, own) for _, before, own in rows])
  request = lambda *texts: types.SimpleNamespace(args=texts, task_name="animals", doc_id=3)
  for context, continuation, count in (("th", "e", 0), ("the", "", 0), ("", "", 0), ("the", " fox" * 6, 6)):
    with pytest.raises(ConfigError, match=f"task animals, document 3: the continuation .* has {count} tokens of"):
      harness.loglikelihood([request("the", " fox"), request(context, continuation)])
  begin, the, fox = tokenizer.bos_id, *tokenizer.encode("the fox")
  found = harness.loglikelihood([request("", "the"), request("the", " fox"), request("the ", "fox")])
  assert found == [([begin], [the]), ([begin, the], [fox]), ([begin, the], [fox])]
  monkeypatch.setattr(tokenizer, "bos_id", None)
  # Blanks belong to the continuation. Then its first token needs one before it too.
  assert harness.loglikelihood([request(" ", "fox")]) == [([tokenizer.eos_id], [fox])]
  monkeypatch.setattr(tokenizer, "encode", lambda text: [])
  with pytest.raises(ConfigError, match="task animals, document 3: the tokenizer gives no token for 'fox'"):
    harness.loglikelihood_rolling([request("fox")])


def test_a_task_that_fails_is_a_warning_of_the_run(tmp_path, monkeypatch):
  class Failing:
    def score(self, model):
      raise KeyError("a field that the data do not have")

  warnings = []
  log = types.SimpleNamespace(warning=warnings.append)
  scorer = of_tasks(tmp_path, monkeypatch, Failing())
  scorer.open(types.SimpleNamespace(log=log), None)
  assert scorer.evaluates({"a": jax.numpy.ones(1)}, 7, lambda work, what: work()) is None
  assert warnings == ["no scores of eval_tasks at step 7: KeyError: 'a field that the data do not have'"]


def of_tasks(tmp_path, monkeypatch, tasks) -> Scorer:
  """The scorer of a run with these tasks."""
  monkeypatch.setattr(scores.Tasks, "find", lambda *_: tasks)
  monkeypatch.setattr(scores.Model, "on_one_device", lambda *_: None)
  config = load(["configs/quickstart.yml", f"base_output_directory={tmp_path}"])
  observe = config.observe.model_copy(update={"eval_tasks": "broken"})
  data = types.SimpleNamespace(evaluations={"": object()}, train=types.SimpleNamespace(tokenizer=object()))
  return Scorer(config.model_copy(update={"observe": observe}), data)


def test_scores_that_take_long_stop_with_the_process(tmp_path, monkeypatch):
  tasks = types.SimpleNamespace(score=lambda model: time.sleep(600))
  scorer = of_tasks(tmp_path, monkeypatch, tasks)
  stop = functools.partial(driver.unless_stopped, SINGLE_WORLD, stop=lambda: True)
  with pytest.raises(StopRequested):
    scorer.evaluates({"a": jax.numpy.ones(1)}, 7, stop)


def test_unknown_tasks_and_folders_are_refused(tmp_path, capsys, lm_eval):
  assert evaluate.main([str(tmp_path), "--tasks", "a", "--include_path", str(tmp_path / "none")]) == 2
  assert "none: is no folder" in capsys.readouterr().err
