-- The statements of the database store on SQLite, whose one write lock is the lock of every key.
--
-- Each has a name and a sentence. {table} and {steps} are the tables, {key} and the like are the
-- columns of the first, {step_name} and the like are those of the second, all of them quoted.
-- %(key)s and the like are parameters, and %% is a percent sign. Durations are in seconds.

-- claim --
-- The row of an operation that is new.
INSERT INTO {table} (
    {key}, {scope}, {operation}, {fingerprint}, {owner_token}, {principal}, {method}, {path},
    {caused_by}, {hold}, {expires_at}, {purge_at}, {lease_expires_at}, {created_at},
    {status}, {attempt}, {response_headers}, {error}, {replay_count}
)
VALUES (
    %(key)s, %(scope)s, %(operation)s, %(fingerprint)s, %(owner_token)s, %(principal)s, %(method)s,
    %(path)s, %(caused_by)s, %(hold)s,
    STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW', %(ttl)s || ' seconds'),
    STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW', %(kept)s || ' seconds'),
    STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW', %(lease)s || ' seconds'),
    STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW'), 'in_progress', 1, '[]', '', 0
)
ON CONFLICT DO NOTHING

-- read --
-- The record of a key, its state by the database's clock, and the seconds until its lease
-- and its time to live end.
SELECT
    {id}, {status}, {attempt}, {fingerprint}, {response_status}, {response_headers},
    {response_body},
    {expires_at} <= STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW'),
    COALESCE(
        {lease_expires_at} <= STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW'),
        {created_at} <= STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW', -%(grace)s || ' seconds')
    ),
    {hold},
    (JULIANDAY({lease_expires_at}) - JULIANDAY('NOW')) * 86400.0,
    (JULIANDAY({expires_at}) - JULIANDAY('NOW')) * 86400.0
FROM {table}
WHERE {key} = %(key)s AND {scope} = %(scope)s

-- complete --
-- The response of a claim, as long as it is its owner's.
UPDATE {table} SET
    {status} = 'completed',
    {response_status} = %(code)s,
    {response_headers} = %(headers)s,
    {response_body} = %(body)s,
    {completed_at} = STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW'),
    {lease_expires_at} = NULL
WHERE {id} = %(id)s AND {owner_token} = %(token)s AND {status} = 'in_progress'

-- fence --
-- Takes the write lock, where the transaction has only read so far, if the claim is its owner's.
UPDATE {table} SET {attempt} = {attempt}
WHERE {id} = %(id)s AND {owner_token} = %(token)s AND {status} = 'in_progress'

-- save_step --
-- Adds a step to the row of a claim, as long as it is its owner's.
INSERT INTO {steps} (
    {step_record}, {step_name}, {step_attempt}, {step_result},
    {step_completed_at}
)
SELECT
    {id}, %(name)s, %(attempt)s, %(result)s,
    STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW')
FROM {table}
WHERE {id} = %(id)s AND {owner_token} = %(token)s AND {status} = 'in_progress'

-- extend --
-- Renews the leases of several claims, as far as they are their owners'.
UPDATE {table} SET
    {lease_expires_at} = STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW', %(seconds)s || ' seconds')
WHERE {id} IN (SELECT value FROM JSON_EACH(%(ids)s))
    AND {owner_token} IN (SELECT value FROM JSON_EACH(%(tokens)s))
    AND {status} = 'in_progress'

-- owned --
-- Which of several claims are their owners'.
SELECT {id} FROM {table}
WHERE {id} IN (SELECT value FROM JSON_EACH(%(ids)s))
    AND {owner_token} IN (SELECT value FROM JSON_EACH(%(tokens)s))
    AND {status} = 'in_progress'

-- choose_purgeable --
-- The records that became purgeable first. Of those in progress, only the interrupted ones that are
-- not held.
SELECT {id} FROM {table}
WHERE {purge_at} <= STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW', -%(older_than)s || ' seconds')
    AND (
        {status} <> 'in_progress'
        OR NOT {hold} AND COALESCE(
            {lease_expires_at} <= STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW'),
            {created_at} <= STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW', -%(grace)s || ' seconds')
        )
    )
ORDER BY {purge_at}
LIMIT %(limit)s

-- purge_steps --
-- Deletes the steps of chosen records.
DELETE FROM {steps} WHERE {step_record} IN (SELECT value FROM JSON_EACH(%(ids)s))

-- purge --
-- Deletes the chosen records.
DELETE FROM {table} WHERE {id} IN (SELECT value FROM JSON_EACH(%(ids)s))
