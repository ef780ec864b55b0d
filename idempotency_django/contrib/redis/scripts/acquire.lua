-- Claim the key, or say what is there; a replay is counted on the way.

local key, scope, token, fingerprint = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local ttl, lease, hold = ARGV[5], ARGV[6], ARGV[7]
local count, extend, refuse_expired, retention = ARGV[8], ARGV[9], ARGV[10], ARGV[11]

local clock = now()
local record, problem = load(key, scope)
if problem then return broken(problem) end
local is_over = record and refuse_expired ~= '1' and is_expired(record, clock)
if record and record.fingerprint == fingerprint and not is_over then
  token = origin(record.token) .. string.sub(token, ORIGIN + 1)
end

local function is_free()
  if is_over then return true end
  local same = record.fingerprint == fingerprint
  if record.status == 'failed' then return same or record.pinned ~= '1' end
  return same and record.hold ~= '1' and lease_is_over(record, clock)
end

-- A pin stays with its claim; and the effects of an interrupted owner are unknown.
local function is_pinned()
  if not record or is_over then return false end
  return record.pinned == '1' or (record.status == 'in_progress' and record.token ~= token)
end

local attempt, interrupted = 1, false
if is_owned(record, token) then
  -- The client sent this very claim again, because its connection broke before the response came.
  attempt = tonumber(record.attempt)
elseif record then
  if not is_free() then
    local replayed = record.status == 'completed' and record.fingerprint == fingerprint
      and not is_expired(record, clock)
    local counted = replayed and (count == '1' or extend == '1')
    if counted then note_replay(count, extend, ttl, clock) end
    return describe(record, clock, counted)
  end
  attempt = tonumber(record.attempt) + 1
  interrupted = record.status == 'in_progress'
end

local lease_ends = lease == '' and '' or ms(clock + tonumber(lease))
local expires = ttl == '' and '' or ms(clock + tonumber(ttl))
redis.call(
  'HSET', KEYS[1],
  'version', VERSION, 'key', key, 'scope', scope, 'status', 'in_progress',
  'attempt', ms(attempt), 'token', token, 'fingerprint', fingerprint,
  'lease', lease_ends, 'hold', hold, 'pinned', flag(is_pinned()), 'expires', expires, 'settled', '',
  'code', '', 'headers', '', 'size', '', 'body', '', 'error', '',
  'created', ms(clock), 'completed', '', 'replays', '0', 'last_replayed', '',
  'operation', ARGV[12], 'principal', ARGV[13], 'method', ARGV[14], 'path', ARGV[15],
  'caused_by', ARGV[16], 'retention', retention
)
keep(lease_ends, hold, expires, clock)
return {'claimed', ms(attempt), flag(interrupted), token}
