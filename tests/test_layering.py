"""Imports point down, only cluster/ reads the environment, and there are no import cycles."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest
from tests.support import first_day, needs

SOURCE = pathlib.Path(__file__).parents[1] / "src"

# Package -> the packages that it may import.
PACKAGES = {
  "input_pipeline": set(),
  "pathways_standin": set(),
  "stepcost": set(),
  "worlds": set(),
  "trainer": {"input_pipeline", "pathways_standin", "stepcost", "worlds"},
}

# From the bottom up. A part may import parts of lower rows, not of its own row.
CORE = (
  {"world"},
  {"process"},
  {"config"},
  {"observe"},
  {"parallel", "cluster"},
  {"kernels", "checkpoint", "elastic"},
  {"models"},
  {"program"},
  {"run"},
  {"drivers"},
  {"train"},
  {"app", "commands"},
)
# Programs around the core, which reach it through run/plugins.py. `defaults` names them to the command and the library.
WORKSHOP = (
  {"services", "report"},
  {"weights"},
  {"preflight", "trust"},
  {"defaults"},
  {"__main__", "library"},
  {"launch", "tools"},
)
LAYERS = CORE + WORKSHOP


@functools.cache
def modules(package: str = "trainer") -> dict[str, ast.Module]:
  """Module name -> syntax tree, of a whole package."""
  found = {}
  for path in sorted((SOURCE / package).rglob("*.py")):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
  return found


def imports(tree: ast.AST, known: dict[str, ast.Module]) -> set[str]:
  """The modules of our packages that `tree` imports, those inside functions included."""
  names = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"line {node.lineno}: imports are absolute here"
      parent = node.module or ""
      names |= {f"{parent}.{alias.name}" if f"{parent}.{alias.name}" in known else parent for alias in node.names}
  return {name for name in names if name.partition(".")[0] in PACKAGES}


def part(module: str) -> str:
  """trainer.models.decoder -> models"""
  return module.split(".")[1]


def violations(importer: str, imported: set[str]) -> list[str]:
  """The forbidden imports of one module, in words."""
  rank = {name: i for i, layer in enumerate(LAYERS) for name in layer}
  assert part(importer) in rank, f"{importer} is new: give its part a place in LAYERS"
  mine = part(importer)
  return [
    f"{importer} imports {name}: {part(name)} is {'beside' if rank[part(name)] == rank[mine] else 'above'} {mine}"
    for name in sorted(imported)
    if name.startswith("trainer.") and part(name) != mine and rank[part(name)] >= rank[mine]
  ]


def test_imports_point_down():
  known = modules()
  wrong = [line for name, tree in known.items() if name != "trainer" for line in violations(name, imports(tree, known))]
  assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@needs.workshop
def test_without_the_programs_around_it_the_core_trains_and_its_tests_are_found(tmp_path):
  """The first day of a fork. `python -m tests.support.first_day` runs these tests."""
  around = set().union(*WORKSHOP) - {"defaults", "__main__", "library"}
  page = (SOURCE.parent / "docs" / "how_to" / "leave_a_part_out.md").read_text()
  rows = dict(re.findall(r"^\| `(\w+)/` \|(.*)", page, flags=re.MULTILINE))
  assert around == set(needs.WORKSHOP) == rows.keys()
  known = modules()
  for module, tree in known.items():
    needed = {part(name) for name in imports(tree, known) if name.startswith("trainer.")} & around
    for name in needed - {part(f"{module}.")}:
      file = "__init__.py" if module == "trainer" else f"{module.rpartition('.')[2]}.py"
      assert f"{file}`" in rows[name] or module == "trainer.defaults", f"{module} needs {name}: say so on the page"
  fork = tmp_path / "fork"
  environment = first_day.make(fork)

  def run(*arguments: str) -> str:
    done = subprocess.run(
      [sys.executable, "-m", *arguments], cwd=fork, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

  keys = "dataset_type=synthetic base_emb_dim=32 base_num_decoder_layers=1 base_mlp_dim=64 vocab_size=300 steps=2"
  printed = run("trainer", "configs/quickstart.yml", *keys.split(), f"base_output_directory={tmp_path}")
  assert "completed step: 2" in printed and not (tmp_path / "quickstart" / "report.html").exists()
  assert {path.name for path in (tmp_path / "quickstart" / "checkpoints").iterdir()} == {"2"}
  run("pytest", "--collect-only", "-q", "-n0")


def test_the_two_drivers_do_not_know_each_other():
  known = modules()
  drivers = {name for name in known if name.startswith("trainer.drivers.")}
  of_one = {"trainer.drivers.one_controller", "trainer.drivers.slice_witness"}
  for mine, others in ((of_one, drivers - of_one), (drivers - of_one, of_one)):
    assert mine and not {name for module in mine for name in imports(known[module], known)} & others


def test_packages_import_only_what_the_table_says():
  assert {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()} == PACKAGES.keys()
  for package, allowed in PACKAGES.items():
    known = modules(package)
    imported = {name.partition(".")[0] for tree in known.values() for name in imports(tree, known)}
    assert imported - {package} == allowed, package


@pytest.mark.parametrize(
  "package, libraries",
  [
    ("pathways_standin", {"jax", "jaxlib", "numpy", "ml_dtypes", "grpc", "google"}),
    ("stepcost", {"numpy", "jax"}),
    ("worlds", {"jax", "ml_dtypes", "numpy"}),
    ("input_pipeline", {"array_record", "fsspec", "google", "grain", "jinja2", "numpy", "pydantic", "tokenizers"}),
  ],
)
def test_packages_of_their_own_need_few_libraries(package, libraries):
  """They are installed without the dependencies of the trainer."""
  roots = set()
  for tree in modules(package).values():
    for node in ast.walk(tree):
      if isinstance(node, ast.Import):
        roots |= {alias.name.partition(".")[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        roots.add((node.module or "").partition(".")[0])
  assert roots - sys.stdlib_module_names - {package} == libraries


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_cycles(package):
  """Also inside a part. Imports under TYPE_CHECKING and inside functions count.

  The package itself is imported before any of its modules, and imports the library's names at their first use.
  """
  known = modules(package)
  graph = {name: imports(tree, known) - {name, package} for name, tree in known.items()}
  while leaves := [name for name, needs in graph.items() if not needs & graph.keys()]:
    for name in leaves:
      del graph[name]
  assert not graph, f"these import each other in a circle: {graph}"


def test_only_the_cluster_reads_the_environment():
  readers = {
    name
    for name, tree in modules().items()
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and ast.unparse(node.value) == "os"
  }
  assert readers, "somebody must look for the launcher"
  assert {part(name) for name in readers} == {"cluster"}, readers


def test_no_two_classes_of_the_trainer_share_a_name():
  places: dict[str, list[str]] = {}
  for name, tree in modules().items():
    for node in tree.body:
      if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        places.setdefault(node.name, []).append(name)
  assert {name: found for name, found in places.items() if len(found) > 1} == {}


def declared(tree: ast.Module) -> set[str]:
  """The attributes that the classes of a module declare, or give themselves."""
  names = set()
  for one in ast.walk(tree):
    if isinstance(one, ast.ClassDef):
      names |= {
        node.target.id for node in one.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
      }
      names |= {node.attr for node in written(one) if ast.unparse(node.value) == "self"}
  return names


def written(tree: ast.AST) -> list[ast.Attribute]:
  return [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]


# Objects of libraries, which have no methods for it, and the options of a command line.
FOREIGN = {
  "gcs_utils",
  "tensorstore_utils",
  "sys",
  "warnings",
  "threading",
  "timer",
  "outage.timer",
  "info",
  "layer.attention",
  "options",
  "found",
}


def test_no_part_writes_to_an_attribute_of_another_ones_object():
  """Who owns an object changes it: a reader of a class finds all that changes it in its file."""
  wrong = []
  for package in ("trainer", "worlds"):
    for name, tree in modules(package).items():
      own = declared(tree)
      strange = [one for one in written(tree) if one.attr not in own and ast.unparse(one.value) not in FOREIGN]
      wrong += [f"{name}:{node.lineno}: {ast.unparse(node)}" for node in strange]
  assert not wrong, "\n".join(wrong)
