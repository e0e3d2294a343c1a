"""Replays docker/Dockerfile without Docker, and checks the result. Needs Linux, root, debootstrap and overlayfs.

  python -m end_to_end.replay_dockerfile --target cpu --folder FOLDER --python PREFIX

It makes a Debian root with debootstrap in FOLDER/base, and copies the Python installation PREFIX into its /usr/local,
as the official Python image has it. Then it executes the instructions of the stages that the target needs: every stage
is an overlay over the stage that it starts from. Last, it starts the image's ENTRYPOINT as the image's USER: another
module, the quickstart, and a run that SIGTERM must end with exit code 42.

This does not prove that the base image of the FROM lines exists, nor how Docker itself builds the file. Everything
happens in mount and process namespaces, which end with this command.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support import dockerfile

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docker" / "Dockerfile"
# Libraries that the Python of the official image is linked with.
LIBRARIES = (
  "ca-certificates libbz2-1.0 libexpat1 libffi8 liblzma5 libncursesw6 libreadline8 libsqlite3-0 libssl3 zlib1g"
)


def make_base(folder: Path, suite: str, python: Path) -> Path:
  """Makes the root that stands for the official Python image. Returns the root of an earlier call if there is one."""
  base = folder / "base"
  if not (base / "usr/local/bin/python").exists():
    include = ",".join(LIBRARIES.split())
    command = ["debootstrap", "--variant=minbase", f"--include={include}", suite, str(base)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    local = base / "usr/local"
    shutil.copytree(
      python, local, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "site-packages")
    )
    site = next(python.glob("lib/python3.*")) / "site-packages"
    for path in [*site.glob("pip"), *site.glob("pip-*")]:
      shutil.copytree(path, local / path.relative_to(python))
    (local / "bin/python").unlink(missing_ok=True)
    (local / "bin/python").symlink_to("python3")
    subprocess.run(["chroot", base, "/sbin/ldconfig"], check=True)
    subprocess.run(["chroot", base, "apt-get", "clean"], check=True)
    # As in Docker's images of Debian: apt keeps no caches, which would count as content of a layer.
    settings = (
      'Dir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\nBinary::apt::APT::Keep-Downloaded-Packages "false";\n'
    )
    (base / "etc/apt/apt.conf.d/no-cache").write_text(settings)
  return base


class Image:
  """The stages of a Dockerfile, each as a mounted root below `folder`."""

  def __init__(
    self,
    stages: dict[str, dockerfile.Stage],
    base: Path,
    folder: Path,
    binds: Sequence[Path],
    build_args: dict[str, str],
  ) -> None:
    """build_args: of docker build.

    binds: files and folders of this machine that RUN sees at the same path, such as the configuration of pip.
    """
    self.stages, self.base, self.folder, self.binds, self.build_args = stages, base, folder, binds, build_args

  def root(self, name: str) -> Path:
    return self.folder / name / "root" if name in self.stages else self.base

  def build(self, stage: dockerfile.Stage, build_environment: dict[str, str]) -> None:
    """Mounts the stage's overlay and executes its instructions."""
    layer, root = self.folder / stage.name, self.root(stage.name)
    shutil.rmtree(layer, ignore_errors=True)
    for name in ("upper", "scratch", "root"):
      (layer / name).mkdir(parents=True)
    lower = [self.folder / name / "upper" for name in self.ancestors(stage)] + [self.base]
    options = f"lowerdir={':'.join(map(str, lower))},upperdir={layer}/upper,workdir={layer}/scratch"
    mount("-t", "overlay", "overlay", "-o", options, str(root))
    mount("--rbind", "/dev", str(root / "dev"))
    mount("-t", "proc", "proc", str(root / "proc"))
    mount("--rbind", "/sys", str(root / "sys"))  # libtpu aborts without it
    workdir, user = self.last(stage.base, "WORKDIR") or "/", self.last(stage.base, "USER")
    for step in stage.instructions:
      print(f"  {stage.name}, line {step.line}: {step.keyword} {step.text}"[:140], flush=True)
      if step.keyword == "WORKDIR":
        workdir = step.text
        (root / workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
      elif step.keyword == "USER":
        user = step.text
      elif step.keyword == "COPY":
        self.copy(root, step, workdir)
      elif step.keyword == "RUN":
        assert not user, f"line {step.line}: RUN after USER is not implemented"
        self.run(stage.name, step, workdir, build_environment)

  def ancestors(self, stage: dockerfile.Stage) -> list[str]:
    """The stages below this one, from the top down."""
    below = self.stages.get(stage.base)
    return [stage.base, *self.ancestors(below)] if below else []

  def last(self, name: str, keyword: str) -> str:
    return dockerfile.last(self.stages, name, keyword) if name in self.stages else ""

  def copy(self, root: Path, step: dockerfile.Instruction, workdir: str) -> None:
    """COPY: from the build context without the ignored files, or from another stage."""
    *sources, destination = step.words
    origin = self.root(step.option("from")) if step.option("from") else ROOT
    into = root / os.path.join(workdir, destination).lstrip("/")
    for source in sources:
      path = origin / source.lstrip("/")
      if origin == ROOT and not sent_to_docker(source):
        raise FileNotFoundError(f"line {step.line}: {source} is not in the build context. Add it to the ignore file.")
      if path.is_dir() and origin == ROOT:
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True, ignore=ignore)
        continue
      if path.is_dir():  # cp replaces a link that is there already, as Docker does
        into.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "--archive", f"{path}/.", into], check=True)
        continue
      target = into / path.name if destination.endswith("/") else into
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(path, target)

  def run(self, name: str, step: dockerfile.Instruction, workdir: str, extra: dict[str, str]) -> None:
    """RUN: a shell command as root. The bound files exist only meanwhile."""
    root = self.root(name)
    for path in self.binds:
      target = root / str(path).lstrip("/")
      if path.is_dir():
        target.mkdir(parents=True, exist_ok=True)
      else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
      mount("--bind", str(path), str(target))
    own = dockerfile.environment(self.stages, name, step.line, self.build_args)
    environment = {"HOME": os.path.expanduser("~root")} | own | extra
    subprocess.run(command_in(root, "0:0", environment, workdir, ["/bin/sh", "-c", step.text]), check=True)
    for path in self.binds:
      subprocess.run(["umount", root / str(path).lstrip("/")], check=True)

  def start(self, name: str, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """`docker run --env JAX_PLATFORMS=cpu IMAGE *arguments`, with its output in `log`. The pid is tini's."""
    entrypoint = dockerfile.exec_form(self.last(name, "ENTRYPOINT"))
    environment = dockerfile.environment(self.stages, name) | {"JAX_PLATFORMS": "cpu"}  # no accelerator is needed
    argv = command_in(
      self.root(name), self.last(name, "USER"), environment, self.last(name, "WORKDIR"), [*entrypoint, *arguments]
    )
    with log.open("wb") as file:
      return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)


