-- The function by which the database store claims on PostgreSQL, which migration 0007 makes: that of
-- postgresql_functions_1.sql, and it says for how long a response is replayed. What is said there
-- holds here, too: a released file never changes.

-- Claims a key, or says what is there. The result is one array of texts, because a row of columns
-- would cost a scan of the function: the id of a new row; or whether a replay was counted, and the
-- columns of "read" in postgresql.sql; or NULL, where an insert that is not committed holds the key.
CREATE OR REPLACE FUNCTION idempotency_acquire_2(
    p_key text, p_scope text, p_operation text, p_fingerprint text, p_owner_token text,
    p_principal text, p_method text, p_path text, p_caused_by text, p_hold boolean,
    p_ttl interval, p_kept interval, p_lease interval,
    p_lock bigint,  -- the advisory lock of the key
    p_count boolean,  -- whether to count the replay of a completed record of the same request
    p_relaxed boolean,  -- whether the transaction holds nothing else
    p_grace interval  -- how long a record in progress without a lease has an owner
)
RETURNS text[] LANGUAGE plpgsql AS $function$
#variable_conflict use_column
DECLARE
    result text[];
BEGIN
    -- Without the lock, the unique index is not touched either, where one would have to wait.
    IF pg_try_advisory_xact_lock(p_lock) THEN
        INSERT INTO {table} (
            {key}, {scope}, {operation}, {fingerprint}, {owner_token}, {principal}, {method}, {path},
            {caused_by}, {hold}, {expires_at}, {purge_at}, {lease_expires_at}, {created_at},
            {status}, {attempt}, {response_headers}, {error}, {replay_count}
        )
        VALUES (
            p_key, p_scope, p_operation, p_fingerprint, p_owner_token, p_principal, p_method,
            p_path, p_caused_by, p_hold, STATEMENT_TIMESTAMP() + p_ttl,
            STATEMENT_TIMESTAMP() + p_kept, STATEMENT_TIMESTAMP() + p_lease, STATEMENT_TIMESTAMP(),
            'in_progress', 1, '[]', '', 0
        )
        ON CONFLICT ({key}, {scope}) DO NOTHING
        RETURNING ARRAY[{id}::text] INTO result;
        IF FOUND THEN
            RETURN result;
        END IF;
        IF p_count THEN
            -- Past a row that an operator has locked, for example, without the lock of its key.
            UPDATE {table} SET
                {replay_count} = {replay_count} + 1,
                {last_replayed_at} = STATEMENT_TIMESTAMP()
            WHERE {id} = (
                SELECT {id} FROM {table}
                WHERE {key} = p_key AND {scope} = p_scope AND {fingerprint} = p_fingerprint
                    AND {status} = 'completed'
                    AND ({expires_at} > STATEMENT_TIMESTAMP() OR {expires_at} IS NULL)
                FOR UPDATE SKIP LOCKED
            )
            RETURNING ARRAY[
                'true', {id}::text, {status}, {attempt}::text, {fingerprint},
                {response_status}::text, {response_headers}, encode({response_body}, 'hex'),
                'false', 'false', 'false', NULL,
                EXTRACT(EPOCH FROM {expires_at} - STATEMENT_TIMESTAMP())::text
            ] INTO result;
            IF FOUND THEN
                IF p_relaxed THEN
                    -- No commit waits for the disk: losing a count in a crash is harmless.
                    PERFORM set_config('synchronous_commit', 'off', TRUE);
                END IF;
                RETURN result;
            END IF;
        END IF;
    END IF;
    SELECT ARRAY[
        'false', {id}::text, {status}, {attempt}::text, {fingerprint},
        {response_status}::text, {response_headers}, encode({response_body}, 'hex'),
        ({expires_at} <= STATEMENT_TIMESTAMP())::text,
        COALESCE(
            {lease_expires_at} <= STATEMENT_TIMESTAMP(),
            {created_at} <= STATEMENT_TIMESTAMP() - p_grace
        )::text,
        {hold}::text,
        EXTRACT(EPOCH FROM {lease_expires_at} - STATEMENT_TIMESTAMP())::text,
        EXTRACT(EPOCH FROM {expires_at} - STATEMENT_TIMESTAMP())::text
    ] INTO result
    FROM {table}
    WHERE {key} = p_key AND {scope} = p_scope;
    RETURN result;
END
$function$;
