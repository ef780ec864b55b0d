-- Note why the attempt ended and free the key, or hold it for an operator, where the token is the
-- owner's: 1, or 0.

local key, scope, token, call = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local reason, pinned, held = ARGV[5], ARGV[6], ARGV[7]

local record, problem = load(key, scope)
if problem then return broken(problem) end
-- The client may send this very call again, because its connection broke before the reply came.
if record and record.settled == call then return 1 end
if not is_owned(record, token) then return 0 end

local clock = now()
redis.call(
  'HSET', KEYS[1], 'settled', call, 'error', reason,
  'pinned', flag(pinned == '1' or record.pinned == '1')
)
if held == '1' then
  -- In progress under a lease that is over, and a token without an owner.
  redis.call('HSET', KEYS[1], 'hold', '1', 'lease', ms(clock), 'token', origin(token) .. ':held:' .. call)
  keep(ms(clock), '1', record.expires, clock)
  return 1
end
redis.call('HSET', KEYS[1], 'status', 'failed', 'lease', '', 'completed', ms(clock))
forget_at(record.expires, record.lease == '' and 0 or tonumber(record.lease))
return 1
