--[[
lock_acquire.lua: take a lock for a while, unless somebody else has it.

KEYS[1] lock   KEYS[2] fence
ARGV[1] server   ARGV[2] owner   ARGV[3] lease, ms   ARGV[4] expire_time of the fence, ms

Replies, the first that applies:
  {'held', owner}      another owner has it
  {'acquired', token}  it is this owner's for the lease; the token is higher than any before it

The same owner takes it anew, so a repeat after an unknown result is safe. A lock only saves work:
what is done under it must be right without it, since a server that forgets drops it.
]]
local LOCK, FENCE = KEYS[1], KEYS[2]
local owner = redis.call('GET', LOCK)
if owner and owner ~= ARGV[2] then
  return {'held', owner}
end
redis.call('SET', LOCK, ARGV[2], 'PX', ARGV[3])
local token = redis.call('INCRBY', FENCE, 1)
redis.call('PEXPIREAT', FENCE, ARGV[4])
return {'acquired', token}
