"""Responses sampled by replicas, in this process or elsewhere.

- `client`: the trainer's side. Sends weights to the replicas and distributes requests over them.
- `server`: a replica. Checks requests and serves one engine over gRPC.
- `engines`: what samples, in JAX or with vLLM.
- `wire`: the messages between client and server, their limits, and the token.
- `measurer`: metrics of responses, for the trainer and for replicas.
"""