def mount(*arguments: str) -> None:
  subprocess.run(["mount", *arguments], check=True)


def command_in(root: Path, user: str, environment: dict[str, str], workdir: str, argv: Sequence[str]) -> list[str]:
  """The command that runs argv in `root` as `user` (uid:gid), with exactly this environment, in `workdir`."""
  values = [f"{name}={value}" for name, value in environment.items()]
  change = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', workdir]
  return ["chroot", f"--userspec={user}", str(root), "/usr/bin/env", "-i", *values, *change, *argv]


def sent_to_docker(path: str) -> bool:
  """Whether the ignore file, which ignores everything and then makes exceptions, lets Docker have this path."""
  lines = (FILE.parent / f"{FILE.name}.dockerignore").read_text().splitlines()
  return any(fnmatch.fnmatch(path, line[1:]) for line in lines if line.startswith("!"))


# ---- the checks


def check_modules(image: Image, target: str, folder: Path) -> None:
  """Another module starts, and the user is not root and cannot change the code."""
  log = folder / "preflight.txt"
  code = image.start(target, ["-m", "trainer.tools.preflight", "--help"], log).wait(120)
  assert code == 0 and "preflight" in log.read_text(), (code, log.read_text())
  probe = 'id -u; touch /opt/venv/x 2>/dev/null && echo "can write"; touch "$HOME/.cache/x" /workspace/x && echo cache'
  arguments = (image.last(target, "USER"), dockerfile.environment(image.stages, target), "/")
  argv = command_in(image.root(target), *arguments, ["/bin/sh", "-c", probe])
  printed = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
  assert printed.split() == ["1000", "cache"], printed
  # As KubeRay starts its commands, and with the packages' metadata.
  extras = image.build_args.get("EXTRAS", "").split()
  modules = ["pyarrow", "gcsfs", *(name for name in extras if name != "goodput")]
  code = f"import {', '.join(modules)}, importlib.metadata as m; print(m.version('elastic-trainer-jax'))"
  probe = f"command -v wget; python -c {shlex.quote(code)}"
  probe += "; ray --version" if "ray" in extras else ""
  argv = command_in(image.root(target), *arguments, ["/bin/bash", "-lc", probe])
  printed = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True).stdout
  print(f"user 1000, packages not writable, cache and workspace writable; in a login shell: {printed.split()}")


