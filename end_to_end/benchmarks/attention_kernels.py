"""Instructions of attention kernels in the TPU compiler's last schedule, without a TPU.

    JAX_PLATFORMS=cpu python -m end_to_end.benchmarks.attention_kernels [--chips v6e ...] [--tokamax TOKAMAX_PYTHON]

Needs libtpu (bash setup.sh --tpu). The compiler writes the instructions of each kernel that it compiles. A TPU starts
one instruction in each cycle. The command prints a Markdown table: the instructions for 2**20 scores (a score: one
query, one key, one head). `stepcost/prices.py` has the same numbers as ATTENTION_INSTRUCTIONS. The instructions are
counted for all blocks of a causal head of T = 8192, H = 128, together with those around the blocks.

The kernels are those of this trainer, and those that MaxText uses: JAX's, and with TOKAMAX_PYTHON tokamax's on 7x.
TOKAMAX_PYTHON is the Python of an environment with tokamax (that of calibration.py has it).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from stepcost import chips, topologies
from stepcost.custom_calls import MATMULS

LENGTH, WIDTH = 8192, 128
PLACES = {"v4": "v4-8", "v5e": "v5e-4", "v5p": "v5p-8", "v6e": "v6e-4", "7x": "tpu7x-8"}
CORES = {"v4": 2, "v5p": 2}  # of one device, which share the heads of a kernel
VMEM_KIB = 65536  # as in the recipes; the trainer's blocks need less
# Instructions of the grid's loop for a block that is computed, and for one that is skipped, as read from schedules. The
# trainer's kernels look up the block of each step, and have no step for a block that is skipped.
AROUND, SKIPPED = 130, 100
TRAINERS_AROUND = {"fwd": 100, "fused": 220}
LIMIT = 1800  # seconds for one compilation


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A forward and a backward kernel of a library. Blocks: (queries, keys, keys computed at a time)."""

  library: Literal["trainer", "jax", "tokamax"]
  forward: tuple[int, int, int]
  backward: tuple[int, int, int]
  fused: bool = True
  layouts: tuple[str, str, str] = ("SEQ_MINOR", "SEQ_MINOR", "HEAD_DIM_MINOR")
  fixed_maximum: float | None = None  # instead of the maximum of the scores

  def name(self, phase: str) -> str:
    """The name in ATTENTION_INSTRUCTIONS."""
    fixed = ", fixed maximum" if self.fixed_maximum is not None and phase == "fwd" else ""
    return f"{PREFIX[self.library]}{phase}{fixed}"

  def file(self, phase: str) -> str:
    """The pattern of the name of the file with the instructions."""
    if self.library == "trainer":
      return f"flash_attention_{'forward' if phase == 'fwd' else 'backward'}"
    return f"splash_m[hq]a_{'dkv' if phase == 'fused' else phase}"


PREFIX = {"trainer": "flash_attention ", "jax": "", "tokamax": "tokamax "}
JAX = (
  Kernel("jax", (1024, 1024, 512), (1024, 2048, 512)),
  Kernel("jax", (1024, 1024, 512), (1024, 1024, 512), fused=False),
)
RECIPES = Kernel("jax", (2048, 2048, 2048), (2048, 2048, 2048))
TOKAMAX = (
  Kernel("tokamax", (2048, 2048, 2048), (2048, 2048, 2048)),
  Kernel("tokamax", (2048, 1024, 512), (2048, 2048, 512)),
  Kernel(
    "tokamax",
    (2048, 2048, 512),
    (1024, 4096, 256),
    layouts=("SEQ_MINOR", "HEAD_DIM_MINOR", "SEQ_MINOR"),
    fixed_maximum=30.0,
  ),
)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--chips", nargs="*", choices=PLACES, default=list(PLACES), help="default: all")
  parser.add_argument("--tokamax", metavar="TOKAMAX_PYTHON")
  parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # chip, fields of a Kernel: compiles, in a new process
  args = parser.parse_args()
  if args.one:
    compile_kernel(args.one[0], Kernel(**json.loads(args.one[1])))
    return
  columns = ("chip", "kernel", "block", "instructions", "share of the peak")
  print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
  for chip in args.chips:
    kernels = (
      trainers(),
      *JAX,
      *([RECIPES] if chip in ("v6e", "7x") else []),
      *(TOKAMAX if args.tokamax and chip == "7x" else ()),
    )
    for kernel in kernels:
      for line in table_rows(chip, kernel, args.tokamax if kernel.library == "tokamax" else sys.executable):
        print(line, flush=True)


