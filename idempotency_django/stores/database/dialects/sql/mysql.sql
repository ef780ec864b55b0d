-- The statements of the database store on MariaDB and MySQL.
--
-- Each has a name and a sentence. {table} and {steps} are the tables, {key} and the like are the
-- columns of the first, {step_name} and the like are those of the second, all of them quoted.
-- %(key)s and the like are parameters. Durations are in seconds.

-- is_read_only --
-- Whether the server takes no writes.
SELECT @@global.read_only

-- lock_key --
-- Takes the lock of a key, which is the session's, unless another session has it.
SELECT GET_LOCK(%(lock)s, 0)

-- unlock_key --
-- Gives the lock back; a session may hold it several times, and must give it back as often.
SELECT RELEASE_LOCK(%(lock)s)

-- claim --
-- The row of an operation that is new; the session has the lock of its key. It looks before it
-- touches the unique index: a row that another transaction has locked, a purge or the count of a
-- replay, would make it wait.
INSERT INTO {table} (
    {key}, {scope}, {operation}, {fingerprint}, {owner_token}, {principal}, {method}, {path},
    {caused_by}, {hold}, {expires_at}, {purge_at}, {lease_expires_at}, {created_at},
    {status}, {attempt}, {response_headers}, {error}, {replay_count}
)
SELECT
    %(key)s, %(scope)s, %(operation)s, %(fingerprint)s, %(owner_token)s, %(principal)s, %(method)s,
    %(path)s, %(caused_by)s, %(hold)s,
    UTC_TIMESTAMP(6) + INTERVAL %(ttl)s SECOND,
    UTC_TIMESTAMP(6) + INTERVAL %(kept)s SECOND,
    UTC_TIMESTAMP(6) + INTERVAL %(lease)s SECOND,
    UTC_TIMESTAMP(6), 'in_progress', 1, '[]', '', 0
FROM DUAL
WHERE NOT EXISTS (SELECT 1 FROM {table} WHERE {key} = %(key)s AND {scope} = %(scope)s)

-- claim_leased --
-- The same for a claim with a lease, which is committed at once and blocks no other transaction, so
-- that it needs no lock; it only must not wait for a transaction that has it.
INSERT INTO {table} (
    {key}, {scope}, {operation}, {fingerprint}, {owner_token}, {principal}, {method}, {path},
    {caused_by}, {hold}, {expires_at}, {purge_at}, {lease_expires_at}, {created_at},
    {status}, {attempt}, {response_headers}, {error}, {replay_count}
)
SELECT
    %(key)s, %(scope)s, %(operation)s, %(fingerprint)s, %(owner_token)s, %(principal)s, %(method)s,
    %(path)s, %(caused_by)s, %(hold)s,
    UTC_TIMESTAMP(6) + INTERVAL %(ttl)s SECOND,
    UTC_TIMESTAMP(6) + INTERVAL %(kept)s SECOND,
    UTC_TIMESTAMP(6) + INTERVAL %(lease)s SECOND,
    UTC_TIMESTAMP(6), 'in_progress', 1, '[]', '', 0
FROM DUAL
WHERE NOT EXISTS (SELECT 1 FROM {table} WHERE {key} = %(key)s AND {scope} = %(scope)s)
    AND IS_FREE_LOCK(%(lock)s)

-- read --
-- The record of a key, its state by the database's clock, and the seconds until its lease
-- and its time to live end.
SELECT
    {id}, {status}, {attempt}, {fingerprint}, {response_status}, {response_headers},
    {response_body},
    {expires_at} <= UTC_TIMESTAMP(6),
    COALESCE(
        {lease_expires_at} <= UTC_TIMESTAMP(6),
        {created_at} <= UTC_TIMESTAMP(6) - INTERVAL %(grace)s SECOND
    ),
    {hold},
    TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {lease_expires_at}) / 1e6,
    TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {expires_at}) / 1e6
FROM {table}
WHERE {key} = %(key)s AND {scope} = %(scope)s

