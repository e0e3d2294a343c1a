"""One member of an exchange as a process: `python -m tests.support.exchange_process MEMBER SIZE`.

It prints its address, then reads lines of JSON, {"epoch", "peers", "dealt", "tag"}, as from a supervisor. Each is
answered by {"epoch", "digest": of the total} or {"epoch", "lost": members}. A thread reads the lines, so that a new
epoch interrupts a blocked call. The process ends with its standard input.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
import time

import numpy as np

from worlds.exchange import Exchange, PeerLost

TOKEN = b"a token of processes"


def share_values(share, tag, size):
  """The values of a share, float32 [size], equal in every process that computes it."""
  seed = int.from_bytes(hashlib.blake2b(f"{tag} {share}".encode(), digest_size=4).digest(), "little")
  return np.random.default_rng(seed).standard_normal(size, np.float32)


def digest(values):
  return hashlib.blake2b(values.tobytes()).hexdigest()


def main():
  member, size = int(sys.argv[1]), int(sys.argv[2])
  exchange = Exchange(member, TOKEN, lambda line: print(line, file=sys.stderr))
  requests = queue.SimpleQueue()

  def read():
    for line in sys.stdin:
      request = json.loads(line)
      exchange.interrupt(request["epoch"])
      requests.put(request)
    os._exit(0)

  threading.Thread(target=read, daemon=True).start()
  answer = lambda **values: print(json.dumps(values), flush=True)
  answer(address=exchange.address)
  out, held, held_tag = np.zeros(size, np.float32), {}, None
  while True:
    request = requests.get()
    tag, epoch = request["tag"], request["epoch"]
    dealt = {int(name): shares for name, shares in request["dealt"].items()}
    if tag != held_tag:
      held, held_tag = {}, tag
    held |= {share: share_values(share, tag, size) for share in dealt[member] if share not in held}
    try:
      exchange.connect(epoch, {int(name): address for name, address in request["peers"].items()})
      answer(epoch=epoch, ready=True)
      start = time.monotonic()
      exchange.reduce(tag, {share: held[share] for share in dealt[member]}, dealt, out)
    except PeerLost as error:
      answer(epoch=epoch, lost=error.members)
    else:
      answer(epoch=epoch, seconds=time.monotonic() - start, digest=digest(out))


if __name__ == "__main__":
  main()