def trainers() -> Kernel:
  """Returns the kernels of the trainer."""
  from trainer.kernels.attention_tpu_steps import BLOCK, TILE  # not in the environment of tokamax

  return Kernel("trainer", (BLOCK, BLOCK, TILE), (BLOCK, BLOCK, TILE))


def table_rows(chip: str, kernel: Kernel, python: str) -> Iterator[str]:
  """Yields the lines of the table for the phases of `kernel`, which `python` compiles."""
  with tempfile.TemporaryDirectory() as folder:
    environment = {
      **os.environ,
      **topologies.COMPILER_ENVIRONMENT,
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": str(pathlib.Path(topologies.__file__).parents[1]),
      "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
    }
    # -P: this folder has modules with names of the standard library.
    program = [python, "-P", __file__, "--one", chip, json.dumps(dataclasses.asdict(kernel))]
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
      yield f"| {chip} | {kernel} | {' '.join(done.stderr.split())[-200:]} | | |"
      return
    for phase in ("fwd", "fused") if kernel.fused else ("dkv", "dq"):
      written = [
        path
        for path in pathlib.Path(folder).glob("*-final_bundles.txt")
        if re.search(kernel.file(phase), path.name) and "schedule-analysis" not in path.name
      ]
      assert len(written) == 1, (phase, written)
      block = kernel.forward if phase == "fwd" else kernel.backward
      text, cores = written[0].read_text(), CORES.get(chip, 1)
      if kernel.library == "trainer":
        count = trainers_instructions(ordered_bodies(text), block[0], block[2], TRAINERS_AROUND[phase]) / cores
      else:
        count = instructions_of(bodies(text), *block[:2]) / cores
      share = MATMULS[phase] * 2 * 2**20 * WIDTH / _flops_per_cycle(chip) / count
      size = f"{block[0]} x {block[1]} by {block[2]}"
      yield f"| {chip} | {kernel.name(phase)} | {size} | {count:.0f} | {share:.0%} |"


def _flops_per_cycle(name: str) -> float:
  chip = chips.find(name)
  assert chip is not None and chip.clock_hz, name
  return chip.peak_flops / chip.clock_hz


def parts(text: str) -> list[int]:
  """Returns the number of instructions between two branches or marks, in the order of the program.

  `text` has one line for each instruction, with its address and, where a branch goes to, a mark.
  """
  addresses, ends = [], set()
  for line in text.splitlines():
    found = re.match(r"\s*(0x[0-9a-f]+)\s+(\w\w)?:?", line)
    if found is None:
      continue
    addresses.append(int(found.group(1), 16))
    if "sbr.rel" in line or found.group(2) in ("PF", "PB", "LB", "LE", "LH"):
      ends.add(addresses[-1])
  marks = sorted(ends | {addresses[0], addresses[-1] + 1})
  return [end - begin for begin, end in itertools.pairwise(marks)]


def bodies(text: str) -> tuple[int, int, int]:
  """Returns the number of instructions of a block with a mask, of a block without one, and of all the rest.

  The longest part computes a block. If the second longest is at least half as long, it is the same without a mask;
  otherwise the kernel masks every block.
  """
  counted = parts(text)
  masked, second = sorted(counted, reverse=True)[:2]
  total = sum(counted)
  return (masked, second, total - masked - second) if 2 * second >= masked else (masked, masked, total - masked)


def ordered_bodies(text: str) -> tuple[int, int, int]:
  """Returns the same for a kernel of the trainer. Three parts are the longest: a block without a mask, the tiles of a
  block on the diagonal, and the tile above it, which counts for nothing."""
  counted = parts(text)
  plain, diagonal, above = (counted[at] for at in sorted(sorted(range(len(counted)), key=counted.__getitem__)[-3:]))
  return diagonal, plain, sum(counted) - plain - diagonal - above


