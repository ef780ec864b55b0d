-- The statements of the database store on PostgreSQL.
--
-- Each has a name and a sentence. {table} and {steps} are the tables, {key} and the like are the
-- columns of the first, {step_name} and the like are those of the second, all of them quoted.
-- %(key)s and the like are parameters. Durations are in seconds, but for those of a claim: texts
-- that are intervals once they are parsed. The planner would work out each product by executing it.

-- is_read_only --
-- Whether the server takes no writes, because it is a standby.
SELECT pg_is_in_recovery()

-- claim --
-- The row of an operation that is new, if the lock of its key can be had without waiting. Whoever
-- does not get the lock does not touch the unique index either, where it would have to wait.
INSERT INTO {table} (
    {key}, {scope}, {operation}, {fingerprint}, {owner_token}, {principal}, {method}, {path},
    {caused_by}, {hold}, {expires_at}, {purge_at}, {lease_expires_at}, {created_at},
    {status}, {attempt}, {response_headers}, {error}, {replay_count}
)
SELECT
    %(key)s, %(scope)s, %(operation)s, %(fingerprint)s, %(owner_token)s, %(principal)s, %(method)s,
    %(path)s, %(caused_by)s, %(hold)s,
    STATEMENT_TIMESTAMP() + %(ttl)s::interval,
    STATEMENT_TIMESTAMP() + %(kept)s::interval,
    STATEMENT_TIMESTAMP() + %(lease)s::interval,
    STATEMENT_TIMESTAMP(), 'in_progress', 1, '[]', '', 0
WHERE pg_try_advisory_xact_lock(%(lock)s)
ON CONFLICT ({key}, {scope}) DO NOTHING
RETURNING {id}

-- claim_many --
-- The same for many operations, in the order of the JSON that describes them.
INSERT INTO {table} (
    {key}, {scope}, {operation}, {fingerprint}, {owner_token}, {principal}, {method}, {path},
    {caused_by}, {hold}, {expires_at}, {purge_at}, {lease_expires_at}, {created_at},
    {status}, {attempt}, {response_headers}, {error}, {replay_count}
)
SELECT
    key, scope, operation, fingerprint, owner_token, principal, method, path, caused_by, hold,
    STATEMENT_TIMESTAMP() + ttl,
    STATEMENT_TIMESTAMP() + kept,
    STATEMENT_TIMESTAMP() + lease,
    STATEMENT_TIMESTAMP(), 'in_progress', 1, '[]', '', 0
FROM json_to_recordset(%(rows)s::json) AS new (
    key text, scope text, operation text, fingerprint text, owner_token text, principal text,
    method text, path text, caused_by text, hold boolean, ttl interval,
    kept interval, lease interval, lock bigint
)
WHERE pg_try_advisory_xact_lock(lock)
ON CONFLICT ({key}, {scope}) DO NOTHING
RETURNING {owner_token}, {id}

-- read --
-- The record of a key, its state by the database's clock, and the seconds until its lease
-- and its time to live end.
SELECT
    {id}, {status}, {attempt}, {fingerprint}, {response_status}, {response_headers},
    {response_body},
    {expires_at} <= STATEMENT_TIMESTAMP(),
    COALESCE(
        {lease_expires_at} <= STATEMENT_TIMESTAMP(),
        {created_at} <= STATEMENT_TIMESTAMP() - %(grace)s::double precision * INTERVAL '1 second'
    ),
    {hold},
    EXTRACT(EPOCH FROM {lease_expires_at} - STATEMENT_TIMESTAMP())::double precision,
    EXTRACT(EPOCH FROM {expires_at} - STATEMENT_TIMESTAMP())::double precision
FROM {table}
WHERE {key} = %(key)s AND {scope} = %(scope)s

-- read_many --
-- The same for many keys, each record after its key and scope. A join might read the whole table.
-- The scopes are compared once the index has found the keys: it would look for each pair of both.
SELECT
    {key}, {scope},
    {id}, {status}, {attempt}, {fingerprint}, {response_status}, {response_headers},
    {response_body},
    {expires_at} <= STATEMENT_TIMESTAMP(),
    COALESCE(
        {lease_expires_at} <= STATEMENT_TIMESTAMP(),
        {created_at} <= STATEMENT_TIMESTAMP() - %(grace)s::double precision * INTERVAL '1 second'
    ),
    {hold},
    EXTRACT(EPOCH FROM {lease_expires_at} - STATEMENT_TIMESTAMP())::double precision,
    EXTRACT(EPOCH FROM {expires_at} - STATEMENT_TIMESTAMP())::double precision
FROM {table}
WHERE {key} = ANY (%(keys)s) AND {scope} || '' = ANY (%(scopes)s)

-- replay --
-- Counts a replay of a completed record and reads the record. It does so under the lock of the key,
-- like whatever holds a row until the transaction ends, and past a row that somebody has locked
-- without it, such as an operator.
UPDATE {table} SET
    {replay_count} = {replay_count} + 1,
    {last_replayed_at} = STATEMENT_TIMESTAMP()
