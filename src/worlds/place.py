"""Where a process of a run with several worlds belongs, and the environment variables that say it to the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worlds import addresses

SUPERVISOR = "TRAINER_SUPERVISOR"
TOKEN = "TRAINER_TOKEN"
MEMBER = "TRAINER_MEMBER"
LANE = "TRAINER_LANE"
LANES = "TRAINER_LANES"
HOST = "TRAINER_HOST"
SLICE_COORDINATOR = "TRAINER_SLICE_COORDINATOR"
COMMAND = "TRAINER_COMMAND"  # of the launcher, which starts the run again


@dataclass(frozen=True)
class Place:
  """Where the run is, and who this process is in it."""

  supervisors: tuple[str, ...]  # host:port; the supervisor listens at one of them
  token: bytes  # of the job: whoever has it may join
  member: int  # number of the slice, from 0
  lane: int = 0  # number of the process within its slice
  lanes: int = 1  # processes of a slice
  host: str = ""  # address of this host, where the other members connect to; "": where the supervisor is reached from
  slice_coordinator: str = ""  # host:port of jax.distributed within the slice; "" with one process per slice
  gpu: int | None = None  # the only GPU of this host that this process uses; None: all that it sees
  wait_seconds: float = 0.0  # how long the supervisor may take to listen and to answer; 0: it listens already
  can_rehearse: bool = True  # whether the supervisor can kill and stop this process, as a rehearsed fault
  remedy: str = ""  # if the supervisor cannot be reached
  streams: int = 1  # connections to every other member

  def environment(self) -> dict[str, str]:
    """The variables that `read` turns into this place, except for its last five fields."""
    return {
      SUPERVISOR: ",".join(self.supervisors),
      TOKEN: self.token.hex(),
      MEMBER: str(self.member),
      LANE: str(self.lane),
      LANES: str(self.lanes),
      HOST: self.host,
      SLICE_COORDINATOR: self.slice_coordinator,
    }

  @classmethod
  def read(cls, environment: Mapping[str, str], remedy: str = "") -> Place:
    """The place that the environment describes. remedy: how to start such a process. Raises ValueError if the
    environment describes no place."""
    needed = (SUPERVISOR, TOKEN, MEMBER)
    missing = [name for name in needed if not environment.get(name)]
    if missing:
      raise ValueError(f"the environment lacks {', '.join(missing)}, which a launcher sets.\n{remedy}")
    try:
      place = cls(
        tuple(environment[SUPERVISOR].split(",")),
        bytes.fromhex(environment[TOKEN]),
        int(environment[MEMBER]),
        int(environment.get(LANE) or 0),
        int(environment.get(LANES) or 1),
        environment.get(HOST, ""),
        environment.get(SLICE_COORDINATOR, ""),
        remedy=remedy,
      )
      for address in place.supervisors:
        addresses.split(address)
      if place.member < 0 or not 0 <= place.lane < place.lanes or (place.lanes > 1) != bool(place.slice_coordinator):
        raise ValueError("lanes count from 0, and only a slice of several processes has a coordinator")
    except ValueError as error:
      given = {name: environment.get(name) for name in (SUPERVISOR, MEMBER, LANE, LANES, SLICE_COORDINATOR)}
      raise ValueError(f"the environment has {given}: {error}.\nLeave these variables to a launcher.") from error
    return place
