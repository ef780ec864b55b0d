-- Note a replay of the response that this attempt stored.

local key, scope, attempt = ARGV[1], ARGV[2], ARGV[3]
local count, extend, ttl = ARGV[4], ARGV[5], ARGV[6]

local record, problem = load(key, scope)
if problem then return broken(problem) end
if not (record and record.status == 'completed' and record.attempt == attempt) then return 0 end
note_replay(count, extend, ttl, now())
return 1
