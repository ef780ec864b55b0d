-- What all scripts share: a record is one hash, at KEYS[1]. Every field is always there, so that a
-- hash without one of them is no record of ours. Times are milliseconds since 1970 by the clock of
-- the server; '' stands for none.

local VERSION = '1'
local MINUTE = 60000
local ORIGIN = 16
local FIELDS = {
  'version', 'key', 'scope', 'status', 'attempt', 'token', 'fingerprint', 'lease', 'hold',
  'pinned', 'expires', 'settled', 'code', 'headers', 'size', 'body',
}

local function now()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function ms(number)
  return string.format('%.0f', number)
end

local function is_time(text)
  return text == '' or string.match(text, '^%d+$') ~= nil
end

-- What is wrong with a record that has all fields, or nil.
local function flaw(record, key, scope)
  if record.version ~= VERSION then return 'its version is not ' .. VERSION end
  if record.key ~= key or record.scope ~= scope then return 'it is of another key or scope' end
  if not string.match(record.attempt, '^[1-9]%d*$') then return 'its attempt is no number' end
  if record.token == '' or record.fingerprint == '' then return 'it has no owner or no content' end
  if not (is_time(record.lease) and is_time(record.expires)) then return 'a time is no number' end
  if record.status == 'completed' then
    if not string.match(record.code, '^%d+$') then return 'its response has no status' end
    if record.size ~= '' and record.size ~= ms(#record.body) then return 'its body is cut short' end
  elseif record.status ~= 'in_progress' and record.status ~= 'failed' then
    return 'its status is unknown'
  end
  return nil
end

-- The record of the key in the scope: nil where there is none; nil and why where it is no record.
local function load(key, scope)
  if redis.call('EXISTS', KEYS[1]) == 0 then return nil, nil end
  local values = redis.pcall('HMGET', KEYS[1], unpack(FIELDS))
  if values.err then return nil, values.err end
  local record, missing = {}, nil
  for index, name in ipairs(FIELDS) do
    record[name] = values[index]
    if not values[index] then missing = name end
  end
  if missing then return nil, 'it has no ' .. missing end
  local problem = flaw(record, key, scope)
  if problem then return nil, problem end
  return record, nil
end

local function lease_is_over(record, clock)
  return record.status == 'in_progress' and record.lease ~= '' and clock >= tonumber(record.lease)
end

local function is_expired(record, clock)
  return record.status ~= 'in_progress'
    and record.expires ~= '' and clock >= tonumber(record.expires)
end

local function is_owned(record, token)
  return record ~= nil and record.status == 'in_progress' and record.token == token
end

-- What the tokens of all attempts at one record begin with.
local function origin(token)
  return string.sub(token, 1, ORIGIN)
end

-- Let the server forget the record at the end of its retention, but not before the other time.
local function forget_at(expires, earliest)
  if expires == '' then
    redis.call('PERSIST', KEYS[1])
  else
    local retention = tonumber(redis.call('HGET', KEYS[1], 'retention') or 0)
    redis.call('PEXPIREAT', KEYS[1], ms(math.max(tonumber(expires) + retention, earliest)))
  end
end

-- Keep a record in progress for longer than its lease, as long again and at least a minute, so that
-- its owner may be late; and forever if only its owner or an operator may end it.
local function keep(lease, hold, expires, clock)
  if lease == '' or hold == '1' then
    redis.call('PERSIST', KEYS[1])
  else
    local ends = tonumber(lease)
    forget_at(expires, ends + math.max(ends - clock, MINUTE))
  end
end

-- Count a replay and restart the time to live, if requested and possible.
local function note_replay(count, extend, ttl, clock)
  if count == '1' then
    redis.pcall('HINCRBY', KEYS[1], 'replays', 1)
    redis.pcall('HSET', KEYS[1], 'last_replayed', ms(clock))
  end
  if extend == '1' then
    local expires = ttl == '' and '' or ms(clock + tonumber(ttl))
    local written = redis.pcall('HSET', KEYS[1], 'expires', expires)
    if type(written) == 'number' then forget_at(expires, 0) end
  end
end

local function flag(condition)
  return condition and '1' or '0'
end

local function broken(problem)
  return {'broken', problem}
end

-- Milliseconds until the lease ends; '' where there is none.
local function lease_left(record, clock)
  if record.status ~= 'in_progress' or record.lease == '' then return '' end
  return ms(math.max(tonumber(record.lease) - clock, 0))
end

-- Milliseconds until the time to live ends, below 0 after that; '' where it does not end.
local function ttl_left(record, clock)
  return record.expires == '' and '' or ms(tonumber(record.expires) - clock)
end

-- What the store makes a record of.
local function describe(record, clock, counted)
  local interrupted = lease_is_over(record, clock)
  return {
    'record', record.status, record.attempt, record.fingerprint, record.code, record.headers,
    record.size, record.body, flag(is_expired(record, clock)), flag(interrupted),
    flag(interrupted and record.hold == '1'), flag(counted),
    lease_left(record, clock), ttl_left(record, clock),
  }
end
