"""The store's tables, as steps from each version to the next. Both databases know these types."""

from __future__ import annotations

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE api_keys (
            id TEXT PRIMARY KEY, name TEXT NOT NULL, models TEXT NOT NULL,
            rpm BIGINT, tpm BIGINT, concurrency BIGINT, budget_usd DOUBLE PRECISION,
            created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION, revoked_at DOUBLE PRECISION)""",
        "CREATE UNIQUE INDEX api_keys_name ON api_keys (name) WHERE revoked_at IS NULL",
        """CREATE TABLE api_secrets (
            hash TEXT PRIMARY KEY, key_id TEXT NOT NULL, ending TEXT NOT NULL,
            created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION)""",
        """CREATE TABLE requests (
            writer TEXT NOT NULL, number BIGINT NOT NULL, at DOUBLE PRECISION NOT NULL, key_id TEXT NOT NULL,
            model TEXT NOT NULL, replica TEXT NOT NULL, prompt_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL,
            output_tokens BIGINT NOT NULL, is_estimate BIGINT NOT NULL, ttft_ms DOUBLE PRECISION,
            duration_ms DOUBLE PRECISION NOT NULL, state TEXT NOT NULL, status BIGINT NOT NULL,
            cost_usd DOUBLE PRECISION, request_id TEXT NOT NULL, PRIMARY KEY (writer, number))""",
        "CREATE INDEX requests_at ON requests (at)",
        """CREATE TABLE spend (
            month TEXT NOT NULL, key_id TEXT NOT NULL, cost_usd DOUBLE PRECISION NOT NULL,
            PRIMARY KEY (month, key_id))""",
        "INSERT INTO meta (name, value) VALUES ('keys_revision', 0)",
    ),
    # `number` is the first row's. SQLite keeps values of type BYTEA as they are.
    (
        """CREATE TABLE folded_requests (
            writer TEXT NOT NULL, number BIGINT NOT NULL, folded BYTEA NOT NULL, PRIMARY KEY (writer, number))""",
    ),
    (
        """CREATE TABLE daily_usage (
            day TEXT NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL, replica TEXT NOT NULL, state TEXT NOT NULL,
            n_requests BIGINT NOT NULL, prompt_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL,
            output_tokens BIGINT NOT NULL, n_estimates BIGINT NOT NULL, cost_usd DOUBLE PRECISION,
            PRIMARY KEY (day, key_id, model, replica, state))""",
    ),
    # `count` of requests and tokens is since the gateway's start, of requests at once it is now.
    (
        """CREATE TABLE gateway_counts (
            gateway TEXT NOT NULL, name TEXT NOT NULL, count BIGINT NOT NULL, at DOUBLE PRECISION NOT NULL,
            PRIMARY KEY (gateway, name))""",
        "CREATE INDEX gateway_counts_at ON gateway_counts (at)",
    ),
    # The most that a gateway counted in the five minutes from `at` on.
    (
        """CREATE TABLE gpu_time (
            at BIGINT NOT NULL, model TEXT NOT NULL, gpu_s DOUBLE PRECISION NOT NULL, busy_s DOUBLE PRECISION NOT NULL,
            usd DOUBLE PRECISION, PRIMARY KEY (at, model))""",
    ),
)
