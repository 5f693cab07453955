--[[
lock_release.lua: give a lock back, if it is still this owner's.

KEYS[1] lock   KEYS[2] fence
ARGV[1] server   ARGV[2] owner

Replies, the first that applies:
  {'lost'}      it ran out, or is another owner's; nothing changed
  {'released'}
]]
local LOCK = KEYS[1]
if redis.call('GET', LOCK) ~= ARGV[2] then
  return {'lost'}
end
redis.call('DEL', LOCK)
return {'released'}
