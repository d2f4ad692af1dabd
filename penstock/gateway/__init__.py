"""The gateway: one public address in front of every replica. docs/gateway.md says what it promises.

    config      the file it is started with
    http1       bytes <-> HTTP/1.1 messages (pure)
    route       which replica takes a request (pure)
    fleet       the replicas as they announced themselves (pure: takes `now`)
    access      keys, the admin token, origins (pure)
    answer      answers of our own, in OpenAI's shape (pure)
    exposition  counters and their Prometheus text (pure)
    hold        requests that wait for a replica
    server      client connections
    listener    a listening socket, its connections and its drain
    upstream    connections to engines
    forward     one request from a client to an engine and back
    public      what the public address serves
    admin       what the admin address serves
    assembly    all of it wired together, and drained

It imports no target, no Ray and no engine: it starts alone in a small container.
"""
