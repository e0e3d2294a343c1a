"""A server that stands in for Pathways: rehearse a Pathways job on one machine, with JAX's real proxy client.

  python -m pathways_standin --slices 3 --devices-per-slice 4 [--device-kind "TPU v5 lite"]
              [--port 29000 | --unix PATH] [--at "DISPATCH COMMAND"]
  IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://127.0.0.1:29000 \\
    python your_program.py
  python -m pathways_standin.control kill 1

It speaks the IFRT proxy protocol and computes on CPU devices, grouped into slices that can be lost, hung and revived.
Client and server must run the same jaxlib. It listens on the loopback address only; every user of this machine can
connect as a client, but only the user who started it can send commands: they go through a socket that others cannot
open.

From Python, in any process (it imports neither JAX nor gRPC):

  from pathways_standin.process import start_standin
  server = start_standin(slices=3, devices_per_slice=4, device_kind="cpu")   # waits until it accepts clients
  server.address            # for JAX_BACKEND_TARGET
  server.control("kill", 1) # a dict; raises pathways_standin.process.StandinError
  server.close()

The server ends with the process that started it, also if that process is killed. It inherits the environment.
`arguments.COMMANDS` lists the commands. Errors of arguments end the server with exit code 2, and `exit` with 70.

All devices belong to the server's process, and a lost slice is an administrative state: its data are replaced by
errors.

What it does not model: the time that anything takes on TPUs and between hosts, the numerics of TPUs, the memory limits
of devices, Pathways' resource manager, programs of plugins (persistence, remote profiling), host callbacks.

Modules, from the bottom: `status`, `proxy_messages` (the protocol, from the installed jaxlib), `dtypes`, `devices`,
`placement`, `host_buffers`, `gates`, `arrays`, `executables`, `runtime` (shards and programs), `cpu_slices`
(faults), `client_session`, `*_requests` (one function for each request of the protocol), `grpc_wire` (gRPC),
`fault_commands`, `standin_server`, `control`.
"""
