--[[
rebuild_end.lua: all chunks are loaded; sell on.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch   ARGV[3] how many chunks there were   ARGV[4] units left to sell
ARGV[5] units that the segment is given, sold ones too; none: those that the rebuild began with

Replies, the first that applies:
  {'refused', epoch}   another epoch or server, no rebuild under way, or a chunk is missing
  {'ended', epoch}     on sale; every server is told

Invariant: it clears `rebuilding`, never a freeze that came after it.
]]
local meta = redis.call('HMGET', META, 'epoch', 'server', 'frozen', 'chunk', 'expire_time')
if meta[1] ~= ARGV[2] or meta[2] ~= ARGV[1] or meta[3] ~= 'rebuilding' or meta[4] ~= ARGV[3] then
  return {'refused', meta[1] or '0'}
end
redis.call('SET', STOCK, ARGV[4], 'PXAT', meta[5])
redis.call('HDEL', META, 'frozen', 'chunk')
redis.call('HSET', META, 'revision', '1')
if ARGV[5] then
  redis.call('HSET', META, 'total', ARGV[5])
end
tell_reopened(meta[1], 1)
return {'ended', meta[1]}
