-- Let the lease end so many milliseconds from now, where the token is the owner's: 1, or 0.

local key, scope, token, lease = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local record, problem = load(key, scope)
if problem then return broken(problem) end
if not is_owned(record, token) then return 0 end

local clock = now()
local lease_ends = ms(clock + tonumber(lease))
redis.call('HSET', KEYS[1], 'lease', lease_ends)
keep(lease_ends, record.hold, record.expires, clock)
return 1
