-- Note why the attempt ended and free the key, where the token is the owner's: 1, or 0.

local key, scope, token, call = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local reason, pinned = ARGV[5], ARGV[6]

local record, problem = load(key, scope)
if problem then return broken(problem) end
-- The client may send this very call again, because its connection broke before the answer came.
if record and record.status == 'failed' and record.settled == call then return 1 end
if not is_owned(record, token) then return 0 end

redis.call(
  'HSET', KEYS[1], 'status', 'failed', 'lease', '', 'settled', call, 'completed', ms(now()),
  'error', reason, 'pinned', flag(pinned == '1' or record.pinned == '1')
)
forget_at(record.expires, record.lease == '' and 0 or tonumber(record.lease))
return 1
