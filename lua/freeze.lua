--[[
freeze.lua: stop the sale of a segment until it is rebuilt.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch   ARGV[3] reason, one word

Replies, the first that applies:
  {'ignored', epoch}   no meta, another epoch, or frozen for another reason already
  {'frozen', epoch}    the flag is set

It acts only while the engine's epoch is still the caller's, or every call that is in flight at a
rebuild would start another one. It may replace `rebuilding`: that rebuild then can't end.
]]
local meta = redis.call('HMGET', META, 'epoch', 'frozen')
if meta[1] ~= ARGV[2] or (meta[2] and meta[2] ~= 'rebuilding') then
  return {'ignored', meta[1] or '0'}
end
redis.call('HSET', META, 'frozen', ARGV[3])
return {'frozen', meta[1]}