def check_quickstart(image: Image, target: str, folder: Path, steps: int) -> None:
  """The quickstart ends with exit code 0 and a committed last checkpoint."""
  log, started = folder / "quickstart.txt", time.monotonic()
  code = image.start(target, ["configs/quickstart.yml", f"steps={steps}"], log).wait(900)
  run = image.root(target) / "workspace/runs/quickstart"
  committed = (run / f"checkpoints/{steps}/commit_success.txt").exists()
  assert code == 0 and committed, (code, committed, log.read_text()[-3000:])
  final = [line for line in log.read_text().splitlines() if "completed step" in line][-1]
  print(f"quickstart, {steps} steps: exit 0 after {time.monotonic() - started:.0f} s; {final[:100]}")


def check_sigterm(image: Image, target: str, folder: Path) -> None:
  """SIGTERM to the first process of the container ends with exit code 42 and a committed checkpoint."""
  log = folder / "sigterm.txt"
  process = image.start(target, ["configs/quickstart.yml", "run_name=sigterm", "steps=100000"], log)
  end = time.monotonic() + 300
  while b"completed step: 3," not in log.read_bytes():
    assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
    time.sleep(0.2)
  sent = time.monotonic()
  process.send_signal(signal.SIGTERM)
  code = process.wait(120)
  saved = list((image.root(target) / "workspace/runs/sigterm/checkpoints").glob("*/commit_success.txt"))
  assert code == 42 and saved, (code, log.read_text()[-3000:])
  print(f"SIGTERM: exit 42 after {time.monotonic() - sent:.1f} s, checkpoint {saved[0].parent.name} is committed")


def print_sizes(image: Image, target: str) -> None:
  """The size of each layer, and of the largest packages."""
  layers = [target, *image.ancestors(image.stages[target])]
  for name, path in [("base", image.base), *[(name, image.folder / name / "upper") for name in reversed(layers)]]:
    print(f"{disk_megabytes(path):8,.0f} MB  {name}")
  site = next((image.root(target) / "opt/venv/lib").glob("python3.*/site-packages"))
  sizes = sorted(((disk_megabytes(path), path.name) for path in site.iterdir() if path.is_dir()), reverse=True)
  print("largest packages: " + ", ".join(f"{name} {size:,.0f} MB" for size, name in sizes[:12]))


def disk_megabytes(path: Path) -> float:
  """Megabytes of the files below `path` on its own file system."""
  printed = subprocess.run(["du", "--one-file-system", "--summarize", "--bytes", path], capture_output=True, text=True)
  return int(printed.stdout.split()[0]) / 1e6


def replay(arguments: argparse.Namespace) -> None:
  """Builds the target and runs the checks. To be called inside the namespaces."""
  folder = arguments.folder.absolute()
  folder.mkdir(parents=True, exist_ok=True)
  base = make_base(folder, arguments.suite, arguments.python)
  stages = dockerfile.parse(FILE.read_text())
  image = Image(stages, base, folder, arguments.bind, dict(value.split("=", 1) for value in arguments.build_arg))
  extra = {name: os.environ[name] for name in arguments.build_env}
  started = time.monotonic()
  for stage in dockerfile.order(stages, arguments.target):
    image.build(stage, extra)
  print(f"built {arguments.target} in {time.monotonic() - started:.0f} s")
  print_sizes(image, arguments.target)
  check_modules(image, arguments.target, folder)
  check_quickstart(image, arguments.target, folder, arguments.steps)
  check_sigterm(image, arguments.target, folder)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--target", default="cpu")
  parser.add_argument("--folder", type=Path, required=True, help="for the roots, about 3 GB; not on an overlay itself")
  parser.add_argument("--python", type=Path, required=True, help="prefix of a Python with pip, such as /usr/local")
  parser.add_argument("--suite", default="bookworm", help="of Debian")
  parser.add_argument("--bind", type=Path, nargs="*", default=[Path("/etc/resolv.conf")], help="files that RUN needs")
  parser.add_argument("--build-env", nargs="*", default=[], help="names of variables that RUN needs")
  parser.add_argument("--build-arg", nargs="*", default=[], help="NAME=VALUE of docker build, such as EXTRAS=ray")
  parser.add_argument("--steps", type=int, default=200, help="of the quickstart")
  parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.inside:
    replay(arguments)
    return 0
  again = [sys.executable, "-m", "end_to_end.replay_dockerfile", "--inside", *sys.argv[1:]]
  return subprocess.run(["unshare", "--mount", "--pid", "--fork", "--kill-child", *again], cwd=ROOT).returncode


if __name__ == "__main__":
  sys.exit(main())
