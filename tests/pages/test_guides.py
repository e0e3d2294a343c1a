"""Guides that tell a reader what to type and what to look for: each line, key and option of them exists."""

from __future__ import annotations

import ast
import pathlib
import re

import kubernetes_validate
import pytest
import yaml
from tests.pages.test_code_blocks import blocks, literals, split
from tests.pages.test_pages import section
from tests.support import needs

from trainer.config.keys import all_keys
from trainer.config.load import load

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = sorted((ROOT / "src").rglob("*.py"))


def test_every_key_that_replaces_one_of_another_trainer_exists():
  table = section((DOCS / "coming_from.md").read_text(), "torchtitan")
  ours = {
    key for row in re.findall(r"^\| `.*\| (.*) \|$", table, flags=re.MULTILINE) for key in re.findall(r"`(\w+)`", row)
  }
  assert len(ours) > 30 and ours <= all_keys().keys(), ours - all_keys().keys()


def test_the_page_about_a_new_jax_has_every_unstable_part_that_the_code_imports():
  page = (DOCS / "how_to" / "move_to_a_new_jax.md").read_text()
  stated = set(re.findall(r"^\| `(jax[\w.]*)` \|", page, flags=re.MULTILINE))
  unstable = ("jax._src", "jax.experimental.", "jax.extend.", "jax.ad_checkpoint", "jaxlib")
  used = {
    name
    for path in SOURCE
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Import | ast.ImportFrom)
    for name in (f"{getattr(node, 'module', None) or ''}.{alias.name}".strip(".") for alias in node.names)
    if name.startswith(unstable)
  }
  unstated = {name for name in used if not any(f"{name}.".startswith(f"{part}.") for part in stated)}
  unused = {part for part in stated if not any(f"{name}.".startswith(f"{part}.") for name in used)}
  assert (unstated, unused) == (set(), set())


@needs.workshop
def test_kubernetes_and_the_launchers_accept_the_objects_for_gpu_clusters():
  objects = [yaml.safe_load(text) for language, text in blocks(DOCS / "run_on_gpu_kubernetes.md") if language == "yaml"]
  assert [node["kind"] for node in objects] == ["Service", "Job", "Job"]
  for node in objects:
    kubernetes_validate.validate(node, "1.34", strict=True)
  for node, module in zip(objects[1:], ("trainer.launch.local", "trainer.launch.agent"), strict=True):
    arguments = node["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[:2] == ["-m", module]
    config, options = split(tuple(arguments[2:]))
    assert set(options) <= literals(module)
    if config:
      load(config, check_paths=False)
    pod = node["spec"]["template"]["spec"]
    assert (pod["securityContext"], pod["restartPolicy"]) == ({"fsGroup": 1000}, "Never")
    rules = node["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    assert 2 in codes["FailJob"] and not {0, 42, 134, 137, 143} & {code for values in codes.values() for code in values}
    assert {"FailJob", "FailIndex"} >= codes.keys() and any(1 in values for values in codes.values())
    # Evictions do not count. The rules are tried in order, so that an evicted pod with code 2 still fails the Job.
    assert rules[-1] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


@pytest.mark.timeout(600)
@pytest.mark.soak
def test_the_tutorial_trains_on_a_text_and_compares_two_runs(server, tmp_path, monkeypatch, capsys):
  """Its commands with two steps. tests/launch has runs of several processes."""
  from trainer.tools import report  # here: a fork may have deleted it

  page = DOCS / "tutorial.md"
  (my_run,) = (text for language, text in blocks(page) if language == "yaml")
  texts = [text for language, text in blocks(page) if not language]
  commands = [line.split() for text in texts for line in re.sub(r" *\\\n *", " ", text).splitlines()]
  monkeypatch.chdir(tmp_path)
  pathlib.Path("my_run.yml").write_text(my_run)
  pathlib.Path("my_text").mkdir()
  for file in (ROOT / "README.md", DOCS / "elastic.md", DOCS / "data.md"):
    (pathlib.Path("my_text") / file.name).write_text(file.read_text())
  two = ["steps=2", "eval_interval=1", "eval_steps=1", "checkpoint_period=2"]
  two += ["enable_report=false"]  # a command of the page writes it
  two += [f"base_output_directory={tmp_path}/runs", f"dataset_cache_directory={tmp_path}/cache"]
  two += [f"dataset_path={tmp_path}/my_text", f"jax_cache_dir={tmp_path}/compiled"]
  trained = []
  for words in commands:
    module, arguments = (words[words.index("-m") + 1], words[words.index("-m") + 2 :]) if "-m" in words else ("", [])
    if module == "trainer" and "--print-config" in arguments:
      load([word for word in arguments if not word.startswith("--")])
    elif module == "trainer":
      log = tmp_path / f"log_{len(trained)}.txt"
      assert server.start([str(tmp_path / "my_run.yml"), *arguments[1:], *two], {}, log).wait(500) == 0, log.read_text()
      trained.append(log.read_text())
    elif module == "trainer.tools.report":
      assert report.main(arguments) == 0, capsys.readouterr().err
  assert (
    len(trained) == 2 and pathlib.Path("comparison.html").exists() and pathlib.Path("runs/mine/report.html").exists()
  )
  for line in ("Losses to beat: ", "completed step: 2, ", "eval at step 2: loss ", "--- sample after step 2 ---"):
    assert line in trained[0]
