"""The gateway: one public address in front of every replica. docs/reference/gateway.md says what it promises.

    config      the file it is started with
    bodies      what is read from and written into JSON (pure)
    http1       bytes <-> HTTP/1.1 messages (pure)
    route       which replica takes a request (pure)
    health      failures, ejections, the retry budget (pure)
    peek        what is read of a request (pure)
    stream      the end of an event stream (pure)
    memory      which replica has a stored response (pure)
    fleet       the replicas as they announced themselves (pure: takes `now`)
    access      keys, the admin token, origins (pure)
    quota       requests and tokens a minute, at once, dollars a month (pure)
    usage       what a response says about its tokens (pure)
    answer      answers of our own, in OpenAI's shape (pure)
    exposition  counters and their Prometheus text (pure)
    tally       the numbers of all workers as one
    hold        requests that wait for a replica, fair between keys
    context        what every request under way shares
    accounting  an entry in the books for every request
    ledger      the thread that writes rows and reads keys
    exchange    quotas over gateways that share a PostgreSQL store
    server      client connections
    listener    a listening socket, its connections and its drain
    upstream    connections to engines
    forward     one request from a client to an engine and back
    statics     engines that nobody announces, asked for their health
    call        a request of the gateway's own
    relay       what worker 0 hears on the admin address, told to the others
    shared      counts that the workers share
    workers     one process, or several under a parent
    public      what the public address serves
    admin       what the admin address serves; admin_keys: its calls for keys
    assembly    all of it wired together, and drained

It imports no target, no Ray and no engine: it starts alone in a small container. The store it imports is a leaf.
"""
