--[[
lock_extend.lua: keep a lock for another lease, if it is still this owner's.

KEYS[1] lock   KEYS[2] fence
ARGV[1] server   ARGV[2] owner   ARGV[3] lease, ms

Replies, the first that applies:
  {'lost'}      it ran out, or is another owner's; nothing changed
  {'extended'}
]]
local LOCK = KEYS[1]
if redis.call('GET', LOCK) ~= ARGV[2] then
  return {'lost'}
end
redis.call('SET', LOCK, ARGV[2], 'PX', ARGV[3])
return {'extended'}
