"""The gateway: one public address in front of every replica. docs/reference/gateway.md says what it promises.

    connections/  sockets: clients, engines, listeners
    routing/      which replica takes a request, and who waits
    accounting/   keys, quotas, usage and their store
    workers/      one process, or several under a parent
    service       all of it wired together, and drained
    public        what the public address serves, through request, forwarding and retries
    admin         what the admin address serves
    metrics       counters and their Prometheus text
    compiled      the hot modules as machine code

It imports no target, no Ray and no engine: it starts alone in a small container.
"""
