"""Times the flash attention of GPUs for rows of one document and packed rows, and compares packed rows with float32.

    python -m end_to_end.benchmarks.attention_gpu [--repeats 11] [--document 512] [T,N,K,H ...]

Each batch has 32,768 tokens in bfloat16. Packed rows have documents of random lengths with the given mean. "packed" is
what a run computes; "mask" is the same batch with the segments numbered backwards, which only the kernel with a mask
computes. The three take turns. The difference is the norm relative to attention by definition in float32, for 2,048
tokens.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from end_to_end.benchmarks.common import positive, random_heads, sizes, time_in_turns

TOKENS = 32768
SHAPES = "2048,16,8,128 8192,16,8,128 32768,16,8,128 4096,64,8,128 4096,32,8,64"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  shape = sizes("T,N,K,H", "2048,16,8,128")
  parser.add_argument("shapes", type=shape, nargs="*", help=f"T,N,K,H; default: {SHAPES}")
  parser.add_argument("--repeats", type=positive, default=11)
  parser.add_argument("--document", type=positive, default=512, help="mean number of tokens of a document")
  args = parser.parse_args()
  import jax

  if jax.default_backend() != "gpu":
    parser.error(f"The default backend of JAX is {jax.default_backend()}, but this benchmark needs a GPU")
  for given in args.shapes or [shape(text) for text in SHAPES.split()]:
    measure(given, args.document, args.repeats)
    print(f"  difference: {difference(given[1:], args.document):.2%}", flush=True)


def batch(shape: list[int], rows: int, document: int) -> tuple[list[Any], dict[str, Any]]:
  """Returns [q, k, v, dout] in bfloat16, and the segment ids of each kind of rows."""
  import jax.numpy as jnp
  import numpy as np

  t, n, k, h = shape
  arrays = random_heads([rows, t, n, k, h], "bfloat16")
  begins = np.random.default_rng(0).random((rows, t)) < 1 / document
  packed = np.cumsum(begins, axis=1, dtype=np.int32) + 1
  ids = {"one document": np.ones_like(packed), "packed": packed, "mask": packed.max() + 1 - packed}
  return arrays, {name: jnp.asarray(value) for name, value in ids.items()}


def measure(shape: list[int], document: int, repeats: int) -> None:
  import jax
  import jax.numpy as jnp

  from trainer.kernels import attention_gpu

  t, n, k, h = shape
  arrays, ids = batch(shape, TOKENS // t, document)
  flash = attention_gpu.build(mesh=None, head_dim=h, seq_len=t, dtype=jnp.bfloat16)
  forward = jax.jit(lambda q, key, v, dout, ids: flash(q, key, v, ids, ids))
  both = jax.jit(lambda q, key, v, dout, ids: jax.vjp(lambda *a: flash(*a, ids, ids), q, key, v)[1](dout))
  mib = both.lower(*arrays, ids["packed"]).compile().memory_analysis().temp_size_in_bytes / 2**20
  print(f"T={t} N={n} K={k} H={h}: temporaries of the backward pass {mib:.0f} MiB")
  for name, program in (("forward", forward), ("forward again and backward", both)):
    seconds = time_in_turns({kind: lambda p=program, i=i: p(*arrays, i) for kind, i in ids.items()}, repeats)
    medians = {kind: statistics.median(times) * 1e3 for kind, times in seconds.items()}
    text = ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in medians.items())
    print(f"  {name}: {text}; mask / packed {medians['mask'] / medians['packed']:.2f}", flush=True)


def difference(heads: list[int], document: int) -> float:
  """Returns the largest relative norm of the differences of output and gradients from the definition in float32."""
  import jax
  import jax.numpy as jnp
  from tests.support.attention_oracle import with_grads

  from trainer.kernels import attention_gpu
  from trainer.kernels.attention_xla import dot_product

  t = 1024
  (q, key, v, dout), ids = batch([t, *heads], 2, document // 8)
  flash = attention_gpu.build(mesh=None, head_dim=heads[2], seq_len=t, dtype=jnp.bfloat16)
  packed = ids["packed"]
  got = jax.jit(with_grads(flash))(q, key, v, packed, dout)
  q, key, v, dout = (x.astype(jnp.float32) for x in (q, key, v, dout))
  with jax.default_matmul_precision("highest"):
    want = jax.jit(with_grads(dot_product))(q, key, v, packed, dout)
  norm = lambda x: float(jnp.linalg.norm(x.astype(jnp.float32).ravel()))
  return max(norm(a.astype(jnp.float32) - b) / norm(b) for a, b in zip(got, want, strict=True))


if __name__ == "__main__":
  main()
