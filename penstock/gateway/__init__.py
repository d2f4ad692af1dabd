"""The gateway: one public address in front of every replica. docs/reference/gateway.md says what it promises.

It imports no target, no Ray and no engine: it starts alone in a small container.
"""