def instructions_of(counted: Sequence[int], queries: int, keys: int) -> float:
  """Returns the instructions for 2**20 scores of a causal head in blocks of `queries` x `keys`.

  counted: the instructions of a block with a mask, of a block without one, and of all the rest. Each row of blocks
  executes the rest once.
  """
  masked, plain, rest = counted
  rows, columns = LENGTH // queries, LENGTH // keys
  blocks = [(i, j) for i in range(rows) for j in range(columns) if j * keys < (i + 1) * queries]
  diagonal = sum((j + 1) * keys > i * queries for i, j in blocks)
  count = diagonal * masked + (len(blocks) - diagonal) * plain + len(blocks) * AROUND
  count += (rows * columns - len(blocks)) * SKIPPED + rows * max(0, rest - AROUND - SKIPPED)
  return count / (len(blocks) * queries * keys) * 2**20


def trainers_instructions(counted: Sequence[int], size: int, tile: int, around: int) -> float:
  """Returns the same for square blocks, in which the tiles above the diagonal are not computed."""
  diagonal, plain, rest = counted
  rows, tiles = LENGTH // size, size // tile
  below = rows * (rows - 1) // 2
  count = rows * (diagonal + rest) + below * (plain + around)
  scores = below * size**2 + rows * tiles * (tiles + 1) // 2 * tile**2
  return count / scores * 2**20


def compile_kernel(chip: str, kernel: Kernel) -> None:
  """Compiles `kernel` and its derivative for `chip`, in an environment with its library."""
  import jax
  import jax.numpy as jnp

  device = topologies.devices(topologies.resolve(PLACES[chip]), 1)[0][0]
  if kernel.library == "trainer":
    attend, options = _trainers_attention(device), {}
  else:
    splash = _splash_attention(kernel)
    attend = lambda q, k, v, i: splash(*(x[0].swapaxes(0, 1) for x in (q, k, v)), i[0])
    options = {"xla_tpu_scoped_vmem_limit_kib": str(VMEM_KIB)}
  placed = {"sharding": jax.sharding.SingleDeviceSharding(device)}
  heads = jax.ShapeDtypeStruct((1, LENGTH, 1, WIDTH), jnp.bfloat16, **placed)
  ids = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32, **placed)
  loss = lambda q, k, v, i: attend(q, k, v, i).astype(jnp.float32).sum()
  jax.jit(jax.grad(loss, (0, 1, 2))).lower(heads, heads, heads, ids).compile(compiler_options=options)


def _trainers_attention(device: Any) -> Callable[..., Any]:
  """Returns attention of q, k and v [1, T, 1, H] and ids [1, T] for `device`."""
  import numpy as np
  from jax.sharding import Mesh

  from trainer.config.rules import AXES
  from trainer.kernels import attention_tpu

  mesh = Mesh(np.array(device).reshape((1,) * len(AXES)), AXES)
  attend = attention_tpu.build(mesh=mesh, seq_len=LENGTH, heads_per_key=1, head_dim=WIDTH, itemsize=2)
  return lambda q, k, v, i: attend(q, k, v, i, i)


def _splash_attention(kernel: Kernel) -> Callable[..., Any]:
  """Returns JAX's or tokamax's attention of q, k and v [1, T, H] and ids [T]."""
  import jax
  import numpy as np

  names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
  blocks = dict(zip(names, (*kernel.forward, *kernel.backward)))
  if kernel.library == "tokamax":
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernels
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    layouts = {f"{name}_layout": kernels.QKVLayout[layout] for name, layout in zip("qkv", kernel.layouts)}
    config = kernels.SplashConfig(
      **blocks, **layouts, use_fused_bwd_kernel=True, use_base2_exp=True, max_logit_const=kernel.fixed_maximum
    )
    attend = kernels.make_splash_mha(masks.CausalMask((LENGTH, LENGTH)), config=config, q_seq_shards=1)
  else:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    if not kernel.fused:
      blocks.update(block_q_dq=kernel.backward[0], block_kv_dq=kernel.backward[1])
    sizes = kernels.BlockSizes(**blocks, use_fused_bwd_kernel=kernel.fused)
    mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))])
    with jax.ensure_compile_time_eval():
      attend = kernels.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
  attend = jax.tree.map(np.asarray, attend)
  return lambda q, k, v, ids: attend(q, k, v, kernels.SegmentIds(ids, ids))


if __name__ == "__main__":
  sys.exit(main())
