-- Say what is there; false where there is nothing.

local record, problem = load(ARGV[1], ARGV[2])
if problem then return broken(problem) end
if not record then return false end
return describe(record, now(), false)
