"""The gateway: one public address in front of every replica. docs/reference/gateway.md says what it promises.

A request's way: `connections.client` reads it, `public` finds its model, `request` says what it asks for, `accounting`
checks its key, `routing` chooses a replica or lets it wait, `forwarding` sends it by `connections.engine`, and
`retries` says what happens when that fails. `service` wires all of it together; `workers` runs it in several processes;
`admin` is the address of nodes and controller.

It imports no target, no Ray and no engine: it starts alone in a small container.
"""
