"""Load tests: what to send, when, how it is timed, and what the times say."""