-- complete --
-- The response of a claim, as long as it is its owner's.
UPDATE {table} SET
    {status} = 'completed',
    {response_status} = %(code)s,
    {response_headers} = %(headers)s,
    {response_body} = %(body)s,
    {completed_at} = UTC_TIMESTAMP(6),
    {lease_expires_at} = NULL
WHERE {id} = %(id)s AND {owner_token} = %(token)s AND {status} = 'in_progress'

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
SELECT {id}, %(name)s, %(attempt)s, %(result)s, UTC_TIMESTAMP(6)
FROM {table}
WHERE {id} = %(id)s AND {owner_token} = %(token)s AND {status} = 'in_progress'
FOR UPDATE

-- owned --
-- Which of several claims, given as pairs of id and token, are their owners', locked or not. From
-- the claims to their rows by the primary key: IN might read the whole table.
SELECT row_of.{id}
FROM JSON_TABLE(
    %(claims)s, '$[*]' COLUMNS (id BIGINT PATH '$[0]', token VARCHAR(32) PATH '$[1]')
) mine
STRAIGHT_JOIN {table} row_of FORCE INDEX FOR JOIN (PRIMARY) ON row_of.{id} = mine.id
WHERE row_of.{owner_token} = mine.token AND row_of.{status} = 'in_progress'

-- lock_owned --
-- The same for rows that are not locked; they are locked from here on. No UPDATE skips what is
-- locked, and IN might wait for each locked row.
SELECT row_of.{id}
FROM JSON_TABLE(
    %(claims)s, '$[*]' COLUMNS (id BIGINT PATH '$[0]', token VARCHAR(32) PATH '$[1]')
) mine
STRAIGHT_JOIN {table} row_of FORCE INDEX FOR JOIN (PRIMARY) ON row_of.{id} = mine.id
WHERE row_of.{owner_token} = mine.token AND row_of.{status} = 'in_progress'
FOR UPDATE SKIP LOCKED

-- extend --
-- Renews the leases of locked claims.
UPDATE JSON_TABLE(
    %(claims)s, '$[*]' COLUMNS (id BIGINT PATH '$[0]', token VARCHAR(32) PATH '$[1]')
) mine
STRAIGHT_JOIN {table} row_of FORCE INDEX FOR JOIN (PRIMARY) ON row_of.{id} = mine.id
SET row_of.{lease_expires_at} = UTC_TIMESTAMP(6) + INTERVAL %(seconds)s SECOND

-- choose_purgeable --
-- The records that became purgeable first, past locked rows; they are locked from
-- here on. Of those in progress, only the interrupted ones that are not held.
SELECT {id} FROM {table}
WHERE {purge_at} <= UTC_TIMESTAMP(6) - INTERVAL %(older_than)s SECOND
    AND (
        {status} <> 'in_progress'
        OR NOT {hold} AND COALESCE(
            {lease_expires_at} <= UTC_TIMESTAMP(6),
            {created_at} <= UTC_TIMESTAMP(6) - INTERVAL %(grace)s SECOND
        )
    )
ORDER BY {purge_at}
LIMIT %(limit)s
FOR UPDATE SKIP LOCKED

-- purge_steps --
-- Deletes the steps of chosen records. From the batch to its rows by their index: IN, where few
-- rows are left, would read the whole table and wait for each locked row, so that two
-- purges would deadlock.
DELETE target
FROM JSON_TABLE(%(ids)s, '$[*]' COLUMNS (id BIGINT PATH '$')) batch
STRAIGHT_JOIN {steps} target FORCE INDEX FOR JOIN ({steps_index})
    ON target.{step_record} = batch.id

-- purge --
-- Deletes the chosen records, likewise.
DELETE target
FROM JSON_TABLE(%(ids)s, '$[*]' COLUMNS (id BIGINT PATH '$')) batch
STRAIGHT_JOIN {table} target FORCE INDEX FOR JOIN (PRIMARY) ON target.{id} = batch.id
