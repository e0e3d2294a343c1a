"""Histories of slices that are processes: what is hit, and when, is drawn by the seed from the tables below.

Two of three histories hit members, the supervisor, and the output of all processes (a file, a pipe whose reader goes
away, a full disk); slices have one to eight shares, and in a third one member is slow. Every third history is of what
surrounds a run: members that fail at each start, SIGTERM in an evaluation, a folder that moves, saves that fail.
After a loss of all processes the same command starts again. No member may be lost that was not hit. The processes are
forked from one that has imported everything, so that a start does not take seconds.

`local`: replicas take 2 to 40 steps alone, faults come in their rounds, connections between members break, members that
stay away leave their replicas to the others, who take turns, and a run may resume with another number of local steps.
`lanes`: each slice has two processes, one of which is hit; in half of the histories the first one begins each round
later than the second one, so that they hear of changes at different moments; half take local steps. In both kinds the
undisturbed run is one process. `storage`: the run is in a bucket, which fails for 1 to 90 s, and members are killed
meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from end_to_end.histories import oracle
from end_to_end.histories.__main__ import Play, Played
from end_to_end.histories.bucket import Bucket, BucketRun, running
from end_to_end.histories.command import chat_keys
from tests.support.command import is_running
from tests.support.forked_runs import LATE_LANES, SLOWED, Server, StandaloneServer
from tests.support.process_runs import ProcessRun
from tests.support.torchrun_runs import OneWorker

STEPS, EVAL_INTERVAL = 150, 25
KEYS = (f"steps={STEPS}", "checkpoint_period=20", "base_num_decoder_layers=2")
LIMIT_SECONDS = 300.0  # for one life of the supervisor
LIVES = 8  # of the supervisor, at most
PAUSE_SECONDS = 6.0  # longer than the 5 s for which a member may be silent
# Faults that end the launch, and its exit code. A launch that is complete before ends with 0.
ENDS = {"supervisor": -signal.SIGKILL, "all": -signal.SIGKILL, "eval": 42, "move": 42, "ask": 42, "switch": 42}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
CHATS = ("conversations",)  # in the place of keys: the run trains on conversations, with masks
LONGEST_PERIOD = 42  # of checkpoints and evaluations: a multiple of both numbers of local steps


@dataclass(frozen=True)
class Scenario:
  """What a kind of history draws from. faults: {kind of fault: weight}. always: faults that each history has. counts:
  of members that are hit at once. keys: of all runs."""

  faults: dict[str, int]
  always: Sequence[str] = ()
  faults_at_most: int = 4
  counts: Sequence[int] = (1, 1, 2)
  outputs: Sequence[str] = ("file",)
  shares: Sequence[int] = (1,)
  slices: Sequence[int] = (3,)
  slow: float = 0.0  # share of the histories with a slow member
  first: int = 1  # the steps in which faults can begin
  last: int = STEPS - 5
  keys: Sequence[str] = ("eval_interval=7", "eval_steps=2")
  local_steps: Sequence[int] = (1,)
  models: Sequence[Sequence[str]] = ((),)  # keys of a model, or CHATS
  lanes: int = 1  # processes of a slice


MEMBERS = Scenario(
  {"kill": 8, "term": 2, "stop": 1, "supervisor": 1, "all": 1, "again": 3, "pause": 1, "cut": 1},
  outputs=("file", "pipe", "full"),
  shares=(1, 1, 1, 2, 4, 8),
  slices=(3, 3, 4),
  slow=1 / 3,
)
WORLD = Scenario(
  {"starts": 1, "eval": 2, "move": 1, "saves": 2, "kill": 1},
  always=("starts",),
  faults_at_most=3,
  counts=(1, 2),
  last=STEPS - 2 * EVAL_INTERVAL,
  keys=(f"eval_interval={EVAL_INTERVAL}", "eval_steps=200"),  # evaluations that last long enough for SIGTERM
)
LOCAL = Scenario(
  {
    "kill": 8,
    "term": 3,
    "stop": 1,
    "supervisor": 1,
    "all": 2,
    "starts": 3,
    "again": 3,
    "pause": 1,
    "ask": 2,
    "switch": 3,
    "link": 4,
  },
  shares=(1, 1, 2),
  slices=(3, 3, 4),
  slow=1 / 3,
  keys=("eval_steps=2",),
  local_steps=(2, 3, 4, 5, 7, 10, 20, 40),
  models=(
    *[()] * 3,
    CHATS,
    (
      *("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=16"),
      *("routed_bias_update_rate=0.01", "load_balance_loss_weight=0.01"),
    ),
    ("opt_type=muon",),
    ("opt_type=adafactor",),
    ("grad_reduce_dtype=bfloat16",),
  ),
)
LANES = Scenario(
  {"kill": 8, "term": 3, "stop": 1, "supervisor": 1, "all": 1, "again": 3, "link": 1},
  shares=(1, 1, 2),
  slices=(2, 3, 3),
  counts=(1,),
  local_steps=(1, 1, 2, 5),
  lanes=2,
)
STORAGE = Scenario(
  {"bucket": 3, "kill": 4, "all": 1}, always=("bucket", "kill"), faults_at_most=4, counts=(1, 1, 2), slices=(2, 2, 3)
)


@dataclass(frozen=True)
class Fault:
  """What happens once `step` is recorded: `kind` to `count` members, `delay` seconds later.

  kill, stop, term: a signal to members; again: a kill soon after the first fault; supervisor, all: SIGKILL to these;
  pause: the supervisor is stopped for a while; cut: the reader of the output goes away; starts: a member dies, and
  `count` times again while it starts; eval: SIGTERM in an evaluation, to the supervisor or (2) to all; move: SIGTERM,
  and the folder moves; ask: SIGTERM to the supervisor; switch: the same, and another number of local steps; link: the
  connections of members to each other are cut; saves: they fail for a while; bucket: it fails for `seconds`."""

  step: int
  kind: str
  count: int
  delay: float
  seconds: float = 0.0

  def __str__(self) -> str:
    for_seconds = f" for {self.seconds:.0f} s" if self.seconds else ""
    return f"{self.kind}@{self.step}" + (f" x {self.count}" if self.count > 1 else "") + for_seconds


@dataclass(frozen=True)
class Plan:
  """One history."""

  slices: int
  shares: int  # of a slice
  keys: tuple[str, ...]
  options: tuple[str, ...]
  output: str  # of all processes: file, pipe or full
  slowed: str  # a value of forked_runs.SLOWED
  late: str  # a value of forked_runs.LATE_LANES
  of_rounds: tuple[str, ...]  # keys of local steps
  switched: str  # the key of local steps after a switch
  model: tuple[str, ...]  # see Scenario.models
  faults: tuple[Fault, ...]

  @property
  def restarts(self) -> bool:
    """Whether all processes are lost, so that steps are done again."""
    return any(fault.kind in ("all", "supervisor") for fault in self.faults)


def scenario_of(kind: str, seed: int) -> Scenario:
  by_name = {"local": LOCAL, "lanes": LANES, "storage": STORAGE}
  return by_name.get(kind) or (WORLD if seed % 3 == 2 else MEMBERS)


def plan(scenario: Scenario, seed: int) -> Plan:
  """Returns history `seed`."""
  chance = random.Random(seed)
  kinds = [*scenario.always]
  drawn = chance.randrange(1, scenario.faults_at_most + 1) - len(kinds)
  kinds += chance.choices(list(scenario.faults), [*scenario.faults.values()], k=max(0, drawn))
  output = chance.choice(scenario.outputs)
  faults: list[Fault] = []
  for kind in kinds:
    step, delay = chance.randrange(scenario.first, scenario.last), chance.random() * 0.05
    if kind == "again":
      kind, step = "kill", faults[0].step if faults else step
    if kind == "cut" and output != "pipe":
      kind = "kill"
    seconds = chance.choice([1, 5, 20, 90]) * chance.uniform(0.5, 1.0) if kind == "bucket" else 0.0
    faults.append(Fault(step, kind, chance.choice(scenario.counts) + (kind == "starts"), delay, seconds))
  slices, shares = chance.choice(scenario.slices), chance.choice(scenario.shares)
  keys = (f"elastic_min_slice_count={chance.choice([1, 1, -1, 2])}",)
  options = ("--spares", "1") if chance.random() < 0.2 else ()
  slowed = f"{chance.randrange(slices)}:0.03" if chance.random() < scenario.slow else ""
  of_rounds: tuple[str, ...] = ()
  switched = ""
  model = tuple(chance.choice(scenario.models))
  if (count := chance.choice(scenario.local_steps)) > 1:
    other = chance.choice([n for n in scenario.local_steps if n != count and math.lcm(n, count) <= LONGEST_PERIOD])
    both = math.lcm(other, count)
    period, switched = both * max(1, 20 // both), f"local_steps={other}"
    periods = f"checkpoint_period={period}", f"eval_interval={period}"
    outer = chance.choice([("outer_learning_rate=0.7", "outer_momentum=0.9"), ("outer_learning_rate=1",)])
    of_rounds = f"local_steps={count}", *periods, *outer
    faults = [dataclasses.replace(fault, delay=fault.delay * count / 2) for fault in faults]
  ordered = tuple(sorted(faults, key=lambda fault: fault.step))
  late = "0.1" if scenario.lanes > 1 and chance.random() < 0.5 else ""
  return Plan(slices, shares, keys, options, output, slowed, late, of_rounds, switched, model, ordered)


@dataclass(frozen=True)
class Switch:
  """A run goes on with another number of local steps after `step`. records: lines of its metrics before that."""

  step: int
  records: int


class Player:
  """Plays the faults of one history on a run. hit: how often each member was hit. counts: what has happened.
  switches: to the key `switched`, one at most."""

  def __init__(
    self,
    run: ProcessRun,
    output: str,
    faults: Sequence[Fault],
    seed: int,
    bucket: Bucket | None,
    switched: str = "",
  ) -> None:
    self._run, self._output, self._left, self._switched = run, output, list(faults), switched
    self.switch: Switch | None = None
    self._limit = LIMIT_SECONDS + sum(fault.seconds for fault in faults)
    self._chance, self._bucket = random.Random(seed + 1), bucket
    self.hit: Counter[int] = Counter()
    self.counts: Counter[str] = Counter()
    self._supervisor = 0
    self._cut: Callable[[], None] = lambda: None

  def play(self) -> list[str]:
    """Runs to the end. Returns the rules that exit codes and the losses of members break."""
    with self._run.piped() if self._output == "pipe" else contextlib.nullcontext(self._cut) as self._cut:
      if self._output == "full":
        self._run.output = Path("/dev/full")
      broken = self._live()
    losses = [(member, event["error"]) for event in self._run.events("slice_down") for member in event["slice"]]
    for member, times in (Counter(member for member, _ in losses) - self.hit).items():
      reasons = [reason for one, reason in losses if one == member]
      broken.append(f"member {member} is lost {times} times too often: {reasons}")
    return broken

  def _live(self) -> list[str]:
    for _ in range(LIVES):
      last, began = "", time.monotonic()
      with self._run.launched() as supervisor:
        self._supervisor = supervisor.pid
        while self._left and self._wait(lambda: self._run.last_step >= self._left[0].step, self._limit):
          fault = self._left.pop(0)
          time.sleep(fault.delay)
          last = fault.kind
          self.counts[fault.kind] += self._strike(fault)
          if fault.kind in ENDS:  # further faults hit the next life
            supervisor.wait(60)
            self._run.wait_for_processes(seconds=90)
            if fault.kind == "move":
              move(self._run)
            break
        code = self._run.wait(supervisor, self._limit)
      if code == 0:
        return []
      if last == "switch" and self.switch is None:
        self.switch = Switch(self._run.last_step, len(self._run.records("metrics")))
        self._run.keys.append(self._switched)
        self.counts["resumes with another H"] += 1
      if code == 1 and self._bucket and self._bucket.until > began:
        self.counts["start without the bucket"] += 1  # it ends with 1 after a minute, and is started again
      elif code != ENDS.get(last, 42):
        return [f"ended with exit code {code}"]
    return [f"not complete after {LIVES} lives"]

  def _wait(self, condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Waits for the condition. False: the run has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline and is_running(self._supervisor):
      time.sleep(0.005)
    return met

  def _strike(self, fault: Fault) -> int:
    """Makes the fault happen. Returns how many processes it has hit."""
    if fault.kind not in SIGNALS:
      return int(getattr(self, f"strike_{fault.kind}")(fault))
    workers = self._run.workers()
    victims = self._chance.sample(sorted(workers), min(fault.count, len(workers)))
    self.hit.update(victims)
    return sum(self._run.send(workers[member], SIGNALS[fault.kind]) for member in victims)

  def strike_supervisor(self, fault: Fault) -> int:
    return self._run.send(self._supervisor, signal.SIGKILL)

  def strike_all(self, fault: Fault) -> int:
    return sum(self._run.send(pid, signal.SIGKILL) for pid in [self._supervisor, *self._run.workers().values()])

  def strike_ask(self, fault: Fault) -> int:
    return self._run.send(self._supervisor, signal.SIGTERM)

  strike_switch = strike_ask

  def strike_link(self, fault: Fault) -> int:
    """Ends the connections of a member to the others: needs root, and Linux with CONFIG_INET_DIAG_DESTROY."""
    workers = self._run.workers()
    member = self._chance.choice(sorted(workers) or [0])
    found = subprocess.run(["ss", "-Htnp", "state", "established"], capture_output=True, text=True, check=True).stdout
    self.hit.update(workers)  # either end may be taken for lost
    return cut_links(found, workers.get(member, 0), set(workers.values()))

  def strike_pause(self, fault: Fault) -> int:
    self._run.send(self._supervisor, signal.SIGSTOP)
    time.sleep(PAUSE_SECONDS)
    return self._run.send(self._supervisor, signal.SIGCONT)

  def strike_cut(self, fault: Fault) -> int:
    self._cut()
    return 1

  def strike_bucket(self, fault: Fault) -> int:
    assert self._bucket is not None
    self._bucket.fail(fault.seconds, self._chance.choice(Bucket.WAYS))
    return 1

  def strike_move(self, fault: Fault) -> int:
    self._wait(lambda: bool(self._run.workers()))
    return self._run.send(self._supervisor, signal.SIGTERM)

  def strike_eval(self, fault: Fault) -> int:
    run = self._run
    owed = lambda: run.last_step % EVAL_INTERVAL == 0 < run.last_step not in run.evaluations()
    # Owed by an earlier launch, perhaps: a launcher without members has no handler yet.
    self._wait(lambda: bool(run.workers()) and owed())
    asked = [self._supervisor, *run.workers().values()] if fault.count > 1 else [self._supervisor]
    return sum(run.send(pid, signal.SIGTERM) for pid in asked)

  def strike_starts(self, fault: Fault) -> int:
    self._wait(lambda: bool(self._run.workers()))
    victim = self._chance.choice(sorted(self._run.workers()) or [0])
    pid = done = 0
    for _ in range(1 + fault.count):
      new = lambda pid=pid: self._run.workers().get(victim, pid)
      if not self._wait(lambda new=new, pid=pid: new() != pid):
        break
      pid = new()
      time.sleep(self._chance.random() * 0.5 * bool(done))
      self.hit[victim] += 1
      done += self._run.send(pid, self._chance.choice([signal.SIGKILL, signal.SIGABRT]))
    return done

  def strike_saves(self, fault: Fault) -> int:
    """For a while a file is in the place of the folder of the checkpoints. A start would rightly end with 2."""
    run, before = self._run, self._run.last_step
    folder, aside = run.directory / "checkpoints", run.directory / "aside"
    if not self._wait(lambda: run.last_step > before) or not folder.is_dir():
      return 0
    failed = run.count("checkpoint_failed")
    folder.rename(aside)
    folder.touch()
    # The last save must not fail: then the run rightly ends with 1.
    self._wait(lambda: run.count("checkpoint_failed") > failed or run.last_step >= STEPS - EVAL_INTERVAL, 3)
    folder.unlink()
    aside.rename(folder)
    return 1


def cut_links(found: str, pid: int, workers: Container[int]) -> int:
  """Ends the connections of the process `pid` to others of `workers`, from the output of ss. Returns their number."""
  links = re.findall(r"(\S+:\d+) +(\S+:\d+) .*?pid=(\d+),", found)
  owner = {near: int(process) for near, _, process in links}
  own = [(near, far) for near, far, process in links if int(process) == pid and owner.get(far) in workers]
  for near, far in own:
    (host, port), (peer, peer_port) = (end.rsplit(":", 1) for end in (near, far))
    subprocess.run(
      ["ss", "-K", "src", host, "sport", "=", port, "dst", peer, "dport", "=", peer_port],
      check=True,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
  return len(own)


def move(run: ProcessRun) -> None:
  """Moves the run to another place, where its next launch finds it."""
  folder = run.folder.with_name(f"{run.folder.name}-moved")
  run.folder.rename(folder)
  run.keys = [key.replace(str(run.folder), str(folder)) for key in run.keys]
  run.folder, run.directory, run.log = folder, folder / "out" / "run", folder / run.log.name


def check(run: ProcessRun, undisturbed: ProcessRun, restarts: bool, switch: Switch | None) -> list[str]:
  """The rules that a complete run breaks."""
  # Two kills may hit the only two members that have the state. The protocol's model tests that nothing else leads here.
  restarts = restarts or run.count("checkpoint_restored") > 0
  restarts = restarts or sum(event["tier"] == "none" for event in run.events("restore")) > 1
  # The next primary writes what the bucket lacks; lines that a killed primary had sent may arrive after that.
  restarts = restarts or isinstance(run, BucketRun)
  ours, theirs = (oracle.read(each.directory, STEPS, printed=each.printed) for each in (run, undisturbed))
  if switch:
    # Steps that were lost with all processes, and done again with another number of local steps, have other values.
    lines = [line for i, line in enumerate(ours.lines) if i >= switch.records or line["step"] <= switch.step]
    ours = dataclasses.replace(ours, lines=lines)
    if switch.step % int(
      dict(key.partition("=")[::2] for key in run.keys)["eval_interval"]
    ):  # its first part ended there
      lines = [line for line in theirs.lines if "loss" in line or line["step"] != switch.step]
      theirs = dataclasses.replace(theirs, lines=lines)
  again = run.folder.parent / run.folder.name.removesuffix("-moved")
  left = [f"{again} is there again"] if again != run.folder and again.exists() else []
  return left + oracle.broken(ours, theirs, oracle.Promise(STEPS, repeats=restarts))


class Histories:
  """Runs of one kind in a folder, which share compiled programs and undisturbed runs."""

  def __init__(self, folder: Path, kind: str, keys: Sequence[str], server: Server, bucket: Bucket | None) -> None:
    self._folder, self._kind, self._keys, self._server, self._bucket = folder, kind, keys, server, bucket
    self._references: dict[tuple[object, ...], ProcessRun] = {}

  def play(self, seed: int) -> Played:
    scenario = scenario_of(self._kind, seed)
    history = plan(scenario, seed)
    batch = [f"per_device_batch_size={max(2, history.shares)}", f"shares_per_slice={history.shares}"]
    model = history.model
    if model == CHATS:
      model = (*chat_keys(self._folder), f"grain_eval_files={self._folder / 'chats.jsonl'}")
    own = [*KEYS, *scenario.keys, *history.of_rounds, *model, *self._keys, *batch]
    own.append(f"jax_cache_dir={self._folder / 'compiled'}")
    options, environment = history.options, {SLOWED: history.slowed, LATE_LANES: history.late}
    if scenario.lanes > 1:
      own.append(f"devices_per_slice={scenario.lanes}")
      options = (*options, "--processes-per-slice", str(scenario.lanes))
    environment = {name: value for name, value in environment.items() if value}
    run = self._run(f"history-{seed}", [*own, *history.keys], history.slices, options, environment)
    player = Player(run, history.output, history.faults, seed, self._bucket, history.switched)
    try:
      broken = player.play()
      if not broken:
        switch = player.switch
        given = (history.slices, tuple(own), (switch.step, history.switched) if switch else None)
        broken = check(run, self._undisturbed(*given), history.restarts, switch)
    except AssertionError as error:
      broken = [str(error)]
    player.counts["recoveries"] = run.count("recovery")
    replicas = history.slices * history.shares
    rounds = [line["slices"] for line in run.records("metrics") if line.get("replica_distance") is not None]
    player.counts["rounds in turns"] += sum(
      before == now < history.slices and replicas % now > 0 for before, now in itertools.pairwise(rounds)
    )
    player.counts["slow member named"] = sum(event["factor"] > 1 for event in run.events("member_slow"))
    what = f"{', '.join(map(str, history.faults))}; {history}"
    return Played(what, broken, player.counts, run.tail() if broken else "")

  def _undisturbed(self, slices: int, keys: tuple[str, ...], switch: tuple[int, str] | None) -> ProcessRun:
    """The run without faults; switch: after these steps it goes on with another key."""
    shape = slices, keys, switch
    if shape not in self._references:
      folder = f"undisturbed-{len(self._references)}"
      if self._kind in ("local", "lanes"):  # one process computes all replicas
        run: ProcessRun = OneWorker(self._folder / folder, keys, slices=slices, server=self._server)
      else:
        run = self._run(folder, keys, slices)
      if switch:
        step, key = switch
        if step:
          run.keys.append(f"steps={step}")
          assert not (wrong := Player(run, "file", (), 0, None).play()), (wrong, run.tail())
        run.keys += [f"steps={STEPS}", key]
      assert not (wrong := Player(run, "file", (), 0, None).play()), (wrong, run.tail())
      self._references[shape] = run
    return self._references[shape]

  def _run(
    self,
    name: str,
    keys: Sequence[str],
    slices: int,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
  ) -> ProcessRun:
    given = {"slices": slices, "options": options, "server": self._server}
    if self._bucket:
      return BucketRun(self._bucket, self._folder / name, keys, environment=environment or {}, **given)
    return ProcessRun(self._folder / name, keys, environment=environment, **given)


@contextlib.contextmanager
def opened(folder: Path, kind: str, seeds: range, keys: Sequence[str], server: Server | None = None) -> Iterator[Play]:
  """Yields what plays a history. server: forks the processes; None: one of its own."""
  with contextlib.ExitStack() as stack:
    if server is None:
      server = StandaloneServer()
      stack.callback(server.close)
    bucket = stack.enter_context(running(folder / "bucket")) if kind == "storage" else None
    yield Histories(folder, kind, keys, server, bucket).play
