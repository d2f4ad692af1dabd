"""Machines by plain OpenSSH: what the target `ssh` is made of, and what any target uses that reaches a host by ssh.

`program` has the three verbs (run, put, get). `contact` learns what a host is (`host_setup` runs there) and brings
penstock to it (`bundle`). `watch` asks hosts which processes live. `tunnels` starts the keepers (`keeper`) that join a
host with the gateway. `orders` is what `penstock.remote_node` is told on a host, and answers.
"""