WHERE {id} = (
    SELECT {id} FROM {table}
    WHERE {key} = %(key)s AND {scope} = %(scope)s AND {fingerprint} = %(fingerprint)s
        AND {status} = 'completed'
        AND ({expires_at} > STATEMENT_TIMESTAMP() OR {expires_at} IS NULL)
        AND pg_try_advisory_xact_lock(%(lock)s)
    FOR UPDATE SKIP LOCKED
)
RETURNING
    {id}, {status}, {attempt}, {fingerprint}, {response_status}, {response_headers},
    {response_body},
    FALSE, FALSE, FALSE, NULL,
    EXTRACT(EPOCH FROM {expires_at} - STATEMENT_TIMESTAMP())::double precision

-- replay_relaxed --
-- The same in a transaction that holds nothing else: its commit does not wait for the disk, because
-- losing a count in a crash is harmless.
UPDATE {table} SET
    {replay_count} = {replay_count} + 1,
    {last_replayed_at} = STATEMENT_TIMESTAMP()
WHERE {id} = (
    SELECT {id} FROM {table}
    WHERE {key} = %(key)s AND {scope} = %(scope)s AND {fingerprint} = %(fingerprint)s
        AND {status} = 'completed'
        AND ({expires_at} > STATEMENT_TIMESTAMP() OR {expires_at} IS NULL)
        AND pg_try_advisory_xact_lock(%(lock)s)
        AND set_config('synchronous_commit', 'off', true) = 'off'
    FOR UPDATE SKIP LOCKED
)
RETURNING
    {id}, {status}, {attempt}, {fingerprint}, {response_status}, {response_headers},
    {response_body},
    FALSE, FALSE, FALSE, NULL,
    EXTRACT(EPOCH FROM {expires_at} - STATEMENT_TIMESTAMP())::double precision

-- complete --
-- The response of a claim, as long as it is its owner's.
UPDATE {table} SET
    {status} = 'completed',
    {response_status} = %(code)s,
    {response_headers} = %(headers)s,
    {response_body} = %(body)s,
    {completed_at} = STATEMENT_TIMESTAMP(),
    {lease_expires_at} = NULL
WHERE {id} = %(id)s AND {owner_token} = %(token)s AND {status} = 'in_progress'
RETURNING {id}

-- complete_many --
-- The same for many claims. The rows are named twice, so that they are found by their index even if
-- the statistics say that the table is empty.
UPDATE {table} SET
    {status} = 'completed',
    {response_status} = response.code,
    {response_headers} = response.headers,
    {response_body} = decode(response.body, 'base64'),
    {completed_at} = STATEMENT_TIMESTAMP(),
    {lease_expires_at} = NULL
FROM json_to_recordset(%(responses)s::json) AS response (
    id bigint, token text, code integer, headers text, body text
)
WHERE {table}.{id} = ANY (%(ids)s) AND {table}.{id} = response.id
    AND {owner_token} = response.token AND {status} = 'in_progress'
RETURNING {owner_token}

-- fence --
-- Locks the row of a claim, as long as it is its owner's, until the transaction ends.
SELECT 1 FROM {table}
WHERE {id} = %(id)s AND {owner_token} = %(token)s AND {status} = 'in_progress'
FOR UPDATE

-- save_step --
-- Locks the row likewise, and adds a step to it.
INSERT INTO {steps} (
    {step_record}, {step_name}, {step_attempt}, {step_result},
    {step_completed_at}
)
SELECT
    {id}, %(name)s, %(attempt)s, %(result)s, STATEMENT_TIMESTAMP()
FROM {table}
WHERE {id} = %(id)s AND {owner_token} = %(token)s AND {status} = 'in_progress'
FOR UPDATE
RETURNING {id}

-- extend --
-- Renews the leases of several claims, that still belong to their owners and are not locked.
-- The rows are chosen once. IN would make it a join, which may read the whole table.
UPDATE {table} SET
    {lease_expires_at} = STATEMENT_TIMESTAMP() + %(seconds)s::double precision * INTERVAL '1 second'
WHERE {id} = ANY (ARRAY(
    SELECT {id} FROM {table}
    WHERE {id} = ANY (%(ids)s) AND {owner_token} = ANY (%(tokens)s) AND {status} = 'in_progress'
    FOR UPDATE SKIP LOCKED
))
RETURNING {id}

-- owned --
-- Which of several claims are their owners', locked or not.
SELECT {id} FROM {table}
WHERE {id} = ANY (%(ids)s) AND {owner_token} = ANY (%(tokens)s) AND {status} = 'in_progress'

-- purge --
-- Deletes the records that became purgeable first, past locked rows. Of those in
-- progress, only the interrupted ones that are not held. The batch is chosen once, as in extend.
DELETE FROM {table}
WHERE {id} = ANY (ARRAY(
    SELECT {id} FROM {table}
    WHERE {purge_at}
            <= STATEMENT_TIMESTAMP() - %(older_than)s::double precision * INTERVAL '1 second'
        AND (
            {status} <> 'in_progress'
            OR NOT {hold} AND COALESCE(
                {lease_expires_at} <= STATEMENT_TIMESTAMP(),
                {created_at}
                    <= STATEMENT_TIMESTAMP() - %(grace)s::double precision * INTERVAL '1 second'
            )
        )
    ORDER BY {purge_at}
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
))
RETURNING {id}

-- purge_steps --
-- Deletes the steps of purged records, in a statement of its own: it sees what a late owner has
-- added until its record was locked.
DELETE FROM {steps} WHERE {step_record} = ANY (%(ids)s)
