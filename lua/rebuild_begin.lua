--[[
rebuild_begin.lua: empty a segment, to be loaded again from SQL under a higher epoch.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch   ARGV[3] units of the offer   ARGV[4] expire_time of all keys, ms
ARGV[5] how many segments the offer has; none: 1

Replies, the first that applies:
  {'refused', epoch}   the engine's epoch is this one or higher, as for a repeat: start anew, higher
  {'begun', epoch}     everything is gone; frozen as `rebuilding`

Invariant: an epoch is begun once. `unacked` goes too, so what it holds later is of this epoch.
]]
local server, epoch, total, expire_time = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local current
if redis.call('TYPE', META)['ok'] == 'hash' then
  current = redis.call('HGET', META, 'epoch')
end
if current and tonumber(current) >= tonumber(epoch) then
  return {'refused', current}
end
redis.call('UNLINK', STOCK, BUYERS, RESERVATIONS, RELEASED, UNACKED, META, TRANSFERS)
redis.call('HSET', META, 'epoch', epoch, 'server', server, 'revision', '0', 'total', total,
  'held', '0', 'expire_time', expire_time, 'frozen', 'rebuilding', 'chunk', '0')
if ARGV[5] and ARGV[5] ~= '1' then
  redis.call('HSET', META, 'segments', ARGV[5])
end
redis.call('PEXPIREAT', META, expire_time)
return {'begun', epoch}
