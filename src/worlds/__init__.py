"""Several JAX worlds as one run: members compute shares of a step, exchange the sums, and lose no step when one dies.

A supervisor (`supervisor`) starts the processes of the members (`workers`), on other hosts through agents (`agent`). It
numbers epochs (which member computes which shares) and commits rounds (a step). A process finds its place in its
environment (`place`) and joins the run (`join`):

  from worlds.join import join
  from worlds.place import Place
  peers = join(Place.read(os.environ))
  peers.connect(send_state, receive_state)            # begins the epoch; members without a state receive it
  sums = peers.exchange.reduce(...)                   # the same bits on every member; raises PeerLost
  seconds = peers.commit("step 1")                    # raises MembershipChanged: exchange the same sums again

Modules, from the bottom: `addresses`, `lines`, `liveness`, `interruptions`, `place`, `membership` (messages,
connections, the coordinator's state machine and its server), `exchange` (sums between members, over TCP), `peers`,
`join`, `workers`, `supervisor`, `agent`.
"""
