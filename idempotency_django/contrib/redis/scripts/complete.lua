-- Store the response, where the token is the owner's: 1, or 0 and nothing was written.

local key, scope, token, call = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local record, problem = load(key, scope)
if problem then return broken(problem) end
-- The client may send this very call again, because its connection broke before the reply came.
if record and record.status == 'completed' and record.settled == call then return 1 end
if not is_owned(record, token) then return 0 end

local clock, ttl = now(), ARGV[9]
local expires = ttl == '' and '' or ms(clock + tonumber(ttl))
redis.call(
  'HSET', KEYS[1], 'status', 'completed', 'lease', '', 'settled', call, 'completed', ms(clock),
  'code', ARGV[5], 'headers', ARGV[6], 'size', ARGV[7], 'body', ARGV[8], 'expires', expires
)
forget_at(expires, 0)
return 1
