--[[
purge.lua: remove a segment whose activity is settled.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch under which SQL settled the offer

Replies, the first that applies:
  {'refused', epoch}   the segment was written under that epoch or a higher one; nothing changed
  {'nothing', '0'}     nothing was there
  {'purged', epoch}    everything is gone; the memory is given back in the background

Invariant: settling raises the epoch in SQL, so what is removed here can't be sold from any more.
]]
local epoch
if redis.call('TYPE', META)['ok'] == 'hash' then
  epoch = redis.call('HGET', META, 'epoch')
end
if epoch and tonumber(epoch) >= tonumber(ARGV[2]) then
  return {'refused', epoch}
end
local removed = redis.call(
  'UNLINK', STOCK, BUYERS, RESERVATIONS, RELEASED, UNACKED, META, TRANSFERS)
if removed == 0 then
  return {'nothing', '0'}
end
return {'purged', epoch or '0'}
